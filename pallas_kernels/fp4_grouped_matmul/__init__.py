"""The MoE form: rows sorted by expert, one matrix an expert; FP4 weights, or BF16 for training."""

"""Prompts in, training batches out. `prompts.build_prompts` first, `batching.collate` last."""

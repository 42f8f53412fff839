"""BF16 or float32 rows to packed NVFP4 or MXFP4 in one pass over memory."""

"""One new token per sequence attends to a packed FP4 KV cache, where its K and V are written."""

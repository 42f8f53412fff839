"""Matmul of rows with a block-scaled FP4 matrix: W4A4, W4A8 and W4A16."""

"""Hugging Face checkpoints in and out: configurations, names, safetensors, NVFP4."""

"""Compiling for accelerators that are not here; `python -m trace_jax.aot --help`."""

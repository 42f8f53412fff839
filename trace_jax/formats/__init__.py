"""Number formats: pure numerics, the one specification. `quantize(x, "nvfp4")` is the way in."""

from trace_jax.formats.qarray import QArray, quantize

__all__ = ["QArray", "quantize"]

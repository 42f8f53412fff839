"""Number formats: pure numerics, the one specification. `quantize(x, "nvfp4")` is the way in."""

from trace_jax.formats.base import Element, Format
from trace_jax.formats.qarray import QArray, quantize, quantize_together
from trace_jax.formats.registry import get, spell

__all__ = ["Element", "Format", "QArray", "get", "quantize", "quantize_together", "spell"]

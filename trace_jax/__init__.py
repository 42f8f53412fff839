"""TRACE in JAX. The names of `_PUBLIC` are the library's front door; they load when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trace_jax.hf.load import load
    from trace_jax.hf.nvfp4 import load_quantised, save_nvfp4
    from trace_jax.hf.save import save
    from trace_jax.models.forward import logits

# where each lives; `import trace_jax.formats` must not pull in the models
_PUBLIC = {
    "load": "trace_jax.hf.load",
    "logits": "trace_jax.models.forward",
    "save": "trace_jax.hf.save",
    "save_nvfp4": "trace_jax.hf.nvfp4",
    "load_quantised": "trace_jax.hf.nvfp4",
}
__all__ = ["load", "load_quantised", "logits", "save", "save_nvfp4"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trace_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

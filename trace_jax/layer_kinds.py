"""What each layer of a model is made of, and where its parameters are stacked.

A layer has a mixer ("attention": full attention, or "linear": Gated DeltaNet) and a feed-forward
("moe", or "mlp": dense). Parameters of one component are stacked over the layers that have it:
`params["layers"]["attention"]["q"]` has as many rows as there are layers with full attention.
"""

import dataclasses
from typing import Any

COMPONENTS = ("attention", "linear", "moe", "mlp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The components of a layer."""

    mixer: str  # "attention" | "linear"
    ffn: str  # "moe" | "mlp"


def kinds(model: Any) -> tuple[Kind, ...]:
    """The kind of every layer of a `config.Model`, whose checks use this."""
    return tuple(
        Kind(
            mixer="attention" if (i + 1) % model.full_attention_every == 0 else "linear",
            ffn="mlp" if model.experts == 0 or i in model.dense_layers else "moe",
        )
        for i in range(model.layers)
    )


def layers_with(model: Any, component: str) -> tuple[int, ...]:
    """The layers that have a component, ascending: row r of its stack belongs to the r-th."""
    assert component in COMPONENTS, component
    every = enumerate(kinds(model))
    return tuple(i for i, kind in every if component in (kind.mixer, kind.ffn))

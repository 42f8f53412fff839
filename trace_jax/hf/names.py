"""The one table between tensors on disk and our parameters.

`table(model, layout)` lists every tensor of a checkpoint: its name, its shape, and for each part of
it the place in our tree that it fills. A place is a path and an index into that leaf; the places of
a table fill every leaf exactly once. `split` takes a tensor apart and `join` is its inverse, so
loading and saving read the same rows.

Layouts: experts one tensor each (`experts.0.gate_proj.weight`), fused (`experts.gate_up_proj`
(E, 2I, H), `experts.down_proj` (E, H, I)), or fused and transposed (E, H, 2I), (E, I, H); names
under `model.` or, in a multimodal checkpoint, `model.language_model.`. Source: transformers'
`conversion_mapping` and modelling files of the model types.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from trace_jax import config as cfg
from trace_jax import layer_kinds
from trace_jax.checks import require

EXPERTS = ("each", "fused", "fused_transposed")
PREFIXES = ("model.language_model.", "model.")
Path = tuple[str, ...]
Index = tuple[int | slice, ...]
Array = np.ndarray
Spelling = tuple[str, str, str]  # of the gate, up and down matrices
_USUAL: Spelling = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL: Spelling = ("w1", "w3", "w2")

# Parts of a checkpoint that a text model does not use: what, and how they are recognised.
LEFT_OUT = {
    "vision tower": re.compile(r"^(model\.)?visual\."),
    "multi-token prediction": re.compile(r"^(model\.)?(language_model\.)?mtp\."),
    "rotary buffers": re.compile(r"\.rotary_emb\.inv_freq$"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a part of a tensor goes: `leaf[index]` of the leaf at `path`."""

    path: Path
    index: Index

    @property
    def slab(self) -> tuple[Path, int | None]:
        """The leaf and which row of its stack it lies in; None if the leaf is no stack."""
        row = self.index[0] if self.index else None
        assert not isinstance(row, slice)
        return self.path, row

    @property
    def within(self) -> Index:
        """Where it lies in that row."""
        return self.index[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor on disk and its parts."""

    name: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    plain: bool  # one place that takes the tensor's elements in their order
    split: Callable[[Array], tuple[Array, ...]]  # the tensor -> what each place takes
    join: Callable[..., Array]  # the inverse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a checkpoint spells things."""

    experts: str = "each"
    prefix: str = "model."

    def __post_init__(self) -> None:
        require(self.experts in EXPERTS, "layout: experts", self.experts, f"one of {EXPERTS}")


def table(model: cfg.Model, layout: Layout | None = None) -> tuple[Tensor, ...]:
    """Every tensor of a checkpoint of `model`, layer by layer.

    Raises: ValueError if the model's vocabulary is unknown.
    """
    layout = layout or Layout()
    size, width = model.vocab_size, model.width
    require(size is not None, "config.model.vocab_size", None, "the rows of the embedding")
    V, p = int(size or 0), layout.prefix
    out = [_plain(f"{p}embed_tokens.weight", ("embed",), (), (V, width))]
    rows = {name: layer_kinds.layers_with(model, name) for name in layer_kinds.COMPONENTS}
    for i, kind in enumerate(layer_kinds.kinds(model)):
        at = f"{p}layers.{i}."
        out.append(_plain(f"{at}input_layernorm.weight", ("layers", "mixer_norm"), (i,), (width,)))
        for component in (kind.mixer, kind.ffn):
            row = rows[component].index(i)
            out.extend(_COMPONENTS[component](model, layout, at, row))
        name = f"{at}post_attention_layernorm.weight"
        out.append(_plain(name, ("layers", "ffn_norm"), (i,), (width,)))
    out.append(_plain(f"{p}norm.weight", ("final_norm",), (), (width,)))
    if not model.tie_embeddings:
        out.append(_plain("lm_head.weight", ("head",), (), (V, width)))
    return tuple(out)


def left_out(name: str) -> str | None:
    """What part of a checkpoint a tensor belongs to that a text model does not use, if any."""
    return next((part for part, pattern in LEFT_OUT.items() if pattern.search(name)), None)


def layout_of(model: cfg.Model, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of a checkpoint, seen from the names and shapes of its tensors."""
    prefix = next((p for p in PREFIXES if any(n.startswith(p) for n in shapes)), "model.")
    experts = "each"
    if model.experts:
        E, F, D = model.experts, model.expert_ffn, model.width
        ends = (".experts.gate_up_proj", ".experts.down_proj")
        fused = [(n.rpartition(".")[2], shape) for n, shape in shapes.items() if n.endswith(ends)]
        if fused:
            turned = {("gate_up_proj", (E, D, 2 * F)), ("down_proj", (E, F, D))}
            straight = {("gate_up_proj", (E, 2 * F, D)), ("down_proj", (E, D, F))}
            # where one of the matrices is square its shape says nothing; both cannot be
            experts = "fused_transposed" if _more(fused, turned, straight) else "fused"
    return Layout(experts=experts, prefix=prefix)


def _more(found: Collection[Any], a: Collection[Any], b: Collection[Any]) -> bool:
    return sum(f in a for f in found) > sum(f in b for f in found)


def _one(x: Array) -> tuple[Array, ...]:
    return (x,)


def _self(x: Array) -> Array:
    return x


def _turn(x: Array) -> tuple[Array, ...]:
    return (np.swapaxes(x, -1, -2),)


def _turn_back(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _plain(name: str, path: Path, index: Index, shape: tuple[int, ...]) -> Tensor:
    place = Place(path=path, index=index)
    return Tensor(name=name, shape=shape, places=(place,), plain=True, split=_one, join=_self)


def _turned(name: str, path: Path, index: Index, shape: tuple[int, ...]) -> Tensor:
    """The last two axes change places between disk (out, in) and us (in, out)."""
    place = Place(path=path, index=index)
    return Tensor(
        name=name, shape=shape, places=(place,), plain=False, split=_turn, join=_turn_back
    )


def _reshaped(
    name: str, path: Path, index: Index, shape: tuple[int, ...], ours: tuple[int, ...]
) -> Tensor:
    """An axis of length one, on disk only."""
    return Tensor(
        name=name,
        shape=shape,
        places=(Place(path=path, index=index),),
        plain=True,
        split=lambda x: (x.reshape(ours),),
        join=lambda x: x.reshape(shape),
    )


def _attention(model: cfg.Model, layout: Layout, at: str, row: int) -> Iterator[Tensor]:
    D, K = model.width, model.head_dim
    q, kv = model.heads * K, model.kv_heads * K
    path, at = ("layers", "attention"), f"{at}self_attn."
    # gated: the rows of a head are its query, then its gate, as in our leaf
    outs = {"q": q * (2 if model.gated_attention else 1), "k": kv, "v": kv}
    for name, out in outs.items():
        yield _turned(f"{at}{name}_proj.weight", (*path, name), (row,), (out, D))
    yield _turned(f"{at}o_proj.weight", (*path, "o"), (row,), (D, q))
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield _plain(f"{at}{name}.weight", (*path, name), (row,), (K,))


def _linear(model: cfg.Model, layout: Layout, at: str, row: int) -> Iterator[Tensor]:
    D, W, heads = model.width, model.conv_width, model.linear_value_heads
    keys = model.linear_key_heads * model.linear_key_dim
    values = heads * model.linear_value_dim
    channels = 2 * keys + values
    path, at = ("layers", "linear"), f"{at}linear_attn."
    if model.family == "qwen3_next":
        yield from _grouped(model, at, row)
    else:
        for ours, theirs, out in (
            ("qkv", "in_proj_qkv", channels),
            ("z", "in_proj_z", values),
            ("b", "in_proj_b", heads),
            ("a", "in_proj_a", heads),
        ):
            yield _turned(f"{at}{theirs}.weight", (*path, ours), (row,), (out, D))
    shape = (channels, 1, W)
    yield _reshaped(f"{at}conv1d.weight", (*path, "conv"), (row,), shape, (channels, W))
    for name in ("A_log", "dt_bias"):
        yield _plain(f"{at}{name}", (*path, name), (row,), (heads,))
    yield _plain(f"{at}norm.weight", (*path, "norm"), (row,), (model.linear_value_dim,))
    yield _turned(f"{at}out_proj.weight", (*path, "out"), (row,), (D, values))


def _grouped(model: cfg.Model, at: str, row: int) -> Iterator[Tensor]:
    """Qwen3-Next: rows grouped by key head, [q | k | v's | z's] and [b's | a's]."""
    D, Hk, dk = model.width, model.linear_key_heads, model.linear_key_dim
    ratio = model.linear_value_heads // Hk
    block, path = ratio * model.linear_value_dim, ("layers", "linear")
    ends = (dk, 2 * dk, 2 * dk + block)

    def split_qkvz(x: Array) -> tuple[Array, ...]:
        q, k, v, z = np.split(x.reshape(Hk, -1, D), ends, axis=1)
        flat = [part.reshape(-1, D) for part in (q, k, v)]
        return np.concatenate(flat).T, z.reshape(-1, D).T

    def join_qkvz(qkv: Array, z: Array) -> Array:
        parts = np.split(qkv.T, (Hk * dk, 2 * Hk * dk))
        grouped = [part.reshape(Hk, -1, D) for part in (*parts, z.T)]
        return np.concatenate(grouped, axis=1).reshape(-1, D)

    def split_ba(x: Array) -> tuple[Array, ...]:
        b, a = np.split(x.reshape(Hk, 2 * ratio, D), 2, axis=1)
        return b.reshape(-1, D).T, a.reshape(-1, D).T

    def join_ba(b: Array, a: Array) -> Array:
        grouped = [part.T.reshape(Hk, ratio, D) for part in (b, a)]
        return np.concatenate(grouped, axis=1).reshape(-1, D)

    for name, ours, out, split, join in (
        ("in_proj_qkvz", ("qkv", "z"), Hk * 2 * (dk + block), split_qkvz, join_qkvz),
        ("in_proj_ba", ("b", "a"), Hk * 2 * ratio, split_ba, join_ba),
    ):
        yield Tensor(
            name=f"{at}{name}.weight",
            shape=(out, D),
            places=tuple(Place(path=(*path, leaf), index=(row,)) for leaf in ours),
            plain=False,
            split=split,
            join=join,
        )


def _moe(model: cfg.Model, layout: Layout, at: str, row: int) -> Iterator[Tensor]:
    D, E, F, S = model.width, model.experts, model.expert_ffn, model.shared_ffn
    # transformers renames Mixtral's module where it fuses the experts
    mixtral = model.family == "mixtral" and layout.experts == "each"
    path, at = ("layers", "moe"), f"{at}{'block_sparse_moe' if mixtral else 'mlp'}."
    gate_up, down = (*path, "gate_up"), (*path, "down")
    yield _turned(f"{at}gate.weight", (*path, "router"), (row,), (E, D))
    if layout.experts == "each":
        for e in range(E):
            spelling = _MIXTRAL if mixtral else _USUAL
            yield from _swiglu(f"{at}experts.{e}.", gate_up, down, (row, e), D, F, spelling)
    elif layout.experts == "fused":
        yield _plain(f"{at}experts.gate_up_proj", gate_up, (row,), (E, 2 * F, D))
        yield _plain(f"{at}experts.down_proj", down, (row,), (E, D, F))
    else:
        yield _turned(f"{at}experts.gate_up_proj", gate_up, (row,), (E, D, 2 * F))
        yield _turned(f"{at}experts.down_proj", down, (row,), (E, F, D))
    if S:
        both = (*path, "shared_gate_up"), (*path, "shared_down")
        yield from _swiglu(f"{at}shared_expert.", *both, (row,), D, S)
        name = f"{at}shared_expert_gate.weight"
        yield _reshaped(name, (*path, "shared_gate"), (row,), (1, D), (D,))


def _mlp(model: cfg.Model, layout: Layout, at: str, row: int) -> Iterator[Tensor]:
    path, D = ("layers", "mlp"), model.width
    leaves = (*path, "gate_up"), (*path, "down")
    yield from _swiglu(f"{at}mlp.", *leaves, (row,), D, model.dense_ffn)


def _swiglu(
    at: str, gate_up: Path, down: Path, index: Index, D: int, F: int, names: Spelling = _USUAL
) -> Iterator[Tensor]:
    gate, up, last = names
    yield _plain(f"{at}{gate}.weight", gate_up, (*index, slice(0, F)), (F, D))
    yield _plain(f"{at}{up}.weight", gate_up, (*index, slice(F, 2 * F)), (F, D))
    yield _plain(f"{at}{last}.weight", down, index, (D, F))


_COMPONENTS: dict[str, Callable[[cfg.Model, Layout, str, int], Iterator[Tensor]]] = {
    "attention": _attention,
    "linear": _linear,
    "moe": _moe,
    "mlp": _mlp,
}

"""What a model is made of and what it costs, from shapes alone: nothing is allocated or compiled.

Sizes are those of the arrays that trainer and sampler would hold, by asking the very functions
that make them for their shapes.
"""

import collections
import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax import compare, layer_kinds, sources, weight_sync
from trace_jax import config as cfg
from trace_jax.checks import message
from trace_jax.data import chat
from trace_jax.data.tokenizer import Tokenizer, load_tokenizer
from trace_jax.models import gated_delta, kv_cache, transformer
from trace_jax.qat import audit, policy_recipe
from trace_jax.qat import plan as qat_plan

# of the parts of a model; experts are those of which each token uses some
PARTS = ("embedding", "head", "attention", "linear", "router", "experts", "shared expert", "mlp")
PARTS += ("norms",)
GUIDANCE = ("trace-full", "trace-compact")  # of compare.MODES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """The facts. Sizes are bytes; `None` where there is nothing to look at."""

    name: str
    kind: str  # what was found: "checkpoint", "NVFP4 export", "run", "known model"
    model: cfg.Model
    layers: dict[str, list[int]]  # by "mixer + feed-forward"
    parameters: dict[str, int]  # by part
    active: dict[str, int]  # of them, what one token uses
    disk: dict[str, Any] | None  # files, bytes, and bytes by dtype
    trainer_bytes: int  # float32 master weights
    sampler_bytes: dict[str, int]  # by part, as the quant section says
    sampler_bf16_bytes: dict[str, int]  # the same without quantisation
    kv_token_bytes: int  # of all layers
    kv_bf16_token_bytes: int
    state_bytes: int  # of Gated DeltaNet, per sequence
    guidance_bytes: dict[str, int]  # per token, by mode
    audit: audit.Audit
    tokenizer: dict[str, Any] | None

    def to_json(self) -> str:
        """The same as one JSON object; the audit as a list of rows."""
        values = dataclasses.asdict(dataclasses.replace(self, audit=audit.Audit(rows=())))
        return json.dumps(values | {"audit": json.loads(self.audit.to_json())}, indent=1)


def inspect(
    name: str, model: cfg.Model, quant: cfg.Quant, source: sources.Source | None = None
) -> Inspection:
    """Looks at a model, and at the files of `source` if there are some.

    Raises: ValueError if the quant section does not fit the model (a rule that matches nothing).
    """
    tokenizer = None if source is None else _tokenizer(source)
    ids = model.vocab_size or (tokenizer or {}).get("ids", 0)
    assert ids, "a model without vocabulary and tokenizer"
    shapes = jax.eval_shape(lambda: transformer.init(model, ids, jax.random.key(0)))
    sized = _by_part(shapes, lambda leaf: leaf.size)
    fraction = model.experts_per_token / model.experts if model.experts else 1.0
    active = {part: round(n * (fraction if part == "experts" else 1)) for part, n in sized.items()}
    plain = dataclasses.replace(quant, rollout="bf16", trainer="bf16")
    groups: dict[str, list[int]] = {}
    for i, kind in enumerate(layer_kinds.kinds(model)):
        groups.setdefault(f"{kind.mixer} + {kind.ffn}", []).append(i)
    return Inspection(
        name=name,
        kind="known model" if source is None else source.kind,
        model=dataclasses.replace(model, vocab_size=ids),
        layers=groups,
        parameters=sized,
        active=active,
        disk=None if source is None else _disk(source.path),
        trainer_bytes=4 * sum(sized.values()),
        sampler_bytes=_sampler_bytes(model, quant, shapes),
        sampler_bf16_bytes=_sampler_bytes(model, plain, shapes),
        kv_token_bytes=_kv_bytes(model, quant),
        kv_bf16_token_bytes=_kv_bytes(model, plain),
        state_bytes=_state_bytes(model),
        guidance_bytes=_guidance_bytes(model, quant),
        audit=policy_recipe.trainer_audit(model, quant, shapes),
        tokenizer=tokenizer,
    )


def _part(path: tuple[str, ...]) -> str:
    """The part of a model that a parameter, or a piece of its packed form, belongs to."""
    if path[0] in ("embed", "head"):
        return {"embed": "embedding", "head": "head"}[path[0]]
    names = [name for name in path if not name.isdigit()]
    if any(name.endswith("norm") for name in names) and "linear" not in names:
        return "norms"
    component = next(name for name in names if name in layer_kinds.COMPONENTS)
    if component != "moe":
        return component
    leaf = names[names.index("moe") + 1]
    return "router" if leaf == "router" else "shared expert" if "shared" in leaf else "experts"


def _by_part(tree: Any, size: Any) -> dict[str, int]:
    """Sums a size of leaves by part, in the order of PARTS; parts that are absent are left out."""
    sums: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        sums[_part(tuple(keys))] += int(size(leaf))
    return {part: sums[part] for part in PARTS if part in sums}


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _sampler_bytes(model: cfg.Model, quant: cfg.Quant, shapes: Any) -> dict[str, int]:
    sync = weight_sync.make_sync(model, quant)
    return _by_part(jax.eval_shape(lambda p: sync(p, 0).params, shapes), _nbytes)


def _kv_bytes(model: cfg.Model, quant: cfg.Quant) -> int:
    """Of one token in the caches of all layers with full attention."""
    token = jax.ShapeDtypeStruct((model.kv_heads, model.head_dim), jnp.dtype(model.compute_dtype))
    total = 0
    for segment in qat_plan.side_segments(quant, model, quant.rollout):
        for plan in segment.layers:
            if plan.kind.mixer == "attention":

                def stored(x: jax.Array, format: Any = plan.kv) -> list[jax.Array]:
                    return jax.tree.leaves(kv_cache.encode(x, format))

                total += 2 * sum(map(_nbytes, jax.eval_shape(stored, token)))
    return total


def _state_bytes(model: cfg.Model) -> int:
    count = len(layer_kinds.layers_with(model, "linear"))
    if not count:
        return 0
    dtype = jnp.dtype(model.compute_dtype)
    state = jax.eval_shape(lambda: gated_delta.empty_state(model, 1, dtype))
    return count * sum(_nbytes(leaf) for leaf in jax.tree.leaves(state))


def _guidance_bytes(model: cfg.Model, quant: cfg.Quant) -> dict[str, int]:
    found = {}
    if quant.acts is not None or quant.kv is not None:
        for mode in GUIDANCE:
            some = dataclasses.replace(quant, rollout="fp4", **compare.MODES[mode])
            spec = qat_plan.guidance_spec(some, model)
            found[mode] = qat_plan.bytes_per_token(spec, model)
    spec = qat_plan.guidance_spec(quant, model)
    return found | {"as configured": qat_plan.bytes_per_token(spec, model)}


def _disk(path: pathlib.Path) -> dict[str, Any]:
    """Files of a checkpoint; of safetensors also bytes by dtype, read from their headers."""
    files = [p for p in path.rglob("*") if p.is_file()]
    by_dtype: collections.Counter[str] = collections.Counter()
    for shard in sorted(path.glob("*.safetensors")):
        for tensor, entry in safetensors_header(shard).items():
            if tensor != "__metadata__":
                first, end = entry["data_offsets"]
                by_dtype[entry["dtype"]] += end - first
    total = sum(p.stat().st_size for p in files)
    return {"files": len(files), "bytes": total, "bytes by dtype": dict(by_dtype)}


def safetensors_header(path: pathlib.Path) -> Mapping[str, Any]:
    """The JSON at the start of a safetensors file. Raises: ValueError naming a damaged file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        text = file.read(length) if 0 < length < path.stat().st_size else b""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(message(str(path), "no header", "a safetensors file")) from error


def _tokenizer(source: sources.Source) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(source.tokenizer, "--model")
    except ValueError as error:  # a base model may have none; the model can be looked at
        return {"problem": str(error)}
    found: dict[str, Any] = {}
    try:
        sources.require_tokenizer_fits(tokenizer.vocab_size, source.model, str(source.path))
        if tokenizer.template is not None:
            answer = tokenizer.decode(tokenizer.answer_prefix(), special=True)
            found["an answer follows"] = answer
    except ValueError as error:
        found["warning"] = str(error)
    template = tokenizer.template
    switch = None if template is None else chat.thinking_switch(template)
    return {
        "ids": tokenizer.vocab_size,
        "stop": {_token(tokenizer, i): i for i in tokenizer.stop_ids},
        "pad": {_token(tokenizer, tokenizer.pad_id): tokenizer.pad_id},
        "template characters": None if template is None else len(template),
        "thinking switch": switch,
    } | found


def _token(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.hf.id_to_token(token) or "?"

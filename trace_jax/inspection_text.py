"""An `Inspection` as text to read."""

from typing import Any

from trace_jax.inspection import Inspection
from trace_jax.qat.audit import ranges

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


def text(found: Inspection) -> str:
    """The whole report."""
    parts = [_head(found), _layers(found), _parts(found), _totals(found), _tokenizer(found)]
    parts.append("what training would quantise\n" + str(found.audit))
    return "\n\n".join(parts)


def size(n: int) -> str:
    """Bytes with a unit."""
    return next((f"{n / unit:.2f} {name}" for unit, name in UNITS if n >= unit), f"{n} B")


def count(n: int) -> str:
    """A number of parameters."""
    return next((f"{n / unit:.2f} {name}" for unit, name in COUNTS if n >= unit), str(n))


def _head(found: Inspection) -> str:
    m = found.model
    total, active = sum(found.parameters.values()), sum(found.active.values())
    tied = ", tied to the head" if m.tie_embeddings else ""
    lines = [
        f"{found.name}: {found.kind}, family {m.family}",
        f"{count(total)} parameters, {count(active)} active per token",
        f"{m.layers} layers of width {m.width}, vocabulary {m.vocab_size}{tied}",
        f"attention: {m.heads} query and {m.kv_heads} key/value heads of {m.head_dim}"
        + (", q and k normalised" if m.qk_norm else "")
        + (", gated" if m.gated_attention else "")
        + f"; RoPE theta {m.rope_theta:g}, of {m.rotary_fraction:.0%} of a head",
    ]
    if m.experts:
        shared = f", a shared expert of {m.shared_ffn}" if m.shared_ffn else ""
        lines.append(
            f"experts: {m.experts}, {m.experts_per_token} a token, of width {m.expert_ffn}{shared}"
        )
    if m.dense_ffn:
        lines.append(f"dense MLPs of width {m.dense_ffn}")
    if found.state_bytes:
        lines.append(
            f"Gated DeltaNet: {m.linear_key_heads} key heads of {m.linear_key_dim}, "
            f"{m.linear_value_heads} value heads of {m.linear_value_dim}"
        )
    return "\n".join(lines)


def _layers(found: Inspection) -> str:
    rows = [("layers", "mixer + feed-forward", "which")]
    for kind, ids in found.layers.items():
        rows.append((str(len(ids)), kind, ranges(ids)))
    return _table(rows)


def _parts(found: Inspection) -> str:
    rows: list[tuple[str, ...]] = [
        ("part", "parameters", "active", "sampler, BF16", "sampler, as configured")
    ]
    for part, n in found.parameters.items():
        sizes = (size(found.sampler_bf16_bytes[part]), size(found.sampler_bytes[part]))
        rows.append((part, count(n), count(found.active[part]), *sizes))
    sums = (found.sampler_bf16_bytes, found.sampler_bytes)
    counts = (count(sum(n.values())) for n in (found.parameters, found.active))
    rows.append(("all", *counts, *(size(sum(n.values())) for n in sums)))
    return _table(rows)


def _totals(found: Inspection) -> str:
    rows = [("memory and bytes", "")]
    if found.disk is not None:
        kinds = ", ".join(f"{size(n)} {dtype}" for dtype, n in found.disk["bytes by dtype"].items())
        of = f" ({kinds})" if kinds else ""
        rows.append(("on disk", f"{size(found.disk['bytes'])} in {found.disk['files']} files{of}"))
    rows += [
        ("trainer: float32 weights", size(found.trainer_bytes)),
        ("trainer: weights, gradient, AdamW", size(4 * found.trainer_bytes)),
        ("KV cache per token, BF16", size(found.kv_bf16_token_bytes)),
        ("KV cache per token, as configured", size(found.kv_token_bytes)),
    ]
    if found.state_bytes:
        rows.append(("Gated DeltaNet state per sequence", size(found.state_bytes)))
    for mode, n in found.guidance_bytes.items():
        rows.append((f"guidance per token, {mode}", size(n)))
    return _table(rows)


def _tokenizer(found: Inspection) -> str:
    if found.tokenizer is None:
        return "tokenizer: not looked at (no files)"
    return _table([("tokenizer", ""), *((name, _shown(v)) for name, v in found.tokenizer.items())])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{token} {i}" for token, i in value.items())
    if value is None:
        return "none"
    return value if isinstance(value, str) and "got" in value else repr(value)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in cells)

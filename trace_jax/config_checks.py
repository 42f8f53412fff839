"""What each section of the configuration refuses, and what the whole refuses.

A section refuses what it can know alone. `config` refuses what takes several sections to see, and
what holds for training only: evaluation samples with `top_p`, or a group of one.
"""

import re
import urllib.parse
from typing import Any

from pallas_kernels.common.impls import IMPLS
from pallas_kernels.common.packed import DECODED
from pallas_kernels.fp4_matmul.operands import WEIGHTS
from pallas_kernels.quantize import rounding
from trace_jax import formats, layer_choice
from trace_jax.checks import require
from trace_jax.field_checks import check
from trace_jax.guidance import record
from trace_jax.model_checks import quant_on_model

KERNELS = {  # kernels of each op, beside their interpreted forms
    "fake_quant": ("xla", "triton", "mosaic_tpu"),
    "grouped_matmul": ("xla", "triton"),
    "token_logprob": ("xla", "triton", "mosaic_tpu"),
    "quantize": ("xla", "triton", "mosaic_tpu"),
    "fp4_matmul": ("xla", "triton", "mosaic_gpu"),
    "kv_attention": ("xla", "triton"),
}


def quant(section: Any) -> None:
    """Modes that can be combined, whatever the model."""
    check(
        section,
        "config.quant",
        choices={
            "rollout": ("bf16", "fp4"),
            "trainer": ("bf16", "qat", "trace"),
            "mlps": ("experts", "all"),
            "guide": record.KINDS,
            "guide_scale_bits": record.SCALE_BITS,
            "guide_global_bits": record.GLOBAL_BITS,
        },
        least={"keep_first": 0, "keep_last": 0},
    )
    require(
        not (section.trainer == "trace" and section.rollout == "bf16"),
        "config.quant.trainer",
        "trace with rollout bf16",
        "a quantised rollout to be guided by",
        "quant.rollout=fp4, or quant.trainer=bf16",
    )
    chosen = {name: getattr(section, name) for name in ("weights", "acts", "kv")}
    for name, text in chosen.items():
        try:
            if text is not None:
                formats.get(text)
        except ValueError as error:  # says what is wrong with the text; add where it stands
            raise ValueError(f"config.quant.{name}: {error}") from error
    require(
        not section.quantised or any(chosen.values()),
        "config.quant",
        f"no format with rollout {section.rollout} and trainer {section.trainer}",
        "something to quantise",
        "set weights, acts or kv, or quant.rollout=bf16 and quant.trainer=bf16",
    )
    for name in ("acts", "kv"):
        _check_tokens(section, f"config.quant.{name}", chosen[name])
    guiding = section.acts is not None or section.kv is not None
    require(
        guiding or section.trainer != "trace",
        "config.quant.trainer",
        "trace with acts and kv off",
        "activations or a KV cache whose rounding can be guided; weights need none",
        "quant.trainer=qat, or set quant.acts or quant.kv",
    )
    require(
        section.acts is not None or not section.guide_hidden,
        "config.quant.guide_hidden",
        "True with acts off",
        "quantised expert inputs: it guides the input of their second matmul",
        "quant.guide_hidden=false, or quant.acts=nvfp4",
    )
    layer_choice.parse(section.guide_layers)


def _check_tokens(section: Any, where: str, text: str | None) -> None:
    """A format for tokens: each is quantised from itself alone, and its record can be packed."""
    if text is None:
        return
    format = formats.get(text)
    need = "a format that quantises each token alone: a tile also takes its neighbours"
    require(format.per_row, where, text, need, "block_shape=1x16")
    ordered = format.scale_bytes == 1
    require(
        ordered or section.guide_scale_bits == 8,
        "config.quant.guide_scale_bits",
        f"{section.guide_scale_bits} with {where.rpartition('.')[2]}={text}",
        f"8: the {format.scale_bytes} scale bytes of {format.name} are not magnitudes in order",
        "quant.guide_scale_bits=8",
    )


def data(section: Any) -> None:
    """One source of prompts, and a reward that it can feed."""
    counts = ("train_size", "eval_size", "prompts_per_step", "max_prompt_tokens")
    check(
        section,
        "config.data",
        choices={"overlong": ("refuse", "drop", "truncate")},
        least=dict.fromkeys(counts, 1),
    )
    require(
        bool(section.task) != bool(section.path),
        "config.data",
        f"task {section.task!r} and path {section.path!r}",
        "exactly one of them",
        "data.task=none with data.path=FILE trains on your own JSONL",
    )
    require(
        bool(section.task) or not section.task_args,
        "config.data.task_args",
        section.task_args,
        "() without a task",
    )
    names = [name for name, _ in section.task_args]
    require(len(names) == len(set(names)), "config.data.task_args", names, "each name once")
    require(
        section.eval_path is None or bool(section.path),
        "config.data.eval_path",
        section.eval_path,
        "data.path as well",
        "a task makes its own held-out prompts: data.eval_path=none",
    )
    require(
        section.reward in ("exact", "number", "task")
        or re.fullmatch(r"[\w.]+:\w+", section.reward) is not None,
        "config.data.reward",
        repr(section.reward),
        "exact, number, task or module:function",
    )
    require(
        section.reward != "task" or bool(section.task),
        "config.data.reward",
        "task, with data.task off",
        "a reasoning-gym task to judge the answers",
        "data.reward=exact",
    )
    require(
        section.train_size >= section.prompts_per_step,
        "config.data.train_size",
        section.train_size,
        f">= prompts_per_step ({section.prompts_per_step})",
    )


def warm_start(section: Any) -> None:
    """Types and bounds."""
    check(
        section,
        "config.warm_start",
        least={"max_steps": 1, "batch": 1, "check_every": 1},
        above={"learning_rate": 0, "stop_at_accuracy": 0},
        most={"stop_at_accuracy": 1},
    )


def rollout(section: Any) -> None:
    """Types and bounds; evaluation may truncate and need not sample groups."""
    counts = ("group_size", "max_new_tokens", "top_k", "bucket_tokens", "bucket_batch")
    check(
        section,
        "config.rollout",
        choices={"engine": ("jax", "sglang")},
        least=dict.fromkeys(counts, 1) | {"version_lag": 0},
        above={"temperature": 0, "top_p": 0},
        most={"top_p": 1},
    )


def server(section: Any) -> None:
    """Types, choices and bounds; what is at the other end shows when it is asked."""
    times = ("start_timeout_s", "request_timeout_s", "update_timeout_s")
    check(
        section,
        "config.server",
        choices={"device": ("cpu", "cuda"), "pause": ("in_place", "retract", "abort")},
        least={"inflight": 1, "retries": 0},
        above=dict.fromkeys(times, 0),
    )
    for url in section.urls:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
        require(bool(good), "config.server.urls", repr(url), "like http://127.0.0.1:30000")


def asynchrony(section: Any) -> None:
    """Types and bounds."""
    check(section, "config.asynchrony", least={"max_version_diff": 0, "ahead": 1})


def loss(section: Any) -> None:
    """Types and bounds."""
    check(
        section,
        "config.loss",
        least={"kl_coef": 0, "importance_cap": 1},
        above={"clip_low": 0, "clip_high": 0, "std_floor": 0},
        below={"clip_low": 1},
    )


def optim(section: Any) -> None:
    """Types, choices and bounds."""
    check(
        section,
        "config.optim",
        choices={"schedule": ("constant", "linear", "cosine")},
        least={
            **dict.fromkeys(("learning_rate", "warmup_steps", "b1", "b2", "weight_decay"), 0),
            **dict.fromkeys(("minibatches", "micro_batch"), 1),
        },
        above={"max_grad_norm": 0},
        below={"b1": 1, "b2": 1},
    )


def run(section: Any) -> None:
    """Types and bounds."""
    check(
        section,
        "config.run",
        least={
            **dict.fromkeys(("eval_every", "eval_samples", "checkpoint_every"), 1),
            # A corrupt newest checkpoint must leave another to fall back to.
            "keep_checkpoints": 2,
            "samples_kept": 0,
            "guidance_mib": 0,
        },
    )


def kernels(section: Any) -> None:
    """What each op has; whether the device can run it shows when the stages are built."""
    interpreted = {
        op: tuple(i for i in IMPLS if i.removesuffix("_interpret") in has)
        for op, has in KERNELS.items()
    }
    check(section, "config.kernels", choices=interpreted)


def config(section: Any) -> None:
    """What takes several sections to see."""
    check(section, "config", least={"seed": 0, "steps": 0}, below={"seed": 2**32})
    require(
        re.fullmatch(r"[\w.-]+", section.name) is not None,
        "config.name",
        repr(section.name),
        "letters, digits, '.', '_' and '-': it names the run directory",
    )
    require(
        section.warm_start is None or section.run.init_from is None,
        "config.run.init_from",
        f"{section.run.init_from} together with a warm start",
        "one way to start",
        "warm_start=none, or run.init_from=none",
    )
    _check_sampling(section.rollout)
    _check_batch(section.data, section.rollout, section.optim)
    _check_kernels(section)
    _check_engine(section)
    if section.quant.quantised:
        quant_on_model(section.model, section.quant)
        require(
            section.quant.guide_global_bits == 32 or section.model.compute_dtype == "bfloat16",
            "config.quant.guide_global_bits",
            f"16 with compute_dtype {section.model.compute_dtype}",
            "BF16 activations, whose largest magnitude 16 bits hold exactly",
            "quant.guide_global_bits=32",
        )


def _check_engine(config: Any) -> None:
    """What the engine that samples cannot do, and ways to be stale that exclude each other."""
    require(
        config.asynchrony is None or config.rollout.version_lag == 0,
        "config.rollout.version_lag",
        f"{config.rollout.version_lag} with asynchrony",
        "0: asynchronous rollouts are as stale as they turn out to be",
        "rollout.version_lag=0, or asynchrony=none",
    )
    if config.rollout.engine != "sglang":
        return
    model, quant = config.model, config.quant
    where, fix = "config.rollout.engine", "rollout.engine=jax"
    family = f"sglang for {model.family} with {model.experts} experts"
    ours = model.family == "qwen3_moe" and model.experts > 0
    require(ours, where, family, "family qwen3_moe with experts", fix)
    got = f"sglang with quant.mlps {quant.mlps}"
    require(not quant.quantised or quant.mlps == "experts", where, got, "quant.mlps=experts", fix)


def kernels_in_use(config: Any) -> set[str]:
    """The ops of `config.kernels` that this configuration has work for."""
    model, quant = config.model, config.quant
    used = {"token_logprob"}
    if model.experts:
        used.add("grouped_matmul")
    if quant.trainer != "bf16" and (quant.acts or quant.kv):
        used.add("fake_quant")
    if quant.rollout != "bf16":
        sampler = {"quantize": quant.acts, "fp4_matmul": quant.weights, "kv_attention": quant.kv}
        used |= {op for op, format in sampler.items() if format}
    return used


def _check_kernels(config: Any) -> None:
    """That the kernels know the formats that they are chosen for, before anything is spent."""
    quant, used = config.quant, kernels_in_use(config)
    needs = {
        "fake_quant": ("acts", "kv"),
        "quantize": ("acts",),
        "fp4_matmul": ("weights", "acts"),
        "kv_attention": ("kv",),
    }
    for op, names in needs.items():
        impl = getattr(config.kernels, op)
        if impl == "xla" or op not in used:
            continue
        chosen = {name: text for name in names if (text := getattr(quant, name)) is not None}
        for name, text in chosen.items():
            reason = (
                _undecoded(name, text)
                if op == "fp4_matmul"  # the others round to it, too
                else rounding.unsupported(formats.get(text))
            )
            if reason is not None:
                got = f"{impl} with quant.{name}={text} ({reason})"
                need = "a format that the kernel knows"
                fix = f"kernels.{op}=xla, or another quant.{name}"
                require(False, f"config.kernels.{op}", got, need, fix, NotImplementedError)
        if impl == "mosaic_gpu":
            both = {formats.get(text).name for text in chosen.values()}
            same = len(chosen) == 2 and len(both) == 1 and both <= set(WEIGHTS)
            need = "NVFP4 times NVFP4 or MXFP4 times MXFP4"
            got = f"mosaic_gpu with quant.weights={quant.weights}, quant.acts={quant.acts}"
            where, fix = "config.kernels.fp4_matmul", "kernels.fp4_matmul=triton"
            require(same, where, got, need, fix, NotImplementedError)


def _undecoded(field: str, text: str) -> str | None:
    decoded = WEIGHTS if field == "weights" else DECODED
    return None if formats.get(text).name in decoded else f"it decodes {', '.join(decoded)}"


def _check_sampling(rollout: Any) -> None:
    """The loss compares log-probs of the full distribution within groups."""
    for name in ("top_p", "top_k"):
        require(
            getattr(rollout, name) is None,
            f"config.rollout.{name}",
            getattr(rollout, name),
            "none in training: truncation renormalises the log-probs that the loss compares",
            f"rollout.{name}=none",
        )
    require(
        rollout.group_size >= 2,
        "config.rollout.group_size",
        rollout.group_size,
        ">= 2",
        "a group baseline needs two samples",
    )


def _check_batch(data: Any, rollout: Any, optim: Any) -> None:
    """Prompts, samples, minibatches and micro-batches divide evenly."""
    sequences = data.prompts_per_step * rollout.group_size
    require(
        sequences % optim.minibatches == 0,
        "config.optim.minibatches",
        optim.minibatches,
        f"a divisor of prompts_per_step * group_size ({sequences})",
    )
    update = sequences // optim.minibatches
    largest = max(n for n in range(1, min(optim.micro_batch, update) + 1) if update % n == 0)
    require(
        update % optim.micro_batch == 0,
        "config.optim.micro_batch",
        optim.micro_batch,
        f"a divisor of prompts_per_step * group_size / minibatches ({update})",
        f"optim.micro_batch={largest}",
    )

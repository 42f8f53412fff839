"""The whole configuration: one frozen dataclass per stage. An experiment is a function giving one.

Only this module, `loop.py`, `configs/` and `launch/` see `Config`; every stage gets its section.
`None` means off. Contradictions are refused when a section is built, before anything starts
(`config_checks.py`). `overrides.py` loads, saves and overrides.
"""

import dataclasses

from trace_jax import config_checks, model_checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One decoder; these fields tell Qwen3-MoE, Qwen3, Llama, Qwen3-Next and Qwen3.5-MoE apart.

    `models/known.py` has real models by name, `trace_jax.load` reads a checkpoint's own.
    """

    family: str = "qwen3_moe"  # Hugging Face's model type, for names and layouts on disk only
    vocab_size: int | None = None  # V; None: the tokenizer's
    width: int = 128  # D
    layers: int = 4  # L
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False  # RMSNorm multiplies by 1 + weight
    tie_embeddings: bool = True
    compute_dtype: str = "bfloat16"  # "bfloat16" | "float32"; master weights are float32
    # full attention
    heads: int = 4  # H
    kv_heads: int = 2  # J
    head_dim: int = 32  # K
    qk_norm: bool = True
    gated_attention: bool = False  # multiplied by sigmoid(gate) before the output projection
    rope_theta: float = 10_000.0
    rotary_fraction: float = 1.0  # of a head, from its start, that is rotated
    rope_llama3: tuple[float, float, float, int] | None = None  # factor, low, high, old context
    # Gated DeltaNet
    full_attention_every: int = 1  # layer i attends if (i+1) % this == 0; the others are linear
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0  # of a head
    linear_value_dim: int = 0  # of a head
    conv_width: int = 4
    # feed-forward
    experts: int = 8  # E; 0: every layer has a dense MLP
    experts_per_token: int = 2  # X
    expert_ffn: int = 64  # F
    renormalise_gates: bool = True  # gates of a token's experts sum to 1
    shared_ffn: int = 0  # width of the shared expert, weighted by a sigmoid; 0: none
    dense_ffn: int = 0  # width of dense MLPs
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model that have a dense MLP

    def __post_init__(self) -> None:
        model_checks.model(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quant:
    """What runs in FP4 on each side, and what of the rollout's rounding the trainer is told."""

    rollout: str = "fp4"  # "bf16" | "fp4": whether the sampler uses the formats below
    trainer: str = "trace"  # "bf16" | "qat" (rounds on its own) | "trace" (guided by the rollout)
    weights: str | None = "nvfp4"  # format of routed-expert weights, one global scale a matrix
    acts: str | None = "nvfp4"  # of the inputs of both expert matmuls, one global scale a token
    mlps: str = "experts"  # what `weights` and `acts` are of: "experts" | "all" (dense MLPs too)
    kv: str | None = "nvfp4:global_rule=one"  # of the KV cache, per token and head
    keep_first: int = 0  # layers at the start whose experts and KV stay in high precision
    keep_last: int = 0  # the same at the end
    guide: str = "codes"  # "codes" (4 bits a value) | "mantissa" (1 bit a value)
    guide_scale_bits: int = 8  # low bits kept of a scale byte: 8 (all of them), 4, 3 or 2
    guide_global_bits: int = 32  # of a global scale: 32, or 16 (exact for BF16 activations)
    guide_layers: str = "all"  # "all" | "latter_half" | "last:N" | "0,3,5" | "expert_in=all kv=2"
    guide_hidden: bool = (
        False  # also guide the input of the second expert matmul (beyond the paper)
    )

    def __post_init__(self) -> None:
        config_checks.quant(self)

    @property
    def quantised(self) -> bool:
        """Whether either side runs in FP4."""
        return self.rollout != "bf16" or self.trainer != "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts and answers: a reasoning-gym task or the user's own JSONL."""

    task: str | None = "spell_backward"  # a reasoning-gym task; None: use `path`
    task_args: tuple[tuple[str, int | float | str | bool], ...] = ()  # e.g. (("min_word_len", 3),)
    path: str | None = None  # JSONL with one {"prompt", "answer"} object a line
    eval_path: str | None = None  # held-out JSONL; None: split off `path`
    train_size: int = 4096  # prompts
    eval_size: int = 128  # held-out prompts, disjoint from training
    prompts_per_step: int = 32  # P
    max_prompt_tokens: int = 48
    overlong: str = "refuse"  # "refuse" | "drop" (counted) | "truncate" (left side, counted)
    tokenizer: str = "byte"  # "byte", or a directory with tokenizer.json (+ chat template)
    system_prompt: str | None = None
    thinking: bool | None = None  # switches the chat template's thinking; None: its default
    reward: str = "exact"  # "exact" | "number" | "task" | "module:function" (reward/score.py)

    def __post_init__(self) -> None:
        config_checks.data(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised warm start from scratch, in the trainer's precision without guidance."""

    max_steps: int = 300
    batch: int = 64
    learning_rate: float = 1e-3
    stop_at_accuracy: float | None = 0.4  # held-out *training-split* sample accuracy that ends it
    check_every: int = 20

    def __post_init__(self) -> None:
        config_checks.warm_start(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """How answers are sampled."""

    engine: str = "jax"  # "jax" (in this process) | "sglang" (a server: section Server)
    group_size: int = 8  # G
    max_new_tokens: int = 10
    temperature: float = 1.0
    top_p: float | None = None  # refused: log-probs are of the full distribution
    top_k: int | None = None  # refused likewise
    version_lag: int = 0  # how many updates old the sampling weights are, 0..3 in the paper
    bucket_tokens: int = 16  # prompt and response lengths are padded up to multiples of this
    bucket_batch: int = 32  # sequences a call are padded up to multiples of this

    def __post_init__(self) -> None:
        config_checks.rollout(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """SGLang servers that sample where `rollout.engine` is "sglang"; docs/sglang.md."""

    urls: tuple[str, ...] = ()  # of running ones; (): one is started here, stopped with the run
    device: str = "cpu"  # "cpu" (simulated FP4) | "cuda" (Blackwell), of the one started
    key_variable: str | None = None  # environment variable that holds the servers' API key
    weights: str | None = None  # folder that servers see too, for new weights; None: shared memory
    delta: bool = True  # only codes and scales that changed travel
    pause: str = "in_place"  # requests during an update: "in_place" | "retract" | "abort"
    inflight: int = 64  # prompts that a server works on at once
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0  # of one prompt, from sending to the whole reply
    update_timeout_s: float = 600.0
    retries: int = 3  # of a prompt whose request failed, each with a longer wait

    def __post_init__(self) -> None:
        config_checks.server(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """Rollouts go on while the trainer trains."""

    max_version_diff: int = 3  # updates that the oldest token of a batch may be behind; 0: in turn
    ahead: int = 2  # steps' worth of prompts in flight, at most max_version_diff + 1 of them

    def __post_init__(self) -> None:
        config_checks.asynchrony(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """GRPO with importance correction and routing replay."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float | None = None  # k3 KL to the warm-start policy; None: no reference is kept
    importance_cap: float | None = 5.0  # on pi_old/mu per token; None: no correction
    replay: bool = True  # R3: train through the experts that the rollout chose
    normalize_std: bool = True  # divide advantages by the group's standard deviation
    std_floor: float = 1e-3  # below it a group counts as having no variance: advantage exactly 0

    def __post_init__(self) -> None:
        config_checks.loss(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW."""

    learning_rate: float = 4e-4
    warmup_steps: int = 0
    schedule: str = "constant"  # "constant" | "linear" | "cosine", over Config.steps
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    minibatches: int = 1  # updates per rollout
    micro_batch: int = 64  # sequences per gradient accumulation step

    def __post_init__(self) -> None:
        config_checks.optim(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The run directory and how often things are written."""

    eval_every: int = 20  # steps
    eval_samples: int = 4  # answers per held-out prompt
    checkpoint_every: int = 10  # steps
    keep_checkpoints: int = 2
    samples_kept: int = 4  # decoded answers written each evaluation
    tensorboard: bool = True
    plots: bool = True
    guidance_mib: int | None = 4096  # of guidance kept in memory; the rest waits on disk
    init_from: str | None = None  # a run directory whose policy to start from (no warm start)

    def __post_init__(self) -> None:
        config_checks.run(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """What each op runs as: "xla", "triton", "mosaic_gpu", ... (`pallas_kernels.common.impls`).

    What an op or the device does not have is refused; nothing ever falls back. docs/kernels.md.
    """

    fake_quant: str = "xla"  # trainer: guided rounding of activations, K and V
    grouped_matmul: str = "xla"  # trainer: experts, forward and backward
    token_logprob: str = "xla"  # trainer: head and log-softmax
    quantize: str = "xla"  # sampler: codes of activations
    fp4_matmul: str = "xla"  # sampler: experts and dense MLPs
    kv_attention: str = "xla"  # sampler: attention over the FP4 cache in decoding, and its writes
    debug: bool = False  # also check values on the device (sizes, lengths, scales): slower

    def __post_init__(self) -> None:
        config_checks.kernels(self)


XLA = Kernels()  # every op in plain XLA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment."""

    name: str
    seed: int = 0
    steps: int = 60  # GRPO steps
    model: Model = Model()
    quant: Quant = Quant()
    data: Data = Data()
    warm_start: WarmStart | None = WarmStart()
    rollout: Rollout = Rollout()
    loss: Loss = Loss()
    optim: Optim = Optim()
    run: Run = Run()
    kernels: Kernels = Kernels()
    server: Server = Server()
    asynchrony: Asynchrony | None = None  # None: sampling and training take turns

    def __post_init__(self) -> None:
        config_checks.config(self)

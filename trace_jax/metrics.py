"""Metrics of a run: one JSON line a step in metrics.jsonl, the same scalars in TensorBoard.

A line has `step`, `wall_s`, `stage` ("warm_start" or "rl"; each counts its own steps) and scalars
named `stage/quantity_unit` (bare names are aliases of other frameworks). A value that is not finite
is written as null, and its key is listed under `nonfinite`. After a resume the lines past the
checkpoint are gone: each step stands once.
"""

import json
import math
import pathlib
import re
import time
from typing import Any

import numpy as np

from trace_jax import rundir
from trace_jax.checks import message, require
from trace_jax.types import Mean

STAGES = ("warm_start", "rl")  # in the order in which they run
_KEY = re.compile(r"[a-z0-9_]+(/[A-Za-z0-9_.:@-]+)*")  # other frameworks use bare names

# key -> (unit, what it is). `<site>` stands for any name. Other keys are allowed.
METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("", "mean reward of the sampled answers; failed verifiers excluded"),
    "eval/accuracy": ("fraction", "held-out sample accuracy, at the training temperature"),
    "parity/logprob_abs_diff_nats": (
        "nats",
        "mean over trained tokens of |trainer before the update - sampler|",
    ),
    "parity/logprob_abs_diff_p99_nats": ("nats", "99th percentile of the same"),
    "parity/kl_nats": ("nats", "KL of the sampler from the trainer, per trained token"),
    "parity/route_mismatch": (
        "fraction",
        "(token, layer) pairs whose own top-k set is not the rollout's",
    ),
    "guide/agreement": ("fraction", "codes equal to the rollout's; only where codes are recorded"),
    "guide/bit_agreement": ("fraction", "mantissa bits equal to the rollout's, in mantissa mode"),
    "eval/failed": ("samples", "held-out answers whose verifier failed; not in the accuracy"),
    "reward/failed": ("samples", "sampled answers whose verifier failed; dropped"),
    "update/skipped": ("", "1 where the update was refused because its gradient was not finite"),
    "guide/bytes_per_token": ("bytes", "size of the guidance record per processed token"),
    "quant/code_flip_rate/<site>": ("fraction", "codes the trainer alone would round differently"),
    "quant/coded/<site>": ("fraction", "values with a code other than zero; 0 raises an alarm"),
    "quant/nonfinite_blocks/<site>": ("fraction", "values in blocks with NaN or Inf, trainer"),
    "quant/saturated_blocks": (
        "fraction",
        "recorded blocks at the largest scale where no global scale stretches the range",
    ),
    "quant/zero_scales": ("fraction", "recorded blocks whose scale rounds to zero"),
    "quant/nan_scales": ("fraction", "recorded blocks whose scale is NaN; raises an alarm"),
    "guide/scale_equal/<site>": ("fraction", "scale bytes that the trainer alone would choose too"),
    "guide/undecoded": ("fraction", "rows whose scales the record's low bits could not restore"),
    "guide/store_bytes_in": ("bytes", "records packed in this step"),
    "guide/store_bytes_out": ("bytes", "records read and verified"),
    "guide/store_spilled_bytes": ("bytes", "of the packed those that went to disk"),
    "guide/store_put_s": ("s", "packing and writing, in the store's thread"),
    "guide/store_get_s": ("s", "reading, verifying and stacking, in the prefetching thread"),
    "guide/store_wait_s": ("s", "waiting for records that were still on their way"),
    "guide/store_in_gb_s": ("GB/s", "bytes_in per put_s"),
    "guide/store_out_gb_s": ("GB/s", "bytes_out per get_s"),
    "guide/store_step_share": ("fraction", "of the step's time, if nothing overlapped"),
    "run/alarms": ("", "things that look wrong in this step; each kind is printed once"),
    "rollout/tokens_per_s": ("tokens/s", "sampled tokens per second of rollout"),
    "rollout/staleness_versions": ("versions", "mean age of the weights that sampled a token"),
    "rollout/staleness_max_versions": ("versions", "age of the oldest token; asynchronous runs"),
    "rollout/staleness_<k>_fraction": ("fraction", "tokens whose weights were k versions old"),
    "rollout/waited_for": ("prompts", "that were waited for, or later steps would lack them"),
    "rollout/pending": (
        "prompts",
        "in flight or answered, and not trained on yet",
    ),
    "rollout/step_s": ("s", "wall time of sampling; of waiting for it in asynchronous runs"),
    "rollout/retries": ("requests", "sent again: a server failed, or its reply was damaged"),
    "rollout/rejected_replies": ("replies", "damaged, so never trained on"),
    "rollout/aborted": ("requests", "whose answers a weight update cut short; sampled again"),
    "rollout/servers_alive": ("servers", "that take requests"),
    "reward/step_s": ("s", "wall time of scoring and collating"),
    "logprobs/step_s": ("s", "wall time of the trainer's forward before the update"),
    "update/step_s": ("s", "wall time of the update"),
    "update/grad_norm": ("", "global gradient norm before clipping"),
    "loss/policy": ("", "policy-gradient loss, token mean"),
    "sync/bytes": ("bytes", "weights handed to the rollout engine"),
    "sync/s": ("s", "wall time of that"),
    "warm_start/loss": ("nats", "cross-entropy per answer token in the supervised stage"),
}


class MetricsWriter:
    """Appends metrics of a run; a context manager.

    Args:    run: the open run directory. tensorboard: also write event files, one folder a stage.
             resume: (stage, step) of the restored checkpoint: lines after it are removed, as is a
             line that a kill left half-written. None: the run starts, nothing is kept.
    """

    def __init__(
        self, run: rundir.RunDir, tensorboard: bool, resume: tuple[str, int] | None = None
    ):
        self._path = run.metrics
        if resume is not None:
            _stage_number(resume[0])
        rows = read_metrics(self._path) if self._path.exists() else []
        kept = [row for row in rows if resume is not None and _position(row) <= _place(*resume)]
        rundir.write_atomic(self._path, "".join(_line(row) for row in kept))
        self._last = _position(kept[-1]) if kept else (0, -1)
        self._file = self._path.open("a", encoding="utf-8")
        self._boards: dict[str, Any] = {}
        self._board_folder = run.folder("tensorboard") if tensorboard else None
        self._resume = resume

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def write(self, step: int, wall_s: float | int, values: dict[str, Any]) -> dict[str, Any]:
        """Writes the line of one step and returns it.

        Args:    step: of its stage, larger than the last one. wall_s: seconds since the run began.
                 values: scalars (numbers, 0-d arrays, `Mean`) by key; `stage` may be among them,
                 "rl" otherwise.
        Raises:  ValueError for a step that does not grow, a bad key, or a value with more than one
                 element; TypeError for what is not a number.
        """
        values = dict(values)
        stage = values.pop("stage", "rl")
        place = _place(stage, int(step))
        last = f"{STAGES[self._last[0]]} {self._last[1]}"
        fix = "write one line a step, with everything known about it."
        require(place > self._last, "metrics step", f"{stage} {step}", f"after {last}", fix)
        scalars = {key: _scalar(key, value) for key, value in values.items()}
        row: dict[str, Any] = {"step": int(step), "wall_s": round(float(wall_s), 3), "stage": stage}
        row |= {key: v if math.isfinite(v) else None for key, v in scalars.items()}
        if nonfinite := [key for key, v in scalars.items() if not math.isfinite(v)]:
            row["nonfinite"] = nonfinite
        self._file.write(_line(row))
        self._file.flush()
        self._last = place
        if self._board_folder is not None:
            board = self._board(self._board_folder, stage)
            for key in scalars.keys() - set(nonfinite):
                board.add_scalar(key, scalars[key], int(step))
        return row

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        for board in self._boards.values():
            board.close()
        self._boards = {}

    def _board(self, folder: pathlib.Path, stage: str) -> Any:
        if stage not in self._boards:
            from tensorboardX import SummaryWriter  # slow to import, and not everybody wants it

            # TensorBoard drops what an earlier start wrote from `purge_step` on.
            purge = self._resume[1] + 1 if self._resume and self._resume[0] == stage else 0
            self._boards[stage] = SummaryWriter(
                str(folder / stage),
                purge_step=purge,
                flush_secs=10,
                filename_suffix=f".{time.time_ns()}",  # two starts in one second: two files
            )
        return self._boards[stage]


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a half-written last line (a kill) is left out.

    Raises:  ValueError for a bad line elsewhere, with its number.
    """
    rows = []
    lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line else None
        except ValueError as error:
            if number >= len(lines) - 1:  # the last one, with or without its newline
                break
            fix = "delete that line."
            where = f"{path} line {number}"
            raise ValueError(message(where, line[:80], "a JSON object", fix)) from error
        if isinstance(row, dict):
            rows.append(row)
    return rows


def describe(key: str) -> tuple[str, str]:
    """(unit, description) of a key, ("", "") if METRICS does not have it."""
    family = key.rpartition("/")[0] + "/<site>"
    return METRICS.get(key) or METRICS.get(family) or ("", "")


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _stage_number(stage: str) -> int:
    require(stage in STAGES, "metrics stage", stage, f"one of {STAGES}")
    return STAGES.index(stage)


def _place(stage: str, step: int) -> tuple[int, int]:
    return _stage_number(stage), step


def _position(row: dict[str, Any]) -> tuple[int, int]:
    return _place(row.get("stage", "rl"), row["step"])


def _scalar(key: str, value: Any) -> float | int:
    """The value as a Python number, exactly."""
    fix = "name it stage/quantity_unit, for example update/step_s."
    require(_KEY.fullmatch(key) is not None, "metric key", repr(key), "stage/quantity_unit", fix)
    if isinstance(value, Mean):
        return value.value
    if isinstance(value, bool | int | float):
        return value
    where, need = f"metric {key}", "a number or an array with one element"
    require(hasattr(value, "dtype"), where, type(value).__name__, need, None, TypeError)
    array = np.asarray(value)
    require(array.size == 1, where, f"shape {array.shape}", need, "reduce it before writing.")
    number = array.reshape(()).item() if array.dtype.kind in "biuf" else float(array.reshape(()))
    return number

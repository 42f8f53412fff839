"""metrics.jsonl: every step exactly once, whatever a kill left behind; TensorBoard agrees."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import metrics, rundir
from trace_jax.types import Mean


@pytest.fixture
def run(tmp_path):
    with rundir.open_run(tmp_path / "run", {"name": "x"}) as opened:
        yield opened


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def steps(run) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in lines(run)]


def write(run, stages, resume=None, tensorboard=False):
    with metrics.MetricsWriter(run, tensorboard, resume) as writer:
        for stage, step in stages:
            writer.write(step, 0.5, {"stage": stage, "reward/mean": float(step)})


def test_every_kind_of_scalar_is_written_exactly(run):
    values = {
        "a/float": 0.1,
        "a/int": 2**60,
        "a/f32": np.float32(0.1),
        "a/bf16": jnp.bfloat16(0.1),
        "a/array": jnp.asarray([3], jnp.int32),
        "a/mean": Mean(total=jnp.float32(3), count=jnp.float32(4)),
        "a/flag": np.bool_(True),
        "bare_name": 5,
    }
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        writer.write(7, 1.23456, values)
        (row,) = lines(run)  # there at once, not only when closed
    assert (row["step"], row["wall_s"], row["stage"]) == (7, 1.235, "rl")
    want = [0.1, 2**60, 0.10000000149011612, 0.10009765625, 3, 0.75, True, 5]
    assert [row[key] for key in values] == want


def test_values_that_are_not_finite_become_null_and_are_listed(run):
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        bad = {"a/nan": jnp.float32(jnp.nan), "a/inf": math.inf, "a/fine": 1.0}
        writer.write(1, 0.0, bad)
    (row,) = lines(run)
    assert row["a/nan"] is row["a/inf"] is None and row["a/fine"] == 1.0
    assert row["nonfinite"] == ["a/nan", "a/inf"]
    assert "NaN" not in run.metrics.read_text() and "Infinity" not in run.metrics.read_text()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"a/x": jnp.zeros(2)}, r"metric a/x: got shape \(2,\)"),
        ({"a/x": "high"}, "metric a/x: got str"),
        ({"a/x": None}, "metric a/x: got NoneType"),
        ({"Loss (nats)": 1.0}, r"metric key: got 'Loss \(nats\)', need stage/quantity_unit"),
        ({"stage": "sft"}, "metrics stage: got sft, need one of"),
    ],
)
def test_what_is_no_named_scalar_is_refused_and_not_half_written(run, values, text):
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        with pytest.raises((TypeError, ValueError), match=text):
            writer.write(1, 0.0, {"a/fine": 1.0} | values)
        writer.write(1, 0.0, {"a/fine": 1.0})
    assert len(lines(run)) == 1


def test_a_step_is_written_once(run):
    with metrics.MetricsWriter(run, tensorboard=False) as writer:
        for stage, step in (("warm_start", 5), ("rl", 0), ("rl", 1)):  # stages count separately
            writer.write(step, 0.0, {"stage": stage})
        for stage, step in (("rl", 1), ("rl", 0), ("warm_start", 6)):
            with pytest.raises(ValueError, match=r"need after rl 1\. Fix: write one line a step"):
                writer.write(step, 0.0, {"stage": stage})


WARM = [("warm_start", s) for s in (20, 40, 60)]
RL = [("rl", s) for s in (0, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("resume", "kept"),
    [
        (("rl", 3), [*WARM, *RL[:4]]),  # warm-start steps are larger than 3, and stay
        (("rl", 9), [*WARM, *RL]),
        (("warm_start", 40), WARM[:2]),
        (None, []),
    ],
)
def test_a_resume_removes_the_lines_after_the_checkpoint(run, resume, kept):
    write(run, [*WARM, *RL])
    write(run, [], resume=resume)
    assert steps(run) == kept
    rest = [place for place in [*WARM, *RL] if place not in kept]
    write(run, rest, resume=resume)
    assert steps(run) == [*WARM, *RL]


@pytest.mark.parametrize("cut", [1, 2, 20, 40])
def test_a_line_that_a_kill_left_half_written_is_dropped(run, cut):
    write(run, RL)
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-cut])
    kept = RL if cut == 1 else RL[:-1]  # without its newline the last line is still whole
    assert [row["step"] for row in metrics.read_metrics(run.metrics)] == [s for _, s in kept]
    write(run, [("rl", 6)], resume=("rl", 5))
    assert steps(run) == [*kept, ("rl", 6)]


def test_a_bad_line_in_the_middle_is_an_error_with_its_number(run):
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2: got {\"st"):
        metrics.read_metrics(run.metrics)


def board_events(run, stage):
    """(tag, step, value) and the purge marks, read with the record format's own protobuf."""
    from tensorboardX.proto import event_pb2

    scalars, starts = [], []
    for file in sorted((run.folder("tensorboard") / stage).iterdir()):
        data = file.read_bytes()
        while data:  # a record: length (8 bytes), its CRC (4), the event, its CRC (4)
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            scalars += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            if event.session_log.status == event_pb2.SessionLog.START:
                starts.append(event.step)
    return scalars, starts


def test_tensorboard_has_the_same_scalars_and_purges_on_resume(run):
    write(run, [WARM[0], *RL[:4]], tensorboard=True)
    write(run, [("rl", 3)], resume=("rl", 2), tensorboard=True)
    scalars, starts = board_events(run, "rl")
    assert scalars == [("reward/mean", s, float(s)) for s in (0, 1, 2, 3, 3)]
    assert starts[-1] == 3  # a reader drops what came before from step 3 on
    assert board_events(run, "warm_start")[0] == [("reward/mean", 20, 20.0)]


def test_the_names_of_the_design_are_documented():
    for key in ("reward/mean", "eval/accuracy", "parity/kl_nats", "sync/bytes", "loss/policy"):
        assert metrics.describe(key)[1], key
    assert "round" in metrics.describe("quant/code_flip_rate/expert_in")[1]
    assert metrics.describe("my/own") == ("", "")

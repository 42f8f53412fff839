"""Checkpoints: exact round trips, kills with a real process, and every way a file can go bad."""

import collections
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax import manifest
from trace_jax.checkpoint import Checkpointer, CheckpointError

Moments = collections.namedtuple("Moments", "mu nu")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A custom node with dicts, tuples, a named tuple and None below, as TrainState has."""

    step: Any
    params: Any
    opt_state: Any


def state(seed: int) -> State:
    draw = np.random.default_rng(seed)
    f32 = draw.standard_normal((3, 5), np.float32)
    f32[0, :3] = [np.nan, -0.0, np.float32(1e-45)]  # payloads that comparisons and casts lose
    return State(
        step=jnp.int32(seed),
        params={
            "f32": jnp.asarray(f32),
            "bf16": jnp.asarray(draw.standard_normal(7, np.float32)).astype(jnp.bfloat16),
            "codes": jnp.asarray(draw.integers(0, 256, (2, 4), np.uint8)),
            "bool": jnp.asarray([True, False]),
        },
        opt_state=(
            Moments(mu=[jnp.ones(2) * seed], nu=None),
            np.asarray([2**53 + 1 + seed], np.int64),
            np.float64(seed / 3),
        ),
    )


def data_bytes(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """The oracle of equality: dtype, shape and raw bytes of each leaf."""
    leaves = jax.tree.leaves(tree)
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in leaves]


def save(folder: pathlib.Path, *steps: int, keep: int = 3) -> None:
    with Checkpointer(folder, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"at": step})


def restore(folder: pathlib.Path, like: Any = None):
    with Checkpointer(folder, 3) as checkpoints:
        return checkpoints.restore_latest(like)


def test_restore_gives_back_the_bytes_the_structure_and_the_record(tmp_path):
    record = {"data": {"position": np.int64(7)}, "history": [1, (2, 3)], "stage": "rl", "x": 0.1}
    with Checkpointer(tmp_path, 2) as checkpoints:
        assert checkpoints.restore_latest() is None
        checkpoints.save(4, state(4), record)
    found = restore(tmp_path, state(0))
    assert found.step == 4
    assert found.extra == {"data": {"position": 7}, "history": [1, [2, 3]], "stage": "rl", "x": 0.1}
    assert jax.tree.structure(found.arrays) == jax.tree.structure(state(0))
    assert data_bytes(found.arrays) == data_bytes(state(4))
    assert isinstance(found.arrays.params["f32"], jax.Array)
    assert isinstance(found.arrays.opt_state[1], np.ndarray)


def test_restore_without_a_tree_gives_numpy_in_nested_dicts(tmp_path):
    save(tmp_path, 2)
    arrays = restore(tmp_path).arrays
    assert set(arrays) == {"step", "params", "opt_state"}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))
    assert manifest.describe(arrays) == manifest.describe(
        jax.tree.map(np.asarray, dataclasses.asdict(state(2)))
        | {"opt_state": [state(2).opt_state[0]._asdict(), *map(np.asarray, state(2).opt_state[1:])]}
    )


def test_restore_honours_the_sharding_that_is_asked_for(tmp_path):
    # Saved on one device, restored on four, as a struct and as an array (google/orbax#648).
    with Checkpointer(tmp_path, 1) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(8.0), "v": jnp.arange(4.0)}, {})
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    like = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split),
        "v": jax.device_put(jnp.zeros(4), split),
    }
    arrays = restore(tmp_path, like).arrays
    for name, leaf in arrays.items():
        assert leaf.sharding == split, name
        assert len(leaf.addressable_shards) == 4
        np.testing.assert_array_equal(leaf, np.arange(leaf.size, dtype=np.float32))
    plain = restore(tmp_path, jax.eval_shape(lambda: {"w": jnp.zeros(8), "v": jnp.zeros(4)}))
    assert len(plain.arrays["w"].sharding.device_set) == 1


def test_a_sharding_that_does_not_fit_is_not_taken_for_damage(tmp_path):
    with Checkpointer(tmp_path, 1) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(3.0)}, {})
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(ValueError, match="divide"):
        restore(tmp_path, {"w": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=split)})
    assert (tmp_path / "1").is_dir()


def test_only_the_newest_checkpoints_are_kept_and_saving_again_is_harmless(tmp_path):
    save(tmp_path, 1, 2, 3, 3, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    with Checkpointer(tmp_path, 2) as checkpoints:
        for step in (2, 3):  # a step that goes back; the newest one with other content
            with pytest.raises(ValueError, match=r"need > 3. Fix: count steps"):
                checkpoints.save(step, state(9), {"at": step})
    assert data_bytes(restore(tmp_path, state(0)).arrays) == data_bytes(state(3))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda p: p | {"f32": jnp.zeros((3, 6))}, r"params/f32: saved float32\[3, 5\], now .*6\]"),
        (lambda p: p | {"f32": p["f32"].astype(jnp.bfloat16)}, r"now bfloat16\[3, 5\]"),
        (lambda p: p | {"new": jnp.zeros(1)}, r"params/new: saved nothing, now float32\[1\]"),
        (lambda p: {"f32": p["f32"]}, r"params/bf16: saved bfloat16\[7\], now nothing"),
    ],
)
def test_another_tree_is_refused_by_name_and_the_files_stay(tmp_path, change, names):
    save(tmp_path, 1, 2)
    before = sorted(tmp_path.rglob("*"))
    like = dataclasses.replace(state(0), params=change(state(0).params))
    with pytest.raises(ValueError, match=names):
        restore(tmp_path, like)
    assert sorted(tmp_path.rglob("*")) == before
    assert restore(tmp_path, state(0)).step == 2


@pytest.mark.parametrize(
    ("arrays", "extra", "names"),
    [
        ({"n": 3}, {}, "arrays n: got int"),
        ({"k": jax.random.key(0)}, {}, "arrays k: got key"),
        ({"s": np.asarray(["a"], object)}, {}, "arrays s: got object"),
        ({"e": jnp.zeros((0, 3))}, {}, r"arrays e: got shape \(0, 3\)"),
        ({}, {"it": {"state": b"x"}}, r"extra.it.state: got bytes"),
        ({}, {"seen": {1: 2}}, r"extra.seen: got key 1"),
    ],
)
def test_what_would_not_come_back_the_same_is_refused(tmp_path, arrays, extra, names):
    with (
        Checkpointer(tmp_path, 1) as checkpoints,
        pytest.raises((TypeError, ValueError), match=names),
    ):
        checkpoints.save(1, arrays | {"w": jnp.zeros(1)}, extra)


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


DAMAGE = {
    "deleted": pathlib.Path.unlink,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "emptied": lambda p: p.write_bytes(b""),
    "one byte flipped": _flip,
    "overwritten": lambda p: p.write_bytes(b"\x80garbage" * 40),
}


def test_any_damaged_file_falls_back_to_the_previous_checkpoint_and_says_so(tmp_path, caplog):
    save(tmp_path / "good", 1, 2)
    newest = tmp_path / "good" / "2"
    files = sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file())
    assert len(files) > 8
    for i, file in enumerate(files):
        for j, (name, damage) in enumerate(DAMAGE.items()):
            if (i + j) % 2 and file.name != "metadata":  # half of the table is enough
                continue
            folder = tmp_path / f"{i}-{j}"
            shutil.copytree(tmp_path / "good", folder)
            content = (folder / "2" / file).read_bytes()
            damage(folder / "2" / file)
            gone = not (folder / "2" / file).exists()
            if not gone and (folder / "2" / file).read_bytes() == content:
                continue  # an empty file, truncated
            caplog.clear()
            found = restore(folder, state(0))
            if file.name == "files.json" and gone:  # as after a kill: the content still verifies
                assert found.step == 2
                continue
            assert (found.step, found.extra) == (1, {"at": 1}), (file, name)
            assert data_bytes(found.arrays) == data_bytes(state(1))
            assert "2 is damaged" in caplog.text and "going on from step 1" in caplog.text
            assert sorted(p.name for p in folder.iterdir()) == ["1", "2.corrupt"]


def test_wrong_content_in_healthy_files_is_found_by_the_sums_of_the_leaves(tmp_path, caplog):
    save(tmp_path, 1, 2)
    (tmp_path / "2" / "files.json").unlink()
    shutil.rmtree(tmp_path / "2" / "arrays")
    shutil.copytree(tmp_path / "1" / "arrays", tmp_path / "2" / "arrays")
    assert restore(tmp_path, state(0)).step == 1
    assert "does not match its SHA-256" in caplog.text


def test_the_sum_of_a_leaf_covers_every_byte_its_dtype_and_its_shape():
    base = np.zeros((2, 6), np.float32)
    last = base.copy()
    last[-1, -1] = -0.0
    trees = ({"w": w} for w in (base, last, base.view(np.int32), base.reshape(3, 4)))
    described = [manifest.describe(tree)["w"] for tree in trees]
    assert all(described[0] != other for other in described[1:])
    assert described[0]["sha256"] != described[1]["sha256"]


def test_reading_only_changes_nothing_and_creates_no_folder(tmp_path, caplog):
    save(tmp_path, 1, 2)
    (tmp_path / "2" / "extra" / "metadata").unlink()
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()  # another process is saving
    before = sorted(tmp_path.rglob("*"))
    with Checkpointer(tmp_path, None) as checkpoints:
        assert checkpoints.restore_latest(state(0)).step == 1
        with pytest.raises(ValueError, match=r"got keep=None"):
            checkpoints.save(4, state(4), {})
    with Checkpointer(tmp_path / "none", None) as checkpoints:
        assert checkpoints.restore_latest() is None
    assert "left there, going on from step 1" in caplog.text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_folder_can_be_saved_over_and_damaged_again(tmp_path):
    save(tmp_path, 1, 2)
    for aside in ("2.corrupt", "2.corrupt+"):
        shutil.rmtree(tmp_path / "2" / "arrays")
        with Checkpointer(tmp_path, 3) as checkpoints:
            assert checkpoints.restore_latest(state(0)).step == 1
            checkpoints.save(2, state(2), {"at": 2})
        assert (tmp_path / aside / "extra").is_dir()  # moved, not deleted
        assert restore(tmp_path, state(0)).step == 2


def test_no_intact_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path):
    save(tmp_path, 1, 2)
    for step in ("1", "2"):
        shutil.rmtree(tmp_path / step / "extra")
    for _ in range(2):  # the second time as well: nothing was moved aside
        with pytest.raises(CheckpointError, match=r"step 2: .*step 1: .*Fix: put back a copy") as e:
            restore(tmp_path, state(0))
        assert str(tmp_path) in str(e.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


# Saves step after step and reports each; HANG stops inside the save that is named.
CHILD = """
    import os, sys, time
    import jax, numpy as np
    from trace_jax.checkpoint import Checkpointer
    folder, hang = sys.argv[1], int(sys.argv[2])
    def tree(step):
        return {"w": np.full(300_000, step, np.float32), "step": np.int32(step)}
    with Checkpointer(folder, 2) as checkpoints:
        for step in range(1, 1000):
            if step == hang:
                rename = os.rename
                def wait(*args, **kwargs):
                    print("hanging", flush=True)
                    time.sleep(600)
                os.rename = os.replace = wait
            checkpoints.save(step, tree(step), {"step": step})
            print(step, flush=True)
"""


def start_child(folder: pathlib.Path, hang: int) -> subprocess.Popen:
    root = str(pathlib.Path(__file__).resolve().parents[1])
    code = textwrap.dedent(CHILD)
    env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    args = [sys.executable, "-c", code, str(folder), str(hang)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, env=env, text=True)


def kill(child: subprocess.Popen) -> list[str]:
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    lines = child.stdout.read().split()
    child.stdout.close()
    return lines


def whole_state_of(folder: pathlib.Path) -> int:
    """The restored step, after checking that everything in it is of that step."""
    found = restore(folder)
    assert found.extra == {"step": found.step}
    np.testing.assert_array_equal(found.arrays["w"], np.full(300_000, found.step, np.float32))
    assert found.arrays["step"] == found.step
    return found.step


def test_a_kill_before_the_commit_of_a_save_leaves_the_previous_one(tmp_path):
    child = start_child(tmp_path, hang=3)
    assert [child.stdout.readline().strip() for _ in range(3)] == ["1", "2", "hanging"]
    assert any(p.name.startswith("3.") for p in tmp_path.iterdir())  # the save had begun
    kill(child)
    assert whole_state_of(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]  # and is cleaned up


def test_a_kill_at_any_moment_loses_no_checkpoint_that_was_reported(tmp_path):
    reported = 0
    for delay_s in (0.02, 0.05, 0.11, 0.17):
        shutil.rmtree(tmp_path)
        child = start_child(tmp_path, hang=0)
        first = child.stdout.readline()
        time.sleep(delay_s)
        reported = int(([first.strip(), *kill(child)])[-1])
        assert whole_state_of(tmp_path) in (reported, reported + 1)
    assert reported > 1

"""Checkpoints: an array pytree and a small JSON record, saved together or not at all.

    <directory>/<step>/arrays       the pytree (Orbax, sharded, one OCDBT store)
    <directory>/<step>/extra        JSON: the caller's record and a SHA-256 of every leaf
    <directory>/<step>/files.json   SHA-256 of every file above, written right after the rename
    <directory>/<step>.corrupt      one that failed verification, moved aside and never deleted

Orbax writes into a temporary folder and renames it when complete, so a kill during a save leaves
the previous checkpoint as the newest one. What a rename cannot catch (a truncated, altered or
deleted file) the sums do: files are compared before Orbax opens them (it reports damage as a wall
of asyncio tracebacks), and every restored leaf with the bytes that were handed to `save`.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from trace_jax import manifest as manifest_lib
from trace_jax.checks import message, require

_FORMAT = 1
_FILES = "files.json"
_SHOWN = 5  # paths an error names
# What Orbax and TensorStore raise on files that are missing, truncated or altered.
_BAD_FILES = (ValueError, OSError, KeyError, TypeError, AttributeError)


class CheckpointError(RuntimeError):
    """No checkpoint in the folder can be used, although there are some."""


class _DamagedError(Exception):
    """This one checkpoint is damaged; an older one may be fine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore_latest` found."""

    step: int
    arrays: Any  # in the structure and shardings of `like`; nested dicts of numpy arrays without it
    extra: dict[str, Any]


class Checkpointer:
    """Writes and reads the checkpoints of one run; a context manager.

    Saving is synchronous: when `save` returns, the checkpoint is complete and the caller may donate
    or overwrite its arrays. Leaves that one process cannot see whole are stored without a sum.

    Args:    directory: created if missing. keep: newest checkpoints kept, >= 1; with 1 there is
             nothing to fall back to. None: only read, and change nothing on disk, so that another
             process may be writing meanwhile.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int | None):
        fix = "keep 2 to survive a damaged newest one, or None to read only."
        require(keep is None or keep >= 1, "checkpoint.keep", keep, ">= 1", fix)
        self._writes = keep is not None
        self.directory = pathlib.Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                enable_async_checkpointing=False,
                cleanup_tmp_directories=self._writes,
                create=self._writes,
                read_only=not self._writes,
                lightweight_initialize=True,  # do not trip over a damaged step when opening
            ),
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._manager.close()

    def wait(self) -> None:
        """Returns when nothing is being written any more (at once: saving is synchronous)."""
        self._manager.wait_until_finished()

    def save(self, step: int, arrays: Any, extra: dict[str, Any]) -> None:
        """Saves both under `step`; on return they are on disk.

        Args:    step: larger than every saved step; saving the same content again does nothing.
                 arrays: any pytree of jax or numpy arrays and numpy scalars (kept as 0-d arrays).
                 extra: JSON values; numpy scalars become Python numbers, tuples become lists.
        Raises:  ValueError for a step that is not new, TypeError for a leaf that is not an array or
                 a value that JSON cannot hold.
        """
        require(self._writes, f"checkpoint.save in {self.directory}", "keep=None", "keep >= 1")
        arrays = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, np.generic) else x, arrays)
        sealed = manifest_lib.seal(
            {
                "format": _FORMAT,
                "step": int(step),
                "extra": manifest_lib.plain_json(extra, "checkpoint extra"),
                "manifest": manifest_lib.describe(arrays),
            }
        )
        newest = next(iter(self._steps()), -1)
        if step == newest and self._sealed(step) == sealed:
            return
        fix = "count steps over the whole run; after a restore go on from the restored step."
        where = f"checkpoint.save step in {self.directory}"
        require(step > newest, where, step, f"> {newest}", fix)
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave(sealed)
        )
        saved = self._manager.save(int(step), args=args, force=True)
        assert saved, f"Orbax skipped step {step}"
        if jax.process_index() == 0:
            manifest_lib.list_files(self.directory / str(step), _FILES)

    def restore_latest(self, like: Any | None = None) -> Restored | None:
        """Reads the newest checkpoint that verifies, or None if nothing was ever saved.

        Damaged newer ones are reported and, unless reading only, moved to `<step>.corrupt`.

        Args:    like: a pytree of arrays or `jax.ShapeDtypeStruct`; the result has its structure
                 and shardings (default device where a struct has none, numpy where it is numpy).
                 None: nested dicts and lists of numpy arrays.
        Raises:  ValueError naming the first paths where `like` and the checkpoint differ;
                 CheckpointError if there are checkpoints and all are damaged. Neither touches the
                 files.
        """
        self.wait()
        self._manager.reload()
        bad: dict[int, str] = {}
        for step in self._steps():
            try:
                restored = self._read(step, like)
            except _DamagedError as error:
                bad[step] = str(error)
                continue
            for bad_step, why in bad.items():
                self._set_aside(bad_step, why, step)
            return restored
        if bad:
            found = "; ".join(f"step {step}: {why}" for step, why in bad.items())
            fix = "put back a copy of one, or move the folder away to start the run again."
            raise CheckpointError(message(str(self.directory), found, "one intact checkpoint", fix))
        return None

    def _steps(self) -> list[int]:
        """Newest first, from disk: Orbax does not list a step whose commit marker is gone."""
        names = [path.name for path in self.directory.glob("*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _sealed(self, step: int) -> dict[str, Any] | None:
        """The JSON part of a step, or None if it is damaged."""
        try:
            args = ocp.args.Composite(extra=ocp.args.JsonRestore())
            sealed = self._manager.restore(step, args=args)["extra"]
        except _BAD_FILES:
            return None
        return sealed if manifest_lib.is_sealed(sealed) else None

    def _read(self, step: int, like: Any | None) -> Restored:
        where = self.directory / str(step)
        listed = (where / _FILES).exists()  # if not, the run was killed between rename and listing
        if listed and (bad := manifest_lib.damaged_files(where, _FILES)):
            raise _DamagedError(f"missing or altered: {', '.join(bad[:_SHOWN])}")
        sealed = self._sealed(step)
        if sealed is None:
            raise _DamagedError("its JSON part cannot be read or does not match its SHA-256")
        record = sealed["record"]
        require(record["format"] == _FORMAT, str(where), record["format"], f"format {_FORMAT}")
        if like is not None:
            different = manifest_lib.differences(record["manifest"], like)
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            need = "the tree that was saved (nothing was changed on disk)"
            fix = "use the configuration of that run, or a new --workdir."
            require(not different, str(where), "; ".join(different[:_SHOWN]) + more, need, fix)
            like = jax.tree.map(_target, like)
        try:
            arrays = self._arrays(step, like)
        except _BAD_FILES as error:
            if listed:  # the files are right, so the request is wrong: a sharding that does not fit
                raise
            first = next(iter(str(error).strip().splitlines()), "")[:200]
            raise _DamagedError(f"cannot be read, {type(error).__name__}: {first}") from error
        got = manifest_lib.describe(arrays)
        for path, entry in record["manifest"].items():
            if path not in got or (entry["sha256"] and got[path] != entry):
                raise _DamagedError(f"{path} does not match its SHA-256")
        return Restored(step=step, arrays=arrays, extra=record["extra"])

    def _arrays(self, step: int, target: Any | None) -> Any:
        if target is None:
            metadata = self._manager.item_metadata(step)["arrays"].tree
            target = jax.tree.map(_host_stub, metadata)
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(target))
        return self._manager.restore(step, args=args)["arrays"]

    def _set_aside(self, step: int, why: str, used: int) -> None:
        source = self.directory / str(step)
        target = self.directory / f"{step}.corrupt"
        while target.exists():
            target = target.with_name(target.name + "+")
        if self._writes and jax.process_index() == 0:
            source.rename(target)
        self._manager.reload()
        done = f"moved to {target.name}" if self._writes else "left there"
        text = "Checkpoint %s is damaged (%s): %s, going on from step %d."
        logging.warning(text, source, why, done, used)


def _host_stub(leaf: Any) -> np.ndarray:
    """A numpy array of that type without its memory; Orbax then restores to the host."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _target(leaf: Any) -> Any:
    """What Orbax needs to place a leaf; it would otherwise use the sharding of the saving run."""
    if isinstance(leaf, np.ndarray | np.generic):
        return _host_stub(leaf)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)

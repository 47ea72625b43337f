"""Checkpoints through Orbax: asynchronous, in the user's own tree, free of any layout.

Orbax raises the error of a background write only after all processes have met at a barrier; if one
of them failed they never do.

Every process writes what it owns, and reads what it needs: nothing is gathered. A checkpoint
becomes visible by one rename, so a process killed at any moment leaves either a whole checkpoint or
none. What happens to it later is seen by its seal.
"""

import contextlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from ..core.errors import CheckpointError
from ..core.types import PyTree
from ..jax.heap import trim_heap
from ..model.functional import plain_leaves
from .owner import FolderOwner
from .seal import META, TREE, let_go, newest_intact, seal, sealed_meta, set_aside

_ORBAX = str(pathlib.Path(ocp.__file__).parent)

Tell = Callable[[BaseException], None]


class _WatchedWrite:
    """A write in the background, as Orbax's own futures are."""

    def __init__(self, write: Any, tell: Tell):
        self._write, self._tell = write, tell

    def result(self, timeout: int | None = None) -> Any:
        """Wait for the write."""
        try:
            return self._write.result(timeout)
        except BaseException as error:
            self._tell(error)
            raise


class _Telling:
    """What both handlers add to Orbax's own."""

    def __init__(self, tell: Tell, **options: Any):
        super().__init__(**options)
        self._tell = tell

    async def async_save(self, *args: Any, **kwargs: Any) -> list[_WatchedWrite]:
        """Begin to write; the returned futures are waited for in the background."""
        writes = await super().async_save(*args, **kwargs)  # type: ignore[misc]
        return [_WatchedWrite(write, self._tell) for write in writes or ()]

    def finalize(self, directory: Any) -> None:
        """Finish what all processes have written, before the checkpoint gets its name."""
        try:
            super().finalize(directory)  # type: ignore[misc]
            self._seal(directory)
        except BaseException as error:
            self._tell(error)
            raise

    def _seal(self, directory: Any) -> None:
        """Nothing by default."""


class TreeHandler(_Telling, ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Writes and reads arrays."""

    def _seal(self, directory: Any) -> None:
        seal(directory)


class MetaHandler(_Telling, ocp.JsonCheckpointHandler):  # type: ignore[misc]
    """Writes and reads small facts."""


# Orbax finds a handler by the class of the arguments.
@ocp.args.register_with_handler(TreeHandler, for_save=True)  # type: ignore[untyped-decorator]
class TreeSave(ocp.args.PyTreeSave):  # type: ignore[misc]
    """Arrays to save."""


@ocp.args.register_with_handler(TreeHandler, for_restore=True)  # type: ignore[untyped-decorator]
class TreeRestore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """Arrays to restore."""


@ocp.args.register_with_handler(MetaHandler, for_save=True)  # type: ignore[untyped-decorator]
class MetaSave(ocp.args.JsonSave):  # type: ignore[misc]
    """Facts to save."""


@ocp.args.register_with_handler(MetaHandler, for_restore=True)  # type: ignore[untyped-decorator]
class MetaRestore(ocp.args.JsonRestore):  # type: ignore[misc]
    """Facts to restore."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Orbax tells of every file, and at length of errors that are raised anyway."""
    own = record.pathname.startswith(_ORBAX)
    return not own or (record.levelno >= logging.ERROR and not record.exc_info)


def quieten_orbax() -> None:
    """Leave out what Orbax says besides; everybody else who logs through absl is heard."""
    logging.getLogger("absl").addFilter(_is_worth_a_line)


_CHUNK_BYTES = 1 << 26  # what is read at least, however a reader cuts an array
_POLL_SECONDS = 0.005
_EMPTY = "arrays without elements"  # among the facts, for Orbax's format has no such arrays
_SAVE_ARGS = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return unflatten_dict(flat, sep=".")  # type: ignore[no-any-return]


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    return flatten_dict(nested, sep=".")  # type: ignore[no-any-return]


def _restore_args(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _shape(x: Any) -> list[Any]:
    """The shape and the dtype of an array, for JSON."""
    return [list(x.shape), str(x.dtype)]


def _empty(like: Any) -> Any:
    """An array without elements, of which there is nothing to read."""
    host = np.zeros(like.shape, like.dtype)
    if not isinstance(like, jax.ShapeDtypeStruct | jax.Array):
        return host
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])


def _manager(
    folder: pathlib.Path,
    keep: int,
    largest_bytes: int | None,
    noted: Callable[[BaseException], None],
) -> Any:
    """Orbax's part of it; what is thrown in the background is noted."""
    quieten_orbax()
    num = jax.process_count()
    processes = ocp.options.MultiprocessingOptions(
        # Named processes meet at the coordination service's barriers, and not in a collective.
        active_processes=set(range(num)) if num > 1 else None,
        barrier_sync_key_prefix="hxla",
    )
    gigabytes: Any = None  # an array's own chunks may reach beyond it
    if largest_bytes is not None:
        gigabytes = (largest_bytes + 2 * _CHUNK_BYTES) / 1e9
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            enable_async_checkpointing=True,
            # Else the threads that wait for a folder wait for 20 minutes after a failure.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=True,
            multiprocessing_options=processes,
        ),
        item_names=(TREE, META),
        item_handlers={
            TREE: TreeHandler(
                noted,
                save_concurrent_gb=gigabytes,
                restore_concurrent_gb=gigabytes,
                multiprocessing_options=processes,
            ),
            META: MetaHandler(noted, multiprocessing_options=processes),
        },
    )


class Checkpoints:
    """A folder of checkpoints, which no other session opens meanwhile.

    Attributes:
        notes: What the user should know of it, in words: what was damaged and is set aside, and
            that it cannot be locked.

    Args:
        folder: Made if it is not there.
        largest_bytes: Of the largest array, if only about so many are to be written or read at a
            time.
        gather: Name and text to the texts of all processes.

    Raises:
        CheckpointError: If the folder cannot be written, is another session's, or holds only
            damaged checkpoints.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        largest_bytes: int | None = None,
        gather: Callable[[str, str], tuple[str, ...]] = lambda _, text: (text,),
    ):
        self.folder = pathlib.Path(folder).absolute()
        self._gather, self._rank = gather, jax.process_index()
        self._failures: list[BaseException] = []  # of writes, most of them in the background
        self._is_told = False
        self._is_done = threading.Event()
        self._is_done.set()
        with contextlib.ExitStack() as opening:
            owner = opening.enter_context(FolderOwner(self.folder, gather))
            self._latest, damaged = newest_intact(self.folder, gather, self._rank)
            self.notes = (*owner.notes, *damaged)
            self._manager = _manager(self.folder, keep, largest_bytes, self._failures.append)
            self._owned = opening.pop_all()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """Step of the newest intact checkpoint, or None."""
        return self._latest

    @property
    def complete_step(self) -> int | None:
        """Step of the newest checkpoint, or None while it is written or if there is none."""
        return self._latest if self._is_done.is_set() and not self._failures else None

    def save(self, step: int, tree: PyTree, meta: Mapping[str, Any]) -> None:
        """Write a checkpoint in the background; returns once the arrays may be overwritten.

        Args:
            step: Updates done. One that is there already is written anew.
            tree: Arrays over all devices, and numpy arrays.

        Raises:
            CheckpointError: If this one or an earlier one failed.
        """
        self.wait()
        leaves = plain_leaves(tree)
        arrays = {name: x for name, x in leaves.items() if x.size}
        empty = {name: _shape(x) for name, x in leaves.items() if not x.size}
        facts = {**meta, _EMPTY: empty} if empty else meta
        try:
            if step == self._latest:
                self._gather("checkpoint set aside", set_aside(self.folder, step, rank=self._rank))
                self._manager.reload()
            self._is_done.clear()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    tree=TreeSave(
                        _nested(arrays), save_args=_nested(dict.fromkeys(arrays, _SAVE_ARGS))
                    ),
                    meta=MetaSave(sealed_meta(step, facts)),
                ),
                force=True,
            )
            self._latest = step
            threading.Thread(target=self._finish, args=(step,), daemon=True).start()
        except Exception as error:  # of Orbax's many layers; its save counts as under way for ever
            self._failures.append(error)
            raise self._failed from error

    def meta(self, step: int) -> dict[str, Any]:
        """The small facts that were saved beside the arrays."""
        facts = self._facts(step)
        facts.pop(_EMPTY, None)
        return facts

    def _facts(self, step: int) -> dict[str, Any]:
        restored = self._manager.restore(step, args=ocp.args.Composite(meta=MetaRestore()))
        return dict(restored[META]["facts"])

    def restore(self, like: PyTree, step: int) -> PyTree:
        """Read a checkpoint, once all saves are done.

        Args:
            like: Structure, shapes and shardings of what is wanted; numpy arrays where those are.

        Returns:
            The arrays in the structure and the places of `like`.

        Raises:
            CheckpointError: If it is of another model: every leaf that is missing, unexpected or
                of another shape or dtype, by its path.
        """
        self.wait()
        metadata = self._manager.item_metadata(step)["tree"]
        found, wanted = _flat(getattr(metadata, "tree", metadata)), plain_leaves(like)
        for name, (shape, dtype) in self._facts(step).get(_EMPTY, {}).items():
            found[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        faults = [f"  missing in the checkpoint: {n}" for n in wanted if n not in found]
        faults += [f"  not in this model: {n}" for n in found if n not in wanted]
        for name, leaf in wanted.items():
            other = found.get(name)
            if other is not None and (tuple(other.shape), other.dtype) != (leaf.shape, leaf.dtype):
                faults.append(
                    f"  {name}: {other.dtype}{list(other.shape)} in the checkpoint, "
                    f"{leaf.dtype}{list(leaf.shape)} in this model"
                )
        if faults:
            shown = faults[:20] + ([f"  and {len(faults) - 20} more"] if len(faults) > 20 else [])
            raise CheckpointError(
                f"step {step} in {self.folder} is of another model or optimizer:\n"
                + "\n".join(shown)
                + "\nresume with the model that wrote it, or use another checkpoint_dir"
            )
        args = _nested({name: _restore_args(x) for name, x in wanted.items() if x.size})
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(tree=TreeRestore(restore_args=args))
            )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} cannot be read: {error}"
            ) from error
        leaves = {name: _empty(x) for name, x in wanted.items() if not x.size}
        leaves |= _flat(restored["tree"])
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted])

    def wait(self) -> None:
        """Until everything is on disk.

        Raises:
            CheckpointError: If a save failed here. Processes that wait for this one then wait in
                vain: it has to end.
        """
        while not self._failures and not self._is_done.wait(_POLL_SECONDS):
            pass
        if self._failures:
            raise self._failed from self._failures[0]
        trim_heap()  # the writers leave hundreds of MiB in small pieces

    def _finish(self, step: int) -> None:
        """Wait for a save: Orbax counts one as under way for ever that fails at its end."""
        try:
            self._manager.wait_until_finished()
            let_go(self.folder, step, rank=self._rank)
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._is_done.set()

    @property
    def _failed(self) -> CheckpointError:
        first, self._is_told = self._failures[0], True
        words = str(first) or type(first).__name__
        return CheckpointError(f"a checkpoint in {self.folder} could not be written: {words}")

    def close(self) -> None:
        """Wait and let go of the folder; after a failure there is nothing to wait for.

        Raises:
            CheckpointError: If a save failed of which nobody was told.
        """
        with self._owned:
            if not self._is_told:
                self.wait()
                self._manager.close()

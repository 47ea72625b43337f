"""Checkpoints through Orbax: asynchronous, in the user's own tree, free of any layout.

Every process writes what it owns, and reads what it needs: nothing is gathered. A checkpoint
becomes visible by one rename, so a process killed at any moment leaves either a whole checkpoint or
none. What happens to it later is seen by its seal.
"""

import contextlib
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

from .._core._errors import CheckpointError
from .._core._types import PyTree
from .._jax._heap import trim_heap
from .._model._functional import plain_leaves
from ._checkpoint_handlers import (
    MetaHandler,
    MetaRestore,
    MetaSave,
    TreeHandler,
    TreeRestore,
    TreeSave,
    quieten_orbax,
)
from ._checkpoint_seal import META, TREE, let_go, newest_intact, sealed_meta, set_aside
from ._folder_owner import FolderOwner

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
        folder: Where it is.
        notes: What the user should know of it, in words: what was damaged and is set aside, and
            that it cannot be locked.

    Args:
        folder: Made if it is not there.
        keep: Newest checkpoints that stay.
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
            meta: Small facts besides.

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
            step: Of the checkpoint.

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

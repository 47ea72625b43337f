"""Checkpoints through Orbax: asynchronous, in the user's own tree, free of any layout.

Every process holds the whole state, so process 0 alone writes. A checkpoint becomes visible by
one rename, so a process killed at any moment leaves either a whole checkpoint or none.
"""

import dataclasses
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from .._core._errors import CheckpointError
from .._core._types import PyTree
from .._model._functional import to_host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A restored checkpoint: numpy leaves in the structure that was asked for."""

    step: int
    tree: PyTree


def _plain(tree: PyTree) -> dict[str, np.ndarray]:
    """Leaves by their path in the user's tree, as nested names joined by dots."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    out: dict[str, np.ndarray] = {}
    for path, leaf in leaves:
        name = ".".join(
            str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path
        )
        out[name.replace("/", "_")] = np.asarray(leaf)
    return out


def _nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


class Checkpoints:
    """A folder of checkpoints.

    Args:
        folder: Made if it is not there.
        keep: Newest checkpoints that stay.
        writer: Whether this process writes.

    Raises:
        CheckpointError: If the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, writer: bool):
        self.folder = pathlib.Path(folder).absolute()
        self._writer = writer
        if writer:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint_dir {self.folder} cannot be written: {error.strerror}; "
                    "choose another folder or change its permissions"
                ) from None
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=writer,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(),
                active_processes={jax.process_index()},
                barrier_sync_key_prefix=f"hxla{jax.process_index()}",
            ),
        )
        self._manager: Any = None
        if writer or self.folder.is_dir():
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=options,
                item_names=("tree", "meta"),
                item_handlers={
                    "tree": ocp.PyTreeCheckpointHandler(
                        multiprocessing_options=options.multiprocessing_options
                    ),
                    "meta": ocp.JsonCheckpointHandler(
                        multiprocessing_options=options.multiprocessing_options
                    ),
                },
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, or None."""
        if self._manager is None:
            return None
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def save(self, step: int, tree: PyTree, meta: Mapping[str, Any]) -> None:
        """Write a checkpoint in the background; returns once the arrays are copied to the host.

        Raises:
            CheckpointError: If an earlier one failed.
        """
        if not self._writer:
            return
        nested = _nested(_plain(to_host(tree)))
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    tree=ocp.args.PyTreeSave(nested), meta=ocp.args.JsonSave(dict(meta))
                ),
                force=True,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} failed: {error}") from error

    def meta(self, step: int) -> dict[str, Any]:
        """The small facts that were saved beside the arrays."""
        restored = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        return dict(restored["meta"])

    def restore(self, like: PyTree, step: int) -> Saved:
        """Read a checkpoint into the structure of `like`, once all saves are done.

        Raises:
            CheckpointError: If it is of another model: every leaf that is missing, unexpected or
                of another shape or dtype, by its path.
        """
        self.wait()
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                tree=ocp.args.PyTreeRestore(
                    restore_args=jax.tree.map(
                        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
                        _nested(self._shapes(step)),
                    )
                )
            ),
        )
        found = _plain(restored["tree"])
        wanted = _plain(like)
        faults = [f"  missing in the checkpoint: {n}" for n in wanted if n not in found]
        faults += [f"  not in this model: {n}" for n in found if n not in wanted]
        for name, leaf in wanted.items():
            other = found.get(name)
            if other is not None and (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
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
        leaves = [found[name] for name in wanted]
        return Saved(step=step, tree=jax.tree.unflatten(jax.tree.structure(like), leaves))

    def _shapes(self, step: int) -> dict[str, Any]:
        metadata = self._manager.item_metadata(step)["tree"]
        tree = getattr(metadata, "tree", metadata)
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {
            ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf
            for path, leaf in leaves
        }

    def wait(self) -> None:
        """Until everything is on disk.

        Raises:
            CheckpointError: If a save failed.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"a checkpoint in {self.folder} failed: {error}") from error

    def close(self) -> None:
        """Wait and let go of the folder."""
        if self._manager is not None:
            self.wait()
            self._manager.close()
            self._manager = None

"""Checkpoints through Orbax: asynchronous, in the user's tree, independent of any layout.

Every process writes its shards and reads the shards that it needs; nothing is gathered. A
checkpoint becomes visible by one rename, so a process killed at any moment leaves a complete
checkpoint or none. Its seal detects later damage.

Orbax raises the error of a background write only after a barrier of all processes, which they never
pass if one failed. So errors are reported here before the barrier.

One session at a time writes to a folder of checkpoints. Its lock is `flock` on a file of the
folder. The lock belongs to the open file, so two sessions of one process exclude each other too.
The kernel releases it however the process ends. On NFS it is a lock on the server (since Linux
2.6.12), so hosts exclude each other; after the loss of a host the server releases it with its
lease. Locks that are local to each host do not exclude jobs on other hosts: NFS with `nolock` or
`local_lock`, and some file systems in user space.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import logging
import os
import pathlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from ..core.errors import CheckpointError
from ..core.types import PyTree
from ..jax.devices import trim_heap
from ..launch.channel import JOB_VARIABLE
from ..model.functional import plain_leaves
from .seal import META, TREE, newest_intact, remove_set_aside, seal, sealed_meta, set_aside

OWNER = "hxla-owner.json"
_LOCK_SECONDS = 0.05
# How long an earlier generation of the same job may still have the lock, if its host was lost.
_LEASE_SECONDS = 100.0
_WRITE_SECONDS = 2.0  # at most, between a lock and the owner's entry in the file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """The session that has locked a folder, as written in its file.

    Attributes:
        start: Time of the lock, in ISO 8601.
        job: Of `hxla run --elastic`; empty: none.
    """

    host: str
    pid: int
    start: str
    job: str

    @classmethod
    def here(cls) -> "Owner":
        """This process, now."""
        start = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        job = os.environ.get(JOB_VARIABLE, "")
        return cls(host=socket.gethostname(), pid=os.getpid(), start=start, job=job)


class FolderOwner:
    """The lock of a folder, until `close` or the end of the process.

    Attributes:
        notes: A note for the user if the folder cannot be locked.

    Args:
        folder: Created if missing.
        gather: Name and text to the texts of all processes, of which the first locks the folder.

    Raises:
        CheckpointError: If the folder cannot be written, or another session has it: with that
            session's host, process and start.
    """

    def __init__(self, folder: pathlib.Path, gather: Callable[[str, str], tuple[str, ...]]):
        self._path = folder / OWNER
        self._file: IO[str] | None = None
        self.notes: tuple[str, ...] = ()
        problem = self._acquire() if jax.process_index() == 0 else ""
        try:
            [problem, *_] = gather("checkpoint folder", problem)
            if problem:
                raise CheckpointError(problem)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "FolderOwner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder."""
        if self._file is not None and not self._file.closed:  # as in a forked process
            with contextlib.suppress(OSError):  # the folder may be gone
                if _is_at(self._path, self._file):
                    self._path.unlink()
            self._file.close()

    def _acquire(self) -> str:
        """Lock the folder; returns the problem, or ''."""
        owner, folder = Owner.here(), self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked_file(owner)
            _close_in_children(self._file)
            self._file.truncate(0)
            self._file.write(json.dumps(dataclasses.asdict(owner)))
            self._file.flush()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return (
                f"checkpoint_dir {folder} cannot be written: {error.strerror}; choose another "
                "folder or change its permissions"
            )
        return ""

    def _locked_file(self, owner: Owner) -> IO[str]:
        began, folder = time.monotonic(), self._path.parent
        while True:
            file = _opened(self._path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    other = _read(file)
                if time.monotonic() - began >= _patience_seconds(other, owner):
                    raise CheckpointError(_refusal(folder, other, owner)) from None
                time.sleep(_LOCK_SECONDS)
                continue
            except OSError as error:
                why = f"{folder} cannot be locked ({error.strerror})"
                self.notes = (f"{why}: a second job that writes there is not detected",)
            if _is_at(self._path, file):
                return file
            file.close()  # its owner removed it meanwhile


def _opened(path: pathlib.Path) -> IO[str]:
    """The lock file, created if missing; open for writing, which NFS locks need."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def _close_in_children(file: IO[str]) -> None:
    """Close the file in forked processes, which may outlive this one with its lock."""
    reference = weakref.ref(file)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def _is_at(path: pathlib.Path, file: IO[str]) -> bool:
    """Whether a path still leads to this open file, which other sessions would lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:  # it is gone, or a stale NFS handle
        return False


def _read(file: IO[str]) -> Owner | None:
    """The owner in a lock file; None during its write."""
    try:
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def _patience_seconds(other: Owner | None, owner: Owner) -> float:
    if other is None:
        return _WRITE_SECONDS
    return _LEASE_SECONDS if owner.job and other.job == owner.job else 0.0


def _refusal(folder: pathlib.Path, other: Owner | None, owner: Owner) -> str:
    who, remedy = "its process is not known yet", "wait until it ends, or end it"
    if other is not None:
        who = f"process {other.pid} on {other.host}, since {other.start}"
        if (other.pid, other.host) == (owner.pid, owner.host):
            who += ", the same number and host as this process"
            remedy = "close that session"
    return (
        f"checkpoint_dir {folder} is used by another session: {who}; {remedy}, or use another "
        "checkpoint_dir"
    )


_ORBAX = str(pathlib.Path(ocp.__file__).parent)

Report = Callable[[BaseException], None]


class _WatchedWrite:
    """One of Orbax's futures of a background write, which reports its error."""

    def __init__(self, write: Any, report: Report):
        self._write, self._report = write, report

    def result(self, timeout: int | None = None) -> Any:
        """Wait for the write."""
        try:
            return self._write.result(timeout)
        except BaseException as error:
            self._report(error)
            raise


class _ErrorReporting:
    """Reports errors of Orbax's handlers, and seals."""

    def __init__(self, report: Report, **options: Any):
        super().__init__(**options)
        self._report = report

    async def async_save(self, *args: Any, **kwargs: Any) -> list[_WatchedWrite]:
        """Start to write; Orbax waits for the returned futures in the background."""
        writes = await super().async_save(*args, **kwargs)  # type: ignore[misc]
        return [_WatchedWrite(write, self._report) for write in writes or ()]

    def finalize(self, directory: Any) -> None:
        """Finish the writes of all processes, before the checkpoint is renamed."""
        try:
            super().finalize(directory)  # type: ignore[misc]
            self._seal(directory)
        except BaseException as error:
            self._report(error)
            raise

    def _seal(self, directory: Any) -> None:
        """No seal by default."""


class TreeHandler(_ErrorReporting, ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Writes and reads arrays."""

    def _seal(self, directory: Any) -> None:
        seal(directory)


class MetaHandler(_ErrorReporting, ocp.JsonCheckpointHandler):  # type: ignore[misc]
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
    """Whether to log a record: not Orbax's lines on every file, nor on errors that are raised."""
    is_orbax = record.pathname.startswith(_ORBAX)
    return not is_orbax or (record.levelno >= logging.ERROR and not record.exc_info)


def quieten_orbax() -> None:
    """Filter Orbax's log; other users of absl's logger are not affected."""
    logging.getLogger("absl").addFilter(_is_worth_a_line)


_CHUNK_BYTES = 1 << 26  # the least read, however an array is sharded then
_POLL_SECONDS = 0.005
_EMPTY = "arrays without elements"  # stored among the facts: Orbax's format has no such arrays
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
    """An array without elements, which needs no read."""
    host = np.zeros(like.shape, like.dtype)
    if not isinstance(like, jax.ShapeDtypeStruct | jax.Array):
        return host
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])


def _manager(
    folder: pathlib.Path,
    keep: int,
    largest_bytes: int | None,
    report: Report,
) -> Any:
    """Orbax's manager, with background errors reported."""
    quieten_orbax()
    num = jax.process_count()
    processes = ocp.options.MultiprocessingOptions(
        # With named processes barriers are the coordination service's, not collectives.
        active_processes=set(range(num)) if num > 1 else None,
        barrier_sync_key_prefix="hxla",
    )
    gigabytes: Any = None  # chunks may be larger than the array
    if largest_bytes is not None:
        gigabytes = (largest_bytes + 2 * _CHUNK_BYTES) / 1e9
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            enable_async_checkpointing=True,
            # Otherwise threads wait for a folder for 20 minutes after a failure.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=True,
            multiprocessing_options=processes,
        ),
        item_names=(TREE, META),
        item_handlers={
            TREE: TreeHandler(
                report,
                save_concurrent_gb=gigabytes,
                restore_concurrent_gb=gigabytes,
                multiprocessing_options=processes,
            ),
            META: MetaHandler(report, multiprocessing_options=processes),
        },
    )


class Checkpoints:
    """A folder of checkpoints, locked against other sessions.

    Attributes:
        notes: Notes for the user: damaged checkpoints that were renamed, and a failed lock.

    Args:
        folder: Created if missing.
        largest_bytes: Of the largest array, to limit concurrent reads and writes to about that;
            None: no limit.
        gather: Name and text to the texts of all processes.

    Raises:
        CheckpointError: If the folder cannot be written, is used by another session, or has only
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
        self._is_reported = False
        self._is_done = threading.Event()
        self._is_done.set()
        with contextlib.ExitStack() as opening:
            owner = opening.enter_context(FolderOwner(self.folder, gather))
            self._latest, damaged = newest_intact(self.folder, gather, self._rank)
            self.notes = (*owner.notes, *damaged)
            self._manager = _manager(self.folder, keep, largest_bytes, self._failures.append)
            self._resources = opening.pop_all()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """Step of the newest intact checkpoint, or None."""
        return self._latest

    @property
    def complete_step(self) -> int | None:
        """Step of the newest complete checkpoint; None during a write, or without any."""
        return self._latest if self._is_done.is_set() and not self._failures else None

    def save(self, step: int, tree: PyTree, meta: Mapping[str, Any]) -> None:
        """Write a checkpoint in the background; returns once the arrays may be overwritten.

        Args:
            step: Number of updates; an existing checkpoint of this step is replaced.
            tree: Arrays over all devices, and numpy arrays.

        Raises:
            CheckpointError: If this or an earlier write failed.
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
        except Exception as error:  # of any type; Orbax's save then never ends
            self._failures.append(error)
            raise self._failed from error

    def meta(self, step: int) -> dict[str, Any]:
        """The small facts that were saved with the arrays."""
        facts = self._facts(step)
        facts.pop(_EMPTY, None)
        return facts

    def _facts(self, step: int) -> dict[str, Any]:
        restored = self._manager.restore(step, args=ocp.args.Composite(meta=MetaRestore()))
        return dict(restored[META]["facts"])

    def restore(self, like: PyTree, step: int) -> PyTree:
        """Read a checkpoint, after all saves.

        Args:
            like: Structure, shapes and shardings of the result; numpy arrays for numpy arrays.

        Returns:
            Arrays with the structure and shardings of `like`.

        Raises:
            CheckpointError: If it is of another model: every leaf that is missing, unexpected or
                of another shape or dtype, by its path.
        """
        self.wait()
        metadata = self._manager.item_metadata(step)["tree"]
        stored, wanted = _flat(getattr(metadata, "tree", metadata)), plain_leaves(like)
        for name, (shape, dtype) in self._facts(step).get(_EMPTY, {}).items():
            stored[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        faults = [f"  missing in the checkpoint: {n}" for n in wanted if n not in stored]
        faults += [f"  not in this model: {n}" for n in stored if n not in wanted]
        for name, leaf in wanted.items():
            other = stored.get(name)
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
        """Wait until everything is on disk.

        Raises:
            CheckpointError: If a save failed here. Other processes then wait for this one, so it
                must end.
        """
        while not self._failures and not self._is_done.wait(_POLL_SECONDS):
            pass
        if self._failures:
            raise self._failed from self._failures[0]
        trim_heap()  # the writers leave hundreds of MiB in small pieces

    def _finish(self, step: int) -> None:
        """Wait for a save in a thread, since Orbax never ends a save that fails at its end."""
        try:
            self._manager.wait_until_finished()
            remove_set_aside(self.folder, step, rank=self._rank)
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._is_done.set()

    @property
    def _failed(self) -> CheckpointError:
        first, self._is_reported = self._failures[0], True
        words = str(first) or type(first).__name__
        return CheckpointError(f"a checkpoint in {self.folder} could not be written: {words}")

    def close(self) -> None:
        """Wait for saves, unless one failed, and release the folder.

        Raises:
            CheckpointError: If a save failed and was not reported yet.
        """
        with self._resources:
            if not self._is_reported:
                self.wait()
                self._manager.close()

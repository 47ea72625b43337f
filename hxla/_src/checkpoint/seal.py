"""Integrity of checkpoints: a seal of all files, written before a checkpoint is visible."""

import contextlib
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import CheckpointError

TREE, META = "tree", "meta"  # folders of a checkpoint
_SEAL = "hxla-seal.json"
_BEFORE = ".before"  # suffix of a checkpoint that is being replaced
_CHUNK_BYTES = 1 << 22


def seal(tree: str | os.PathLike[str]) -> None:
    """Write the size and the checksum of every file of a folder into it."""
    folder = pathlib.Path(tree)
    sums = {str(p.relative_to(folder)): _size_and_sum(p) for p in _files(folder)}
    (folder / _SEAL).write_text(json.dumps(sums))


def sealed_meta(step: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The small facts of a checkpoint with a checksum."""
    return {"step": step, "facts": dict(meta), "sum": _sum_of_facts(step, meta)}


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of a folder's checkpoints, newest first."""
    named = (entry.name for entry in folder.iterdir())
    return sorted((int(n) for n in named if n.isdecimal() and str(int(n)) == n), reverse=True)


def newest_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The small facts of the newest checkpoint with intact facts; empty if there is none.

    Args:
        folder: It need not exist.
    """
    with contextlib.suppress(OSError):
        for step in steps_in(folder):
            facts = _facts(folder / str(step), step)
            if isinstance(facts, dict):
                return facts
    return {}


def newest_intact(
    folder: pathlib.Path,
    gather: Callable[[str, str], tuple[str, ...]],
    rank: int,
) -> tuple[int | None, tuple[str, ...]]:
    """Find the newest intact checkpoint.

    Processes share the work of reading. Damaged checkpoints are renamed, so that the run can write
    their steps again.

    Args:
        gather: Name and text to the texts of all processes.

    Returns:
        The step, None if there are no checkpoints, and notes on renamed ones.

    Raises:
        CheckpointError: If all checkpoints are damaged, with the fault of each.
    """
    if rank == 0:
        _bring_back(folder)
    [listed, *_] = gather("checkpoints", json.dumps(steps_in(folder) if rank == 0 else []))
    num = len(gather("readers of checkpoints", ""))
    damaged: list[tuple[int, str]] = []
    for step in json.loads(listed):
        here = _fault(folder / str(step), step, range(rank, 1 << 31, num))
        fault = next(filter(None, gather("damage", here)), "")
        if not fault:
            return step, _rename_damaged(folder, damaged, gather, rank)
        damaged.append((step, fault))
    if not damaged:
        return None, ()
    raise CheckpointError(
        f"no checkpoint in {folder} can be read:\n"
        + "\n".join(f"  {step}: {fault}" for step, fault in damaged)
        + "\nrestore a backup, or use another checkpoint_dir to start from the beginning"
    )


def set_aside(folder: pathlib.Path, step: int, *, rank: int) -> str:
    """Rename a checkpoint that is to be replaced, until `remove_set_aside`; returns ''."""
    if rank == 0:
        (folder / str(step)).rename(folder / f"{step}{_BEFORE}")
    return ""


def remove_set_aside(folder: pathlib.Path, step: int, *, rank: int) -> None:
    """Remove the checkpoint of `set_aside`, once the new one is complete."""
    if rank == 0 and (folder / f"{step}{_BEFORE}").exists():
        shutil.rmtree(folder / f"{step}{_BEFORE}")


def _bring_back(folder: pathlib.Path) -> None:
    """Restore checkpoints set aside by a killed process, unless the new one is complete."""
    for entry in folder.glob(f"*{_BEFORE}"):
        complete = entry.with_name(entry.name.removesuffix(_BEFORE))
        if complete.exists():
            shutil.rmtree(entry)
        else:
            entry.rename(complete)


def _rename_damaged(
    folder: pathlib.Path,
    damaged: Sequence[tuple[int, str]],
    gather: Callable[[str, str], tuple[str, ...]],
    rank: int,
) -> tuple[str, ...]:
    notes = []
    if rank == 0:
        for step, fault in damaged:
            names = (f"{step}.damaged{f'-{i}' if i else ''}" for i in range(1 << 31))
            name = next(n for n in names if not (folder / n).exists())
            try:
                (folder / str(step)).rename(folder / name)
            except OSError as error:
                fault += f"; it cannot be moved: {error.strerror}"
                name = str(step)
            notes.append(f"checkpoint {step} is damaged and now called {name}: {fault}")
    [text, *_] = gather("damaged checkpoints", json.dumps(notes))
    return tuple(json.loads(text))


def _fault(checkpoint: pathlib.Path, step: int, share: range) -> str:
    """The first fault of a checkpoint, with a share of its files read; empty: none."""
    if not checkpoint.is_dir():
        return "it is no folder"
    if not any(checkpoint.iterdir()):
        return "it is an empty folder"
    try:
        for path in sorted(checkpoint.rglob("*")):
            if not path.is_file() and not path.is_dir():  # reading a pipe would block
                return f"{path.relative_to(checkpoint)} is no regular file"
        facts = _facts(checkpoint, step)
        return facts if isinstance(facts, str) else _tree_fault(checkpoint / TREE, share)
    except OSError as error:
        name = os.path.relpath(error.filename or checkpoint, checkpoint)
        return f"{name} cannot be read: {error.strerror or error}"


def _facts(checkpoint: pathlib.Path, step: int) -> dict[str, Any] | str:
    """The small facts, or their fault as text."""
    try:
        meta = json.loads((checkpoint / META / "metadata").read_bytes())
        written, facts, checksum = meta["step"], meta["facts"], meta["sum"]
        is_intact = checksum == _sum_of_facts(written, facts) and isinstance(facts, dict)
    except (ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        return f"{META}/metadata is not what was written"
    return facts if written == step else f"it is step {written} under another name"


def _tree_fault(tree: pathlib.Path, share: range) -> str:
    try:
        sums = json.loads((tree / _SEAL).read_bytes())
        expected = {str(name): tuple(pair) for name, pair in sums.items()}
    except (ValueError, AttributeError, TypeError):
        return f"{TREE}/{_SEAL} is not what was written"
    present = {str(p.relative_to(tree)) for p in _files(tree)}
    for name in sorted(expected.keys() - present):
        return f"{TREE}/{name} is missing"
    for i, name in enumerate(sorted(expected)):
        path, (num_bytes, _) = tree / name, expected[name]
        if path.stat().st_size != num_bytes:
            return f"{TREE}/{name} has {path.stat().st_size} bytes instead of {num_bytes}"
        if i in share and _size_and_sum(path) != expected[name]:
            return f"{TREE}/{name} has other bytes than were written"
    return ""


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _SEAL)


def _size_and_sum(path: pathlib.Path) -> tuple[int, int]:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
        return file.tell(), total


def _sum_of_facts(step: int, facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([step, facts], sort_keys=True).encode())

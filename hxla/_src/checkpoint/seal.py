"""Whether a checkpoint is as it was written: a seal of all its files, made before it is visible."""

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
_BEFORE = ".before"  # after the name of a checkpoint that is written anew
_CHUNK_BYTES = 1 << 22


def seal(tree: str | os.PathLike[str]) -> None:
    """Write the size and the checksum of every file of a folder into it."""
    folder = pathlib.Path(tree)
    found = {str(p.relative_to(folder)): _size_and_sum(p) for p in _files(folder)}
    (folder / _SEAL).write_text(json.dumps(found))


def sealed_meta(step: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The small facts of a checkpoint with their own checksum."""
    return {"step": step, "facts": dict(meta), "sum": _sum_of_facts(step, meta)}


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps after which entries of a folder are named, newest first."""
    named = (entry.name for entry in folder.iterdir())
    return sorted((int(n) for n in named if n.isdecimal() and str(int(n)) == n), reverse=True)


def newest_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The small facts of the newest checkpoint whose facts are as they were written, if any.

    Args:
        folder: Of the checkpoints; it need not be there.
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
    """Look from the newest checkpoint on for one that is as it was written.

    Processes share the work of reading. What is damaged is set aside under another name, so that
    the run can write its steps again.

    Args:
        gather: Name and text to the texts of all processes.

    Returns:
        The step, None if there are no checkpoints, and what was set aside, in words.

    Raises:
        CheckpointError: If there are some and all are damaged, with the fault of each.
    """
    if rank == 0:
        _bring_back(folder)
    [listed, *_] = gather("checkpoints", json.dumps(steps_in(folder) if rank == 0 else []))
    num = len(gather("readers of checkpoints", ""))
    damaged: list[tuple[int, str]] = []
    for step in json.loads(listed):
        own = _fault(folder / str(step), step, range(rank, 1 << 31, num))
        fault = next(filter(None, gather("damage", own)), "")
        if not fault:
            return step, _renamed(folder, damaged, gather, rank)
        damaged.append((step, fault))
    if not damaged:
        return None, ()
    raise CheckpointError(
        f"no checkpoint in {folder} can be read:\n"
        + "\n".join(f"  {step}: {fault}" for step, fault in damaged)
        + "\nbring back a copy, or use another checkpoint_dir to start anew"
    )


def set_aside(folder: pathlib.Path, step: int, *, rank: int) -> str:
    """Give a checkpoint that is to be written anew another name until `let_go`; returns ''."""
    if rank == 0:
        (folder / str(step)).rename(folder / f"{step}{_BEFORE}")
    return ""


def let_go(folder: pathlib.Path, step: int, *, rank: int) -> None:
    """Remove what `set_aside` kept: the new one is whole."""
    if rank == 0 and (folder / f"{step}{_BEFORE}").exists():
        shutil.rmtree(folder / f"{step}{_BEFORE}")


def _bring_back(folder: pathlib.Path) -> None:
    """What a kill left set aside: it is the checkpoint, unless the new one was finished."""
    for entry in folder.glob(f"*{_BEFORE}"):
        whole = entry.with_name(entry.name.removesuffix(_BEFORE))
        if whole.exists():
            shutil.rmtree(entry)
        else:
            entry.rename(whole)


def _renamed(
    folder: pathlib.Path,
    damaged: Sequence[tuple[int, str]],
    gather: Callable[[str, str], tuple[str, ...]],
    rank: int,
) -> tuple[str, ...]:
    said = []
    if rank == 0:
        for step, fault in damaged:
            names = (f"{step}.damaged{f'-{i}' if i else ''}" for i in range(1 << 31))
            name = next(n for n in names if not (folder / n).exists())
            try:
                (folder / str(step)).rename(folder / name)
            except OSError as error:
                fault += f"; it cannot be moved: {error.strerror}"
                name = str(step)
            said.append(f"checkpoint {step} is damaged and now called {name}: {fault}")
    [text, *_] = gather("damaged checkpoints", json.dumps(said))
    return tuple(json.loads(text))


def _fault(checkpoint: pathlib.Path, step: int, share: range) -> str:
    """What is wrong with a checkpoint, as far as a share of its files shows; empty: nothing."""
    if not checkpoint.is_dir():
        return "it is no folder"
    if not any(checkpoint.iterdir()):
        return "it is an empty folder"
    try:
        for path in sorted(checkpoint.rglob("*")):
            if not path.is_file() and not path.is_dir():  # whoever reads a pipe waits
                return f"{path.relative_to(checkpoint)} is no regular file"
        facts = _facts(checkpoint, step)
        return facts if isinstance(facts, str) else _fault_of_tree(checkpoint / TREE, share)
    except OSError as error:
        name = os.path.relpath(error.filename or checkpoint, checkpoint)
        return f"{name} cannot be read: {error.strerror or error}"


def _facts(checkpoint: pathlib.Path, step: int) -> dict[str, Any] | str:
    """The small facts, or what is wrong with them."""
    try:
        meta = json.loads((checkpoint / META / "metadata").read_bytes())
        written, facts, told = meta["step"], meta["facts"], meta["sum"]
        is_whole = told == _sum_of_facts(written, facts) and isinstance(facts, dict)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        return f"{META}/metadata is not what was written"
    return facts if written == step else f"it is step {written} under another name"


def _fault_of_tree(tree: pathlib.Path, share: range) -> str:
    try:
        told = json.loads((tree / _SEAL).read_bytes())
        expected = {str(name): tuple(pair) for name, pair in told.items()}
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
            return f"{TREE}/{name} holds other bytes than were written"
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

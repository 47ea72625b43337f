"""Folders that XLA wrote with `--xla_dump_to`."""

import dataclasses
import gzip
import hashlib
import io
import pathlib
import re
from collections.abc import Iterator

from .._core._errors import InspectError
from .._jax import _buffer_assignment as _assignment
from .._jax import _hlo_proto as _proto
from .._jax._buffer_assignment import BufferAssignment
from ._analyze import Compilation, Hints, analyze
from ._hlo_text import Module, read_module
from ._inspection import Inspection
from ._program import Program

_FILE = re.compile(
    r"(?P<stem>module_\d+\..+?)\.(?:[\w.]*_)?(?P<when>before|after)_optimizations(?P<tail>[.-].*)$"
)
_HLO = (".txt", ".hlo", ".pb", ".txt.gz", ".hlo.gz", ".pb.gz")
_PIECE = 1 << 13  # characters: what is lost of a file that cannot be read to its end


@dataclasses.dataclass(kw_only=True)
class _Files:
    """Files of one module, by what they hold: `after .txt`, `after -live-range.txt`, ..."""

    folder: pathlib.Path
    stem: str
    by_kind: dict[str, pathlib.Path] = dataclasses.field(default_factory=dict)


def read_dump(path: pathlib.Path, hints: Hints) -> Inspection:
    """Inspect a dump folder, those of several processes within it, or one file.

    Raises:
        InspectError: If there is no such file or folder, or nothing in it is HLO.
    """
    if not path.exists():
        raise InspectError(f"no file or folder {path}")
    problems: list[str] = []
    modules = list(_modules(path))
    programs: list[Program] = []
    same: dict[str, int] = {}
    for files in modules:
        digest = _digest(files)
        if digest in same:  # another process compiled the very same program
            same[digest] += 1
            continue
        same[digest] = 1
        try:
            programs.append(_program(files, hints))
        except (OSError, EOFError, ValueError) as error:
            problems.append(f"{files.folder / files.stem}: {error}")
    if not modules:
        raise InspectError(
            f"{path} holds no HLO: no file like module_0000.NAME.after_optimizations.txt; make a "
            "dump with hxla run --dump DIR, or XLA_FLAGS=--xla_dump_to=DIR"
        )
    ranked = sorted(programs, key=lambda p: -(p.memory.total_bytes if p.memory else 0))
    return Inspection(programs=tuple(ranked), problems=tuple(problems))


def _modules(path: pathlib.Path) -> Iterator[_Files]:
    if path.is_file():
        found = _FILE.match(path.name)
        if found:
            yield from (f for f in _in_folder(path.parent) if f.stem == found["stem"])
        else:
            yield _Files(folder=path.parent, stem=path.name, by_kind={_kind_of(path): path})
        return
    for folder in (path, *sorted(p for p in path.rglob("*") if p.is_dir())):
        yield from _in_folder(folder)


def _kind_of(path: pathlib.Path) -> str:
    return "after .hlo.pb" if ".pb" in path.suffixes else "after .txt"


def _in_folder(folder: pathlib.Path) -> Iterator[_Files]:
    found: dict[str, _Files] = {}
    others: list[pathlib.Path] = []
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        match = _FILE.match(file.name)
        if match:
            files = found.setdefault(match["stem"], _Files(folder=folder, stem=match["stem"]))
            files.by_kind[f"{match['when']} {match['tail'].removesuffix('.gz')}"] = file
        elif file.name.endswith(_HLO) and _is_hlo(file):
            others.append(file)
    yield from found.values()
    for file in others:
        yield _Files(folder=folder, stem=file.name, by_kind={_kind_of(file): file})


def _is_hlo(file: pathlib.Path) -> bool:
    if ".pb" in file.suffixes:
        return file.name.removesuffix(".gz").endswith(".hlo.pb")
    try:
        with _open(file) as lines:
            return lines.read(9) == "HloModule"
    except (OSError, EOFError):
        return False


def _digest(files: _Files) -> str:
    sha = hashlib.sha256(files.stem.encode())
    for kind in ("after .txt", "after .hlo.pb"):
        if kind in files.by_kind:
            with files.by_kind[kind].open("rb") as data:
                return hashlib.file_digest(data, lambda: sha).hexdigest()
    return f"{files.folder}/{files.stem}"


def _open(file: pathlib.Path) -> io.TextIOWrapper:
    if file.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(file), "utf-8", errors="replace")
    return file.open(encoding="utf-8", errors="replace")


def _bytes(file: pathlib.Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _program(files: _Files, hints: Hints) -> Program:
    problems: list[str] = []
    proto = files.by_kind.get("after .hlo.pb")
    text = files.by_kind.get("after .txt")
    module_bytes = assignment_bytes = b""
    if proto is not None:
        try:
            module_bytes, assignment_bytes = _proto.parts_of_dump(_bytes(proto))
        except ValueError as error:
            problems.append(f"{proto.name}: {error}")
    if text is not None:
        module = _read(text, problems)
    elif module_bytes:
        module = read_module(_proto.module_text(module_bytes))
    else:
        before = files.by_kind.get("before .txt")
        reasons = "; ".join(problems) or (
            f"it has only {', '.join(sorted(files.by_kind))}"
            + (": the compiler did not finish it" if before else "")
        )
        raise ValueError(f"there is no optimized program: {reasons}")
    assignment, source = _memory(files, assignment_bytes, module_bytes, problems)
    compilation = Compilation(
        source=str(text or proto),
        before=_before(files, problems),
        assignment=assignment,
        memory_missing="the dump has no buffer assignment",
        memory_source=source,
        problems=tuple(problems),
    )
    return analyze(module, compilation, hints)


def _read(file: pathlib.Path, problems: list[str]) -> Module:
    pieces: list[str] = []
    try:
        with _open(file) as opened:
            pieces.extend(iter(lambda: opened.read(_PIECE), ""))
    except (EOFError, OSError) as error:
        problems.append(f"{file.name}: {error}")
    return read_module("".join(pieces))


def _before(files: _Files, problems: list[str]) -> Module | None:
    """The module before optimization; without it only names of axes are missing."""
    text, proto = files.by_kind.get("before .txt"), files.by_kind.get("before .hlo.pb")
    if text is not None:
        return _read(text, problems)
    if proto is None:
        return None
    try:
        module, _ = _proto.parts_of_dump(_bytes(proto))
        return read_module(_proto.module_text(module))
    except ValueError as error:
        problems.append(f"{proto.name}: {error}")
        return None


def _memory(
    files: _Files, serialized: bytes, module: bytes, problems: list[str]
) -> tuple[BufferAssignment | None, str]:
    if serialized:
        try:
            return _proto.buffer_assignment(serialized, module), "the dump's buffer assignment"
        except ValueError as error:
            problems.append(f"the buffer assignment: {error}")
    text = files.by_kind.get("after -buffer-assignment.txt")
    if text is None:
        return None, ""
    try:
        with _open(text) as lines:
            return _assignment.from_text(lines), text.name
    except (ValueError, EOFError, OSError) as error:
        problems.append(f"{text.name}: {error}")
        return None, ""

"""Folders that XLA wrote with `--xla_dump_to`."""

import dataclasses
import gzip
import hashlib
import pathlib
import re
import zlib
from collections.abc import Iterator

from .._core._errors import InspectError
from .._jax import _buffer_assignment as _assignment
from .._jax import _hlo_proto as _proto
from .._jax._buffer_assignment import BufferAssignment
from ._analyze import Hints, analyze
from ._arguments import signature
from ._hlo_text import Module, read_module
from ._inspection import Inspection
from ._program import Program

_FILE = re.compile(
    r"(?P<stem>module_\d+\..+?)\.(?:[\w.]*_)?(?P<when>before|after)_optimizations(?P<tail>[.-].*)$"
)
_HLO = (".txt", ".hlo", ".pb", ".txt.gz", ".hlo.gz", ".pb.gz")


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
    seen: set[str] = set()
    for files in modules:
        digest = _digest(files)
        if digest in seen:  # another process compiled the very same program
            continue
        seen.add(digest)
        try:
            programs.append(_program(files, hints))
        except ValueError as error:
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
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            return opened.read(9) == b"HloModule"
    except (OSError, EOFError):
        return False


def _digest(files: _Files) -> str:
    sha = hashlib.sha256(files.stem.encode())
    for kind in ("after .txt", "after .hlo.pb"):
        if kind in files.by_kind:
            with files.by_kind[kind].open("rb") as data:
                return hashlib.file_digest(data, lambda: sha).hexdigest()
    return f"{files.folder}/{files.stem}"


def _bytes(file: pathlib.Path, problems: list[str]) -> bytes:
    """What a file holds, compressed or not; of one that was cut off what is left of it."""
    try:
        data = file.read_bytes()
        if file.suffix != ".gz":
            return data
        unpacking = zlib.decompressobj(wbits=31)  # gzip's format
        data = unpacking.decompress(data)
        if not unpacking.eof:
            problems.append(f"{file.name}: it was cut off")
        return data
    except (OSError, zlib.error) as error:
        problems.append(f"{file.name}: {error}")
        return b""


def _program(files: _Files, hints: Hints) -> Program:
    problems: list[str] = []
    module, assignment = _module(files, "after", problems)
    if module is None:
        reasons = "; ".join(problems) or (
            f"it has only {', '.join(sorted(files.by_kind))}"
            + (": the compiler did not finish it" if "before .txt" in files.by_kind else "")
        )
        raise ValueError(f"there is no optimized program: {reasons}")
    before, _ = _module(files, "before", problems)
    text = files.by_kind.get("after -buffer-assignment.txt")
    if assignment is None and text is not None:
        try:
            lines = _bytes(text, problems).decode(errors="replace").splitlines()
            assignment = _assignment.from_text(lines, text.name)
        except ValueError as error:
            problems.append(f"{text.name}: {error}")
    return analyze(
        module,
        hints,
        source=str(files.by_kind.get("after .txt") or files.by_kind["after .hlo.pb"]),
        signature=None if before is None else signature(before),
        assignment=assignment,
        memory_missing="the dump has no buffer assignment",
        problems=problems,
    )


def _module(
    files: _Files, when: str, problems: list[str]
) -> tuple[Module | None, BufferAssignment | None]:
    """The module before or after optimization, and the memory that its protocol buffer tells."""
    text, proto = files.by_kind.get(f"{when} .txt"), files.by_kind.get(f"{when} .hlo.pb")
    module = assignment = None
    if text is not None:
        module = read_module(_bytes(text, problems).decode(errors="replace"))
    if proto is not None:
        try:
            serialized, memory = _proto.parts_of_dump(_bytes(proto, problems))
            module = module or read_module(_proto.module_text(serialized))
            assignment = _proto.buffer_assignment(memory, serialized) if memory else None
        except ValueError as error:
            problems.append(f"{proto.name}: {error}")
    return module, assignment

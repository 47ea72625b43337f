"""Folders that XLA wrote with `--xla_dump_to`."""

import hashlib
import pathlib
import re

from ..core.errors import InspectError
from ..core.files import MOST_DUMP_BYTES, read_bytes, unpack
from ..jax import xla_protos as _assignment
from ..jax import xla_protos as _proto
from ..jax.xla_protos import BufferAssignment
from .analyze import UNREADABLE, Hints, analyze
from .arguments import signature
from .hlo_text import Module, read_module
from .inspection import Inspection
from .program import Program

_FILE = re.compile(
    r"(?P<stem>module_\d+\..+?)\.(?:[\w.]*_)?(?P<when>before|after)_optimizations(?P<tail>[.-].*)$"
)
_Files = dict[str, pathlib.Path]  # by content: `after .txt`, `before .hlo.pb`, ...
_HLO = (".txt", ".hlo", ".pb", ".txt.gz", ".hlo.gz", ".pb.gz")


def read_dump(path: pathlib.Path, hints: Hints) -> Inspection:
    """Inspect a dump folder, those of several processes within it, or one file.

    Raises:
        InspectError: If there is no such file or folder, or no program in it can be read.
    """
    try:
        if not path.exists():
            raise InspectError(f"no file or folder {path}")
        if not path.is_file() and not path.is_dir():
            raise InspectError(f"{path} is no regular file and no folder")
    except OSError as error:  # a name too long
        raise InspectError(f"{str(path)[:80]} cannot be looked up: {error.strerror}") from None
    problems: list[str] = []
    modules = _modules(path)
    programs: list[Program] = []
    seen: set[tuple[str, bytes]] = set()
    for stem, files in modules.items():
        optimized = files.get("after .txt") or files.get("after .hlo.pb")
        content = bytes(stem) if optimized is None else _packed(optimized, [])
        digest = stem.name, hashlib.sha256(content).digest()
        if digest in seen:  # another process compiled the very same program
            continue
        seen.add(digest)
        try:
            programs.append(_program(files, hints))
        except (*UNREADABLE, InspectError) as error:
            problems.append(f"{stem}: {error}")
    if not modules:
        raise InspectError(
            f"{path} holds no HLO: no file like module_0000.NAME.after_optimizations.txt; make a "
            "dump with hxla run --dump DIR, or XLA_FLAGS=--xla_dump_to=DIR"
        )
    if not programs:
        raise InspectError(f"{path} holds no program that can be read: {'; '.join(problems)}")
    ranked = sorted(programs, key=lambda p: -(p.memory.total_bytes if p.memory else 0))
    return Inspection(programs=tuple(ranked), problems=tuple(problems))


def _modules(path: pathlib.Path) -> dict[pathlib.Path, _Files]:
    """Files of each module, by the common stem of their paths."""
    wanted = _FILE.match(path.name) if path.is_file() else None
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = sorted(path.parent.iterdir()) if wanted else [path]
    modules: dict[pathlib.Path, _Files] = {}
    for file in files:
        match = _FILE.match(file.name)
        if match is None:
            if file == path or (file.name.endswith(_HLO) and _is_hlo(file)):
                modules[file] = {"after .hlo.pb" if ".pb" in file.suffixes else "after .txt": file}
        elif wanted is None or match["stem"] == wanted["stem"]:
            kind = f"{match['when']} {match['tail'].removesuffix('.gz')}"
            modules.setdefault(file.parent / match["stem"], {})[kind] = file
    return modules


def _is_hlo(file: pathlib.Path) -> bool:
    if ".pb" in file.suffixes:
        return ".hlo" in file.suffixes
    return _bytes(file, []).startswith(b"HloModule")


def _bytes(file: pathlib.Path, problems: list[str]) -> bytes:
    """The unpacked content of a file; of a truncated one the part that can be unpacked."""
    data = _packed(file, problems)
    if file.suffix != ".gz":
        return data
    try:
        data, wrong = unpack(data)
    except ValueError as error:
        data, wrong = b"", str(error)
    problems += [f"{file.name}: {wrong}"] if wrong else []
    return data


def _packed(file: pathlib.Path, problems: list[str]) -> bytes:
    """The content of a file as stored; empty, with a problem noted, if it cannot be read."""
    try:
        return read_bytes(
            file, MOST_DUMP_BYTES, lambda words: InspectError(f"{file.name}: it {words}")
        )
    except InspectError as error:
        problems.append(str(error))
        return b""


def _program(files: _Files, hints: Hints) -> Program:
    problems: list[str] = []
    module, assignment = _module(files, "after", problems)
    if module is None:
        reasons = "; ".join(problems) or (
            f"it has only {', '.join(sorted(files))}"
            + (": the compiler did not finish it" if "before .txt" in files else "")
        )
        raise ValueError(f"there is no optimized program: {reasons}")
    if not any(each.instructions for each in module.computations.values()):
        raise ValueError("; ".join(problems or module.problems))
    before, _ = _module(files, "before", problems)
    text = files.get("after -buffer-assignment.txt")
    if assignment is None and text is not None:
        try:
            lines = _bytes(text, problems).decode(errors="replace").splitlines()
            assignment = _assignment.from_text(lines, text.name)
        except ValueError as error:
            problems.append(f"{text.name}: {error}")
    return analyze(
        module,
        hints,
        source=str(files.get("after .txt") or files["after .hlo.pb"]),
        signature=None if before is None else signature(before),
        assignment=assignment,
        memory_missing="the dump has no buffer assignment",
        problems=problems,
    )


def _module(
    files: _Files, when: str, problems: list[str]
) -> tuple[Module | None, BufferAssignment | None]:
    """The module before or after optimization, and the buffers in its protocol buffer."""
    text, proto = files.get(f"{when} .txt"), files.get(f"{when} .hlo.pb")
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

"""`hxla.inspect`: what XLA really did, and its result: programs, their tables, pages and JSON.

It reads a compiled step in this process, or a folder that XLA wrote with `--xla_dump_to`.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import pydantic
from jax.sharding import NamedSharding

from ..cluster.cluster import Cluster
from ..cluster.mesh_file import load_cluster
from ..core.errors import InspectError
from ..core.files import MOST_DUMP_BYTES, read_bytes, unpack
from ..jax import xla_protos as _assignment
from ..jax import xla_protos as _proto
from ..jax.xla_protos import BufferAssignment, Piece
from ..plan.plan import Plan
from ..plan.rules import RuleSet, as_rules
from ..report.page import write
from .analyze import UNREADABLE, ArrayLayout, Hints, Signature, Spec, analyze, signature
from .collectives import Mesh
from .diff import diff
from .hlo_text import Module, read_module
from .inspection_page import diff_page, inspection_page
from .profiler_trace import lanes_of_file, last_step
from .program import Collective, Program
from .tables import terminal_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Compiled programs as values, and the files of a dump that could not be read.

    Attributes:
        programs: The programs, the one with most bytes of memory first.
        problems: The files that could not be read, and why.
    """

    programs: tuple[Program, ...]
    problems: tuple[str, ...] = ()

    def program(self, name: str) -> Program:
        """Find the program of a name or role.

        Args:
            name: The name of the HLO module, or the role that hxla gives it.

        Returns:
            The program.

        Raises:
            InspectError: If there is no such program; it names the others.
        """
        matches = [p for p in self.programs if name in (p.name, p.role)]
        if not matches:
            raise InspectError(f"no program {name!r}, only: {_names(self.programs)}")
        return matches[0]

    @property
    def main(self) -> Program:
        """The program that uses most memory.

        Raises:
            InspectError: If nothing could be read.
        """
        if not self.programs:
            reasons = "; ".join(self.problems) or "there was none"
            raise InspectError(f"no program could be read: {reasons}")
        return self.programs[0]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of all programs."""
        return tuple(c for p in self.programs for c in p.collectives)

    def to_json(self) -> str:
        """Write the inspection as JSON."""
        return _adapter().dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> "Inspection":
        """Read what `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The inspection.

        Raises:
            InspectError: If the text is no inspection.
        """
        try:
            return _adapter().validate_json(text)
        except pydantic.ValidationError as error:
            raise InspectError(f"this is no inspection: {error}") from error

    def text(
        self,
        *,
        limit: int = 20,
        plan: str | os.PathLike[str] | None = None,
        profile: str | os.PathLike[str] | None = None,
    ) -> str:
        """Draw tables for a terminal.

        Args:
            limit: The most rows of a table.
            plan: The file of the plan that ran: its uneven shards are shown.
            profile: The folder of `jax.profiler.trace`: waiting in its last step is shown.

        Returns:
            Some lines of text.

        Raises:
            InspectError: If there is no profile of these programs.
            PlanError: If the file is no plan.
        """
        split = Plan.read(plan) if plan is not None else None
        step = last_step(pathlib.Path(profile), self.programs) if profile is not None else None
        return terminal_tables(self.programs, self.problems, limit=limit, plan=split, step=step)

    def write_html(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "",
        profile: str | os.PathLike[str] | None = None,
        predicted: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the inspection as one self-contained HTML page.

        Args:
            path: The file; its folder is made if it is not there.
            title: The heading of the page.
            profile: The folder of `jax.profiler.trace`: its last step is drawn.
            predicted: A file of `hxla plan --write`, a plan or the trace of a replica: it is drawn
                beside the measured step.

        Raises:
            InspectError: If there is no profile of these programs, or the path cannot be written.
            PlanError: If `predicted` is neither a plan nor a trace of one.
        """
        step = last_step(pathlib.Path(profile), self.programs) if profile is not None else None
        lanes = lanes_of_file(pathlib.Path(predicted)) if predicted is not None else None
        page = inspection_page(
            self.programs,
            self.problems,
            title=title or "What XLA did",
            measured=step,
            predicted=lanes,
        )
        write(path, page, InspectError)

    def write_diff_html(
        self, other: "Inspection", path: str | os.PathLike[str], *, title: str = ""
    ) -> None:
        """Write what changed from this inspection to `other` as one HTML page.

        Args:
            other: The later inspection.
            path: The file; its folder is made if it is not there.
            title: The heading of the page.

        Raises:
            InspectError: If the path cannot be written.
        """
        page = diff_page(self.programs, other.programs, title=title or "What changed")
        write(path, page, InspectError)

    def diff(self, other: "Inspection") -> tuple[str, ...]:
        """Describe how another inspection's programs differ, one change per sentence.

        Args:
            other: The later inspection.

        Returns:
            Sentences; none if nothing changed.
        """
        return diff(self.programs, other.programs)


def _names(programs: Iterable[Program]) -> str:
    return ", ".join(sorted({p.title for p in programs})) or "none"


@functools.cache  # made on first use: it takes a tenth of a second
def _adapter() -> pydantic.TypeAdapter[Inspection]:
    return pydantic.TypeAdapter(Inspection)


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


def read_compiled(compiled: Any, hints: Hints) -> Program:
    """Inspect a `jax.stages.Compiled`."""
    module = read_module(compiled.as_text() or "")
    entry = module.computations.get(module.entry)
    num_parameters = len(entry.parameters) if entry else 0
    arguments = _kept(compiled)
    problems = []
    if len(arguments) != num_parameters:
        arguments = []
        problems.append(
            f"the program has {num_parameters} arguments of those it is called with: which ones, "
            "and so how they are sharded, is not known"
        )
    return analyze(
        module,
        hints,
        source="live",
        signature=_signature(arguments),
        assignment=_memory(compiled),
        memory_missing="the compiler gives no memory_analysis()",
        problems=problems,
    )


def _kept(compiled: Any) -> list[tuple[Any, Any]]:
    """Arguments that the program reads, and their shardings."""
    infos = jax.tree.leaves(compiled.args_info)
    structure: Any = jax.tree.structure(compiled.args_info)
    # An unread argument has the sharding None; but the arguments may contain None, too.
    shardings = structure.flatten_up_to(compiled.input_shardings)
    both = zip(infos, shardings, strict=True)
    return [(info, sharding) for info, sharding in both if sharding is not None]


def _signature(arguments: list[tuple[Any, Any]]) -> Signature:
    mesh: Mesh = ()
    layouts: dict[int, ArrayLayout] = {}
    for number, (info, sharding) in enumerate(arguments):
        spec: Spec | None = None
        if isinstance(sharding, NamedSharding):
            mesh = mesh or tuple(dict(sharding.mesh.shape).items())
            spec = _spec(sharding, len(info.shape))
        elif sharding.is_fully_replicated:
            spec = ((),) * len(info.shape)
        layouts[number] = tuple(info.shape), spec
    donated = frozenset(n for n, (info, _) in enumerate(arguments) if info.donated)
    return Signature(mesh=mesh, layouts=layouts, donated=donated)


def _spec(sharding: NamedSharding, rank: int) -> Spec:
    dims: list[tuple[str, ...]] = []
    for entry in (*sharding.spec, *[None] * rank)[:rank]:
        dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


def _memory(compiled: Any) -> BufferAssignment | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    source = "memory_analysis()"
    temporaries: tuple[Piece, ...] = ()
    if data := getattr(stats, "serialized_buffer_assignment_proto", b""):
        with contextlib.suppress(ValueError, AttributeError):
            # The protocol buffer numbers its values; their names are in the module.
            (module,) = compiled.runtime_executable().hlo_modules()
            names = module.as_serialized_hlo_module_proto()
            temporaries = _proto.buffer_assignment(data, names).temporaries
            source = "the compiler's buffer assignment"
    return BufferAssignment(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        source=source,
        temporaries=temporaries,
    )


def inspect(
    step: Any,
    *args: Any,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    cluster: Cluster | str | None = None,
    rules: RuleSet | str | None = None,
    owners: Mapping[str, str] | None = None,
) -> Inspection:
    """Describe what a compiled program does: its collectives, memory, work and warnings.

    Args:
        step: A compiled step (`jax.stages.Compiled`), a lowered one, a jitted function with the
            arguments it is called with, the text of an optimized HLO module, or the path of a dump:
            a folder that XLA or `hxla run --dump` wrote, or one file of it.
        args: The arguments of a jitted function: arrays or `jax.ShapeDtypeStruct`s.
        mesh: The axis names and sizes in order, where the program does not name them.
        cluster: The described devices in the order of the mesh, or a mesh file's name: collectives
            then have predicted times.
        rules: A rule set or its name: there is a warning for each parameter that breaks it.
        owners: The owner of an argument's memory, by prefix of its path, where its name does not
            show it: `{"w": "parameter", "state.slow": "optimizer state"}`.

    Returns:
        The inspection; `print(hxla.inspect(step).text())` shows it.

    Raises:
        InspectError: If `step` is none of these, or a path leads to no HLO.
        MeshError: If a mesh file cannot be read.
        AnnotationError: If rules do not fit the parameters.

    Example:
        >>> import hxla, jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 64), jnp.float32)
        >>> inspection = hxla.inspect(jax.jit(jnp.matmul), x, w)
        >>> inspection.main.total.flops == 2 * 8 * 128 * 64
        True
        >>> inspection.main.select("all-gather")
        ()
    """
    hints = Hints(
        mesh=_axes(mesh),
        cluster=load_cluster(cluster) if isinstance(cluster, str) else cluster,
        rules=as_rules(rules),
        owners=owners or {},
    )
    # The collector would walk millions of live small objects again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _inspect(step, args, hints)
    finally:
        if collecting:
            gc.enable()


def _inspect(step: Any, args: tuple[Any, ...], hints: Hints) -> Inspection:
    if isinstance(step, Inspection):
        return step
    if isinstance(step, str) and step.lstrip().startswith("HloModule"):
        missing = "HLO text alone does not tell"
        program = analyze(read_module(step), hints, source="text", memory_missing=missing)
        return Inspection(programs=(program,))
    if isinstance(step, str | os.PathLike):
        return read_dump(pathlib.Path(step), hints)
    if callable(step) and hasattr(step, "lower"):
        step = step.lower(*args)
    if isinstance(step, jax.stages.Lowered):
        step = step.compile()
    if isinstance(step, jax.stages.Compiled):
        return Inspection(programs=(read_compiled(step, hints),))
    raise InspectError(
        f"{step!r} is nothing to inspect: give a compiled, lowered or jitted step, HLO text, or "
        "the path of a dump; jax.jit a plain function first"
    )


def _axes(mesh: jax.sharding.Mesh | Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    if mesh is None:
        return ()
    shape = mesh.shape if isinstance(mesh, jax.sharding.Mesh) else mesh
    return tuple((str(name), int(size)) for name, size in shape.items())

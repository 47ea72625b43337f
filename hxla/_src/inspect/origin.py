"""The TaskGraph, module and source line of an instruction."""

import functools
import re
import sysconfig
from collections.abc import Iterable

from ..model.annotations import Scope, scopes_of, written
from .hlo_text import Computation, Instruction, Module, split_outside
from .program import Origin

_NAME = re.compile(r'op_name="([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_TRANSFORM = re.compile(r"^(?:jvp|transpose|vmap|shmap|remat|checkpoint)\((.*)\)$")
# Scopes that jax and hxla write between the user's.
_MACHINERY = re.compile(
    r"|while|body|cond|scan|closed_call|core_call|eval_jaxpr|pjit|checkpoint|remat|remat2"
    r"|rematted_computation|shard_map|run_state|custom_jvp_call|custom_vjp_call"
    r"|custom_vjp_call_jaxpr|custom_partitioning|branch_\d+_fun"
    r"|(?:jit|pjit|xla_call|core_call|custom_jvp_call|custom_vjp_call)\(.*\)"
    r"|hxla\.(?:replicate|split)\[\w+\]\.\d+|hxla\.part\.\d+"
)
_INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
_LIBRARIES = (*_INSTALLED, "site-packages", "dist-packages", "/hxla/_")
_NAMELESS = Origin(missing="XLA kept no name, here or in what it reads")
_MAX_JOINED = 4  # names shown of one operation
_DEPTH = 4  # operands looked through for a name that XLA lost


def op_name(instruction: Instruction) -> str:
    """The name that jax gave an operation: scopes and transforms, then the primitive."""
    match = _NAME.search(instruction.rest)
    if match is None:
        return ""
    return re.sub(r"\\(.)", r"\1", match[1]) if "\\" in match[1] else match[1]


def joined(name: str) -> list[str]:
    """The names of the operations that XLA joined, `a/(b:c)` or `a;b`; mostly one."""
    name = name.split(";")[0]
    *scopes, last = split_outside(name, "/")
    if not (last.startswith("(") and last.endswith(")")):
        return [name]
    pieces = split_outside(last[1:-1], ":")
    return [each for piece in pieces for each in joined("/".join([*scopes, piece]))]


@functools.lru_cache(maxsize=65536)
def module_path(name: str) -> tuple[str, str]:
    """The user's scopes in a name, and the primitive at its end."""
    *scopes, primitive = split_outside(joined(name)[0], "/")
    user_scopes: list[str] = []
    for scope in scopes:
        while inner := _TRANSFORM.match(scope):
            scope = inner[1]
        parts = split_outside(scope, "/")
        user_scopes += [part for part in parts if not _MACHINERY.fullmatch(part)]
    return "/".join(user_scopes), primitive


class Origins:
    """The origins of one module's instructions; equal names are parsed once."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[str, Origin] = {}
        named = {
            op_name(instruction)
            for computation in module.computations.values()
            if "hxla." in computation
            for instruction in computation.instructions.values()
            if "hxla." in instruction.rest
        }
        entries = {tuple(scopes_of(piece)) for name in named for piece in joined(name)}
        # Entries are numbered throughout the process; from 0 they can be compared.
        ordered = sorted((e for e in entries if e), key=lambda key: key[-1].entry)
        self._numbers = {key: i for i, key in enumerate(ordered)}

    def of(self, instruction: Instruction, computation: Computation) -> Origin:
        """The origin of an instruction, by its name or that of its operands."""
        named = self._with_name(instruction, computation, _DEPTH)
        return _NAMELESS if named is None else self._origin(named)

    def _with_name(
        self, instruction: Instruction, computation: Computation, depth: int
    ) -> Instruction | None:
        if 'op_name="' in instruction.rest:
            return instruction
        if depth == 0:
            return None
        for name, _ in instruction.operands:
            operand = computation.instructions.get(name)
            if operand is not None and operand.opcode != "parameter":
                named = self._with_name(operand, computation, depth - 1)
                if named is not None:
                    return named
        return None

    def _origin(self, instruction: Instruction) -> Origin:
        rest = instruction.rest
        start = rest.find("metadata={")
        end = rest.find("}, ", start)
        key = rest[start:] if end < 0 else rest[start:end]
        if key not in self._known:
            frame, file = _FRAME.search(key), _FILE.search(key)
            self._known[key] = self._make(op_name(instruction), int(frame[1]) if frame else 0, file)
        return self._known[key]

    def _make(self, name: str, frame: int, file: re.Match[str] | None) -> Origin:
        pieces = joined(name)
        paths = [module_path(piece) for piece in pieces]
        path, primitive = _several(p for p, _ in paths), paths[0][1]
        labels = (self._label(tuple(scopes_of(piece))) for piece in pieces)
        task_graph = _several(labels)
        places = self._module.source(frame) if frame else []
        if file:
            places = [(file[1], int(file[2] or 0), "")]
        user_place = next((p for p in places if not any(lib in p[0] for lib in _LIBRARIES)), None)
        source = user_place or (places[0] if places else None)
        function = source[2] if source and not source[2].startswith("<") else ""
        missing = ""
        if not task_graph and not path and not function:
            missing = "no scope surrounds it and the text does not name its function"
        return Origin(
            task_graph=task_graph,
            module=path,
            function=function.replace(".<locals>", ""),
            phase=_phase(name),
            primitive=primitive,
            source=f"{source[0]}:{source[1]}" if source else "",
            missing=missing,
        )

    def _label(self, scopes: tuple[Scope, ...]) -> str:
        if not scopes:
            return ""
        kinds = " > ".join(written(s.kind, s.device_count) for s in scopes)
        return f"{kinds} #{self._numbers[scopes]}"


def _several(names: Iterable[str]) -> str:
    """The first few distinct names of joined operations."""
    distinct = [n for n in dict.fromkeys(names) if n]
    if len(distinct) <= _MAX_JOINED:
        return " + ".join(distinct)
    return f"{' + '.join(distinct[:_MAX_JOINED])} + {len(distinct) - _MAX_JOINED} others"


def _phase(name: str) -> str:
    if "rematted_computation" in name:
        return "recomputation"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else ""

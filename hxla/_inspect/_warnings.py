"""What costs time or memory and nobody asked for."""

import re
from collections.abc import Iterator, Sequence

from .._core._format import num_bytes as size
from .._plan._rules import RuleSet
from . import _shapes
from ._arguments import array_bytes
from ._call_graph import CallContext
from ._collectives import KINDS, OPCODES
from ._dataflow import Flow
from ._hlo_text import Computation, Instruction, Module
from ._origin import Origins
from ._program import Array, Collective, Warned
from ._replica_groups import Mesh

_LARGE_BYTES = 1 << 16
_LARGE_SHARE = 0.01  # of all arguments
_PADDING = 0.1
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def warnings(
    module: Module,
    contexts: dict[str, list[CallContext]],
    origins: Origins,
    flow: Flow,
    *,
    arrays: Sequence[Array],
    collectives: Sequence[Collective],
    mesh: Mesh,
    rules: RuleSet | None,
    lost: Sequence[int],
) -> tuple[Warned, ...]:
    """All of them, the largest stake first.

    Args:
        module: Optimized.
        contexts: Of its computations.
        origins: Of its instructions.
        flow: Of its values.
        arrays: Its arguments.
        collectives: Its collectives.
        mesh: Axes, or nothing.
        rules: That parameters should follow; None: they are compared with each other.
        lost: Numbers of arguments that were donated and that no result took over.
    """
    by_name = {c.name: c for c in collectives}
    found = [
        *_replicated(arrays, mesh, rules),
        *_hoistable(module, contexts, flow, by_name),
        *_resharded(module, flow, by_name),
        *_padding(module, contexts, origins, mesh),
        *_unused(arrays, collectives, mesh),
        *_donations(arrays, lost),
    ]
    return tuple(sorted(found, key=lambda w: -w.num_bytes))


def rule_path(path: str) -> str:
    """`Dense_0/kernel` of `params['Dense_0']['kernel']`, as rules name parameters."""
    keys = [next(filter(None, groups), "") for groups in _KEY.findall(path)]
    return "/".join(k for k in keys if k != "params") or path


def _replicated(arrays: Sequence[Array], mesh: Mesh, rules: RuleSet | None) -> Iterator[Warned]:
    state = [a for a in arrays if a.owner in ("parameter", "optimizer state") and a.spec]
    total = sum(array_bytes(a) for a in arrays)
    sizes = dict(mesh)
    cut = {axis for a in state for dim in a.spec or () for axis in dim if sizes.get(axis, 1) > 1}
    wanted: dict[str, dict[str, str]] = {}
    parameters = [a for a in state if a.owner == "parameter"]
    if rules is not None and parameters:
        names = [rule_path(a.path) for a in parameters]
        resolved = rules.resolve(names, [a.shape for a in parameters], sizes)
        for array, dims, rule in zip(parameters, resolved.dims, resolved.matched, strict=True):
            own = {axis: f"the rule {rule} cuts its dimension {dim}" for axis, dim in dims.items()}
            wanted[array.path] = own
    for array in state:
        num_bytes = array_bytes(array)
        if num_bytes < max(_LARGE_BYTES, _LARGE_SHARE * total):
            continue
        axes = {axis for dim in array.spec or () for axis in dim}
        if rules is None:
            reasons = {} if axes else {axis: "other parameters are cut over it" for axis in cut}
        else:
            reasons = wanted.get(array.path, {})
        for axis, reason in sorted(reasons.items()):
            if axis not in axes and sizes.get(axis, 1) > 1:
                yield Warned(
                    kind="replicated",
                    text=f"{array.path}, {size(num_bytes)}, is whole on every device of "
                    f"{axis}: {reason}; cut it, and a device holds "
                    f"{size(num_bytes / sizes[axis])}",
                    num_bytes=num_bytes - num_bytes // sizes[axis],
                )


def _hoistable(
    module: Module,
    contexts: dict[str, list[CallContext]],
    flow: Flow,
    by_name: dict[str, Collective],
) -> Iterator[Warned]:
    for name, ways in contexts.items():
        body = module.computations[name]
        if not body.opcodes & OPCODES.keys() or not flow.in_loop(name):
            continue
        if not any(c.loops for c in ways):
            continue
        for instruction in body.instructions.values():
            if instruction.opcode not in OPCODES:
                continue
            collective = by_name[instruction.name]
            if not collective.loops:
                continue
            trips = collective.loops[-1].trips
            if trips is not None and trips < 2:
                continue
            elements = [flow.carried(body, *operand) for operand in instruction.operands]
            if elements and all(e is not None and flow.is_invariant(body, e) for e in elements):
                how = "works on the same values in every iteration: do it before the loop"
            elif collective.kind == "all-reduce" and _is_only_added(
                module, body, instruction, flow
            ):
                how = "is only added up by the loop: add first and reduce once, after the loop"
            else:
                continue
            yield Warned(
                kind="hoistable",
                text=f"{_named(collective)} runs in each of {trips or '?'} iterations and {how}",
                num_bytes=int(collective.sent_bytes * ((trips or 2) - 1)),
            )


def _is_only_added(module: Module, body: Computation, instruction: Instruction, flow: Flow) -> bool:
    readers = list(flow.readers(body, instruction))
    return bool(readers) and all(_accumulates(module, body, r, flow) for r in readers)


def _accumulates(module: Module, body: Computation, reader: Instruction, flow: Flow) -> bool:
    """Whether it adds to an element of the carry that the body hands on."""
    add = reader
    if reader.opcode == "fusion":
        inner = module.computations.get((reader.called("calls") or [""])[0])
        if inner is None or inner.root is None:
            return False
        add = inner.root
    root = body.root
    if add.opcode != "add" or root is None or root.opcode != "tuple":
        return False
    carried = {e for o in reader.operands if (e := flow.carried(body, *o)) is not None}
    handed = {i for i, (name, _) in enumerate(root.operands) if name == reader.name}
    # Nothing else may read the sum so far: a residual stream is added to and used as well.
    return any(flow.only_reader(body, element) is reader for element in carried & handed)


def _resharded(module: Module, flow: Flow, by_name: dict[str, Collective]) -> Iterator[Warned]:
    for computation in module.computations.values():
        if not computation.opcodes & {"all-gather", "all-gather-start"}:
            continue
        for instruction in computation.instructions.values():
            if instruction.opcode not in ("all-gather", "all-gather-start"):
                continue
            readers = list(flow.readers(computation, instruction))
            if readers and all(_cuts_again(module, computation, r) for r in readers):
                collective = by_name[instruction.name]
                yield Warned(
                    kind="reshard",
                    text=f"{_named(collective)} makes the whole array only for each device to cut "
                    "its own part out again: the shardings before and after it do not fit, so "
                    "give the same one to both, or with_sharding_constraint between them",
                    num_bytes=int(collective.sent_bytes * (collective.runs or 1)),
                )


def _cuts_again(module: Module, computation: Computation, reader: Instruction) -> bool:
    is_slice = reader.opcode == "dynamic-slice"
    if reader.opcode == "fusion":
        inner = module.computations.get((reader.called("calls") or [""])[0])
        opcodes = {i.opcode for i in inner.instructions.values()} if inner else set()
        is_slice = "dynamic-slice" in opcodes
        if "partition-id" in opcodes:
            return is_slice
    return is_slice and _knows_its_place(computation, reader, 6)


def _knows_its_place(computation: Computation, instruction: Instruction, depth: int) -> bool:
    """Whether an instruction depends on which device it runs on."""
    if instruction.opcode == "partition-id":
        return True
    if depth == 0 or instruction.opcode.removesuffix("-start") in KINDS:
        return False
    operands = [computation.instructions.get(name) for name, _ in instruction.operands]
    return any(o is not None and _knows_its_place(computation, o, depth - 1) for o in operands)


def _padding(
    module: Module, contexts: dict[str, list[CallContext]], origins: Origins, mesh: Mesh
) -> Iterator[Warned]:
    parts = {n for _, n in mesh if n > 1} or {module.num_partitions}
    for name in contexts:
        computation = module.computations[name]
        if "pad" not in computation.opcodes:
            continue
        for pad in computation.instructions.values():
            source = (
                computation.instructions.get(pad.operands[0][0])
                if pad.opcode == "pad" and pad.operands
                else None
            )
            if source is None:
                continue
            old, new = _shapes.shape_text(source.shape), _shapes.shape_text(pad.shape)
            before, after = _shapes.shape_bytes(old), _shapes.shape_bytes(new)
            num = _rounded_up(source, pad, parts)
            if num is None or after < _LARGE_BYTES or after <= (1 + _PADDING) * before:
                continue
            origin = origins.of(pad, computation)
            at = f" at {origin.source}" if origin.source else ""
            yield Warned(
                kind="padding",
                text=f"{old} is padded to {new} ({after / before - 1:.0%} more) in "
                f"{origin.where}{at}: it is cut over {num} devices and does not divide by them",
                num_bytes=after - before,
            )


def _rounded_up(source: Instruction, pad: Instruction, parts: set[int]) -> int | None:
    """The number of parts to whose next multiple a dimension is padded, as partitioning does."""
    old, new = _shapes.arrays(source.shape)[0][1], _shapes.arrays(pad.shape)[0][1]
    grown = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    if len(grown) != 1:
        return None
    ((a, b),) = grown
    return next((n for n in sorted(parts) if a % n and b == -(-a // n) * n), None)


def _unused(
    arrays: Sequence[Array], collectives: Sequence[Collective], mesh: Mesh
) -> Iterator[Warned]:
    if any(a.spec is None for a in arrays) or any(c.axes is None for c in collectives):
        return
    used = {axis for a in arrays for dim in a.spec or () for axis in dim}
    used |= {axis for c in collectives for axis in c.axes or ()}
    for axis, num in mesh:
        if num > 1 and axis not in used:
            yield Warned(
                kind="unused axis",
                text=f"nothing is cut over {axis} and no collective runs over it: its {num} "
                "devices all do the same work",
                num_bytes=sum(array_bytes(a) for a in arrays),
            )


def _donations(arrays: Sequence[Array], lost: Sequence[int]) -> Iterator[Warned]:
    for number in lost:
        if number < len(arrays):
            array = arrays[number]
            yield Warned(
                kind="donation",
                text=f"{array.path}, {size(array_bytes(array))}, was donated and no result takes "
                "over its memory: none has its shape, dtype and sharding",
                num_bytes=array_bytes(array),
            )


def _named(collective: Collective) -> str:
    arrays = ", ".join(collective.arrays[:2]) + (", ..." if len(collective.arrays) > 2 else "")
    at = f" at {collective.origin.source}" if collective.origin.source else ""
    return (
        f"the {collective.kind} of {arrays} over {collective.over} in {collective.origin.where}{at}"
    )

"""Warnings of unasked costs in time or memory."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..core.format import num_bytes as size
from ..plan.rules import RuleSet
from .annotated_module import AnnotatedModule
from .collectives import KINDS, OPCODES, Mesh
from .hlo_text import Computation, Instruction, Module, first, shape_bytes, shape_text
from .program import Collective, Origin, ProgramArray, Warned


def stacked_dims(read: AnnotatedModule) -> Mapping[str, tuple[int, ...]]:
    """Dimensions of arguments, by path, of which a loop slices one entry in each iteration.

    An argument of nested scans, as over blocks of layers, has two.
    """
    dims_by_path: dict[str, set[int]] = {}
    for instruction, computation in read.module.find({"dynamic-slice"}):
        array = read.argument(computation, *instruction.operands[0])
        if array is None:
            continue
        dim = _layer(read, instruction, computation, array)
        if dim is not None:
            dims_by_path.setdefault(array.path, set()).add(dim)
    return {path: tuple(sorted(dims)) for path, dims in dims_by_path.items()}


def _layer(
    read: AnnotatedModule, instruction: Instruction, computation: Computation, array: ProgramArray
) -> int | None:
    _, whole = first(computation.shape_of(*instruction.operands[0]))
    _, part = first(instruction.shape)
    cut = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if m != n]
    if len(cut) != 1 or part[cut[0]] != 1 or len(whole) > len(array.local_shape):
        return None
    [dim] = cut
    # An outer scan has removed the leading dimensions.
    array_dim = dim + len(array.local_shape) - len(whole)
    trips = {c.loops[-1].trips for c in read.contexts.get(computation.name, []) if c.loops}
    is_layers = array.local_shape[array_dim] == whole[dim] and whole[dim] in trips
    return array_dim if is_layers else None


_Placed = tuple[Instruction, Computation, Collective]
_LARGE_BYTES = 1 << 16
_LARGE_SHARE = 0.01  # of all arguments
_PADDING = 0.1
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def warnings(
    read: AnnotatedModule,
    collectives: Sequence[Collective],
    *,
    mesh: Mesh,
    rules: RuleSet | None,
    lost: Iterable[int],
) -> tuple[Warned, ...]:
    """All warnings, the largest number of bytes at stake first.

    Args:
        collectives: In the order of the text.
        mesh: Axes; empty if not known.
        rules: For the parameters; None: parameters are compared with each other.
        lost: Numbers of donated arguments whose memory no result took over.
    """
    places = read.module.find(OPCODES.keys())
    placed = [(*place, c) for place, c in zip(places, collectives, strict=True)]
    all_warnings = [
        *_replicated(read, mesh, rules),
        *_hoistable(read, placed),
        *_resharded(read, placed),
        *_padding(read, mesh),
        *_unused(read.arrays, collectives, mesh),
        *_donations(read.arrays, lost),
    ]
    return tuple(sorted(all_warnings, key=lambda w: -w.num_bytes))


def rule_path(path: str) -> str:
    """`Dense_0/kernel` of `params['Dense_0']['kernel']`, as rules name parameters."""
    keys = [next(filter(None, groups), "") for groups in _KEY.findall(path)]
    return "/".join(k for k in keys if k != "params") or path


def _replicated(read: AnnotatedModule, mesh: Mesh, rules: RuleSet | None) -> Iterator[Warned]:
    arrays = read.arrays
    state = [a for a in arrays if a.owner in ("parameter", "optimizer state") and a.spec]
    total = sum(a.num_bytes for a in arrays)
    sizes = dict(mesh)
    cut = {axis for a in state for dim in a.spec or () for axis in dim if sizes.get(axis, 1) > 1}
    wanted: dict[str, dict[str, str]] = {}
    parameters = [a for a in state if a.owner == "parameter"]
    if rules is not None and parameters:
        names = [rule_path(a.path) for a in parameters]
        layers = stacked_dims(read)
        stacked = [layers.get(a.path, ()) for a in parameters]
        resolved = rules.resolve(names, [a.shape for a in parameters], sizes, stacked=stacked)
        for array, dims, rule in zip(parameters, resolved.dims, resolved.matched, strict=True):
            wanted[array.path] = {
                axis: f"the rule {rule} cuts its dimension {dim}" for axis, dim in dims.items()
            }
    for array in state:
        num_bytes = array.num_bytes
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


def _hoistable(read: AnnotatedModule, placed: Sequence[_Placed]) -> Iterator[Warned]:
    for instruction, body, collective in placed:
        if not collective.loops or not read.flow.in_loop(body):
            continue
        trips = collective.loops[-1].trips
        if trips is not None and trips < 2:
            continue
        elements = [read.flow.carried(body, *operand) for operand in instruction.operands]
        if elements and all(read.flow.is_invariant(body, element) for element in elements):
            how = "works on the same values in every iteration: do it before the loop"
        elif collective.kind == "all-reduce" and _is_only_added(read, body, instruction):
            how = "is only added up by the loop: add first and reduce once, after the loop"
        else:
            continue
        yield Warned(
            kind="hoistable",
            text=f"{_named(collective)} runs in each of {trips or '?'} iterations and {how}",
            num_bytes=int(collective.sent_bytes * ((trips or 2) - 1)),
        )


def _is_only_added(read: AnnotatedModule, body: Computation, instruction: Instruction) -> bool:
    readers = list(read.flow.readers(body, instruction))
    return bool(readers) and all(_accumulates(read, body, reader) for reader in readers)


def _accumulates(read: AnnotatedModule, body: Computation, reader: Instruction) -> bool:
    """Whether a reader adds to an element of the carry that the body passes on."""
    add, _ = read.module.root_of(reader, body)
    root = body.root
    if add.opcode != "add" or root is None or root.opcode != "tuple":
        return False
    carried = {read.flow.carried(body, *operand) for operand in reader.operands}
    handed = {i for i, (name, _) in enumerate(root.operands) if name == reader.name}
    # Nothing else may read the partial sum: a residual stream is added to and read as well.
    return any(read.flow.only_reader(body, element) is reader for element in carried & handed)


def _resharded(read: AnnotatedModule, placed: Sequence[_Placed]) -> Iterator[Warned]:
    for instruction, computation, collective in placed:
        if collective.kind != "all-gather":
            continue
        readers = list(read.flow.readers(computation, instruction))
        if readers and all(_cuts_again(read.module, computation, r) for r in readers):
            yield Warned(
                kind="reshard",
                text=f"{_named(collective)} makes the whole array only for each device to cut "
                "its shard out again: the shardings before and after it do not fit, so "
                "give the same one to both, or with_sharding_constraint between them",
                num_bytes=int(collective.sent_bytes * (collective.runs or 1)),
            )


def _cuts_again(module: Module, computation: Computation, reader: Instruction) -> bool:
    inner = module.called(reader) if reader.opcode == "fusion" else None
    opcodes = {reader.opcode} if inner is None else inner.opcodes
    if "dynamic-slice" not in opcodes:
        return False
    return "partition-id" in opcodes or _depends_on_device(computation, reader, 6)


def _depends_on_device(computation: Computation, instruction: Instruction, depth: int) -> bool:
    """Whether an instruction depends on which device it runs on."""
    if instruction.opcode == "partition-id":
        return True
    if depth == 0 or instruction.opcode.removesuffix("-start") in KINDS:
        return False
    operands = [computation.instructions.get(name) for name, _ in instruction.operands]
    return any(o is not None and _depends_on_device(computation, o, depth - 1) for o in operands)


def _padding(read: AnnotatedModule, mesh: Mesh) -> Iterator[Warned]:
    parts = {n for _, n in mesh if n > 1} or {read.module.num_partitions}
    for pad, computation in read.module.find({"pad"}):
        if not pad.operands or computation.name not in read.contexts:
            continue
        source = computation.shape_of(*pad.operands[0])
        num = _rounded_up(source, pad.shape, parts)
        before, after = shape_bytes(source), shape_bytes(pad.shape)
        if num is None or after < _LARGE_BYTES or after <= (1 + _PADDING) * before:
            continue
        origin = read.origins.of(pad, computation)
        yield Warned(
            kind="padding",
            text=f"{shape_text(source)} is padded to {shape_text(pad.shape)} "
            f"({after / before - 1:.0%} more) in {_place(origin)}: it is cut over {num} devices "
            "and does not divide by them",
            num_bytes=after - before,
        )


def _rounded_up(source: str, padded: str, parts: set[int]) -> int | None:
    """The number of shards to whose next multiple a dimension is padded; None if to none."""
    old, new = first(source)[1], first(padded)[1]
    grown = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    if len(old) != len(new) or len(grown) != 1:
        return None
    ((a, b),) = grown
    return next((n for n in sorted(parts) if a % n and b == -(-a // n) * n), None)


def _unused(
    arrays: Sequence[ProgramArray], collectives: Sequence[Collective], mesh: Mesh
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
                num_bytes=sum(a.num_bytes for a in arrays),
            )


def _donations(arrays: Sequence[ProgramArray], lost: Iterable[int]) -> Iterator[Warned]:
    for number in sorted(lost):
        if number < len(arrays):
            array = arrays[number]
            yield Warned(
                kind="donation",
                text=f"{array.path}, {size(array.num_bytes)}, was donated and no result takes "
                "over its memory: none has its shape, dtype and sharding",
                num_bytes=array.num_bytes,
            )


def _named(collective: Collective) -> str:
    arrays = ", ".join(collective.arrays[:2]) + (", ..." if len(collective.arrays) > 2 else "")
    return (
        f"the {collective.kind} of {arrays} over {collective.over} in {_place(collective.origin)}"
    )


def _place(origin: Origin) -> str:
    return f"{origin.where} at {origin.source}" if origin.source else origin.where

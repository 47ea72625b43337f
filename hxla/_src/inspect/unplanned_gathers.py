"""Sharded parameters that a compiled program gathers although its plan does not.

A plan foresees how operations read a parameter itself. Values derived from a parameter, such as a
normalized kernel, may be gathered by XLA's partitioner.
"""

import re
from collections.abc import Iterable, Iterator, Set

from ..lower.chain_runner import ChainRunner
from ..lower.lower import Programs
from ..plan.sharding import Sharded
from .analyze import UNREADABLE
from .annotated_module import annotate
from .arguments import arguments, path_of
from .collectives import collectives
from .hlo_text import Computation, Module, arrays, read_module
from .program import Collective

_PARAM = re.compile(r"params\[(\d+)\]")
_BATCH = re.compile(r"batch\b")


def unplanned_gathers(programs: Programs) -> tuple[str, ...]:
    """Unplanned all-gathers of a sharded parameter, or of a value derived from it.

    All-gathers over `fsdp` are planned. Only programs that run a microbatch in one call are
    searched, not those of stages and segments.

    Returns:
        A line for each, with the bytes that a device receives.
    """
    sharded, runner = programs.sharded, programs.runners[0]
    if sharded is None or not isinstance(runner, ChainRunner):
        return ()
    text = runner.whole_text
    if "all-gather" not in text:
        return ()
    try:
        return tuple(_lines(programs, sharded, read_module(text)))
    except UNREADABLE:  # text of another XLA: a mere warning may not keep a session from training
        return ()


def _lines(programs: Programs, sharded: Sharded, module: Module) -> Iterable[str]:
    read = annotate(module, arguments(module, {}, {}))
    planned, lines = sharded.gathered_params(), dict[tuple[str, int], str]()
    for gather in collectives(read, tuple(programs.plan.axis_sizes.items()), None):
        for param in _gathered_params(programs, module, gather):
            layout = programs.plan.parameters[param]
            for axis in gather.axes or ():
                is_cut = any(axis in names for names in layout.spec)
                if not is_cut or axis == "fsdp" or (axis, param) in planned:
                    continue
                size = programs.plan.axis_sizes[axis]
                received = gather.num_bytes * (size - 1) // size
                where = f"{gather.origin.primitive} at {gather.origin.source}".removesuffix(" at ")
                lines.setdefault(
                    (axis, param),
                    f"parameter {layout.name} is cut over {axis}, and the compiled program "
                    f"gathers a value derived from it whole in each microbatch, {received:,} "
                    f"bytes to a device: {where}",
                )
    return lines.values()


def _gathered_params(programs: Programs, module: Module, gather: Collective) -> Iterator[int]:
    """The parameters that an all-gather makes whole, also those of which it gathers a function."""
    entry = module.computations[module.entry]
    if gather.kind != "all-gather" or gather.name not in entry.instructions:
        return
    needed = _needed(entry, gather.name)
    if any(map(_BATCH.match, needed)):
        return  # activations, or gradients
    results = [sorted(dims) for _, dims in arrays(entry.instructions[gather.name].shape)]
    for path in sorted(needed):
        if (match := _PARAM.fullmatch(path)) and any(
            sorted(programs.plan.parameters[int(match[1])].shape) == dims for dims in results
        ):
            yield int(match[1])


def _needed(entry: Computation, name: str) -> Set[str]:
    """The paths of the arguments on which an instruction depends."""
    seen, waiting, paths = set[str](), [name], set[str]()
    while waiting:
        here = waiting.pop()
        if here in seen or here not in entry.instructions:
            continue
        seen.add(here)
        instruction = entry.instructions[here]
        if instruction.opcode == "parameter":
            paths.add(path_of(instruction))
        waiting += [operand for operand, _ in instruction.operands]
    return paths

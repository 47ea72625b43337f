"""Parameters that a plan cuts and a compiled program makes whole without the plan's knowing.

A plan foresees what operations read of a parameter itself. What is made of it first, as a
normalized kernel, XLA's partitioner may gather as it likes.
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
    """All-gathers of a microbatch that make a cut parameter, or what is made of it, whole.

    Over an axis `fsdp` that is meant. Programs of one call for a microbatch are looked at, not
    those of stages and segments.

    Returns:
        A line for each that the plan does not tell of, with the bytes that come to a device.
    """
    sharded, runner = programs.sharded, programs.runners[0]
    if sharded is None or not isinstance(runner, ChainRunner):
        return ()
    text = runner.whole_text
    if "all-gather" not in text:
        return ()
    try:
        return tuple(_lines(programs, sharded, read_module(text)))
    except UNREADABLE:  # of another XLA: what is only told may not keep a session from training
        return ()


def _lines(programs: Programs, sharded: Sharded, module: Module) -> Iterable[str]:
    read = annotate(module, arguments(module, {}, {}))
    planned, lines = sharded.gathered_params(), dict[tuple[str, int], str]()
    for own in collectives(read, tuple(programs.plan.axis_sizes.items()), None):
        for param in _made_whole(programs, module, own):
            layout = programs.plan.parameters[param]
            for axis in own.axes or ():
                is_cut = any(axis in names for names in layout.spec)
                if not is_cut or axis == "fsdp" or (axis, param) in planned:
                    continue
                size = programs.plan.axis_sizes[axis]
                brought = own.num_bytes * (size - 1) // size
                where = f"{own.origin.primitive} at {own.origin.source}".removesuffix(" at ")
                lines.setdefault(
                    (axis, param),
                    f"parameter {layout.name} is cut over {axis}, and the compiled program "
                    f"gathers what is made of it whole in each microbatch, {brought:,} bytes "
                    f"to a device: {where}",
                )
    return lines.values()


def _made_whole(programs: Programs, module: Module, own: Collective) -> Iterator[int]:
    """The parameters that an all-gather makes whole, or what follows from them alone."""
    entry = module.computations[module.entry]
    if own.kind != "all-gather" or own.name not in entry.instructions:
        return
    needed = _needed(entry, own.name)
    if any(map(_BATCH.match, needed)):
        return  # activations, or gradients
    results = [sorted(dims) for _, dims in arrays(entry.instructions[own.name].shape)]
    for path in sorted(needed):
        if (match := _PARAM.fullmatch(path)) and any(
            sorted(programs.plan.parameters[int(match[1])].shape) == dims for dims in results
        ):
            yield int(match[1])


def _needed(entry: Computation, name: str) -> Set[str]:
    """The arguments of a program that one of its instructions needs, by their paths."""
    seen, waiting, found = set[str](), [name], set[str]()
    while waiting:
        here = waiting.pop()
        if here in seen or here not in entry.instructions:
            continue
        seen.add(here)
        instruction = entry.instructions[here]
        if instruction.opcode == "parameter":
            found.add(path_of(instruction))
        waiting += [operand for operand, _ in instruction.operands]
    return found

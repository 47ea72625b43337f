"""Assertions on compiled steps, for users' own tests.

Each takes the arguments of `hxla.inspect`, or an inspection, and raises `AssertionError` with the
collectives or buffers in question.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from hxla import testing
    >>> def train_step(params, batch):
    ...     loss = lambda params: (batch @ params["w"]).mean()
    ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    >>> params = {"w": jax.ShapeDtypeStruct((128, 64), jnp.float32)}
    >>> batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    >>> step = jax.jit(train_step, donate_argnums=0).lower(params, batch).compile()
    >>> testing.assert_collectives(step, all_gather=0, all_reduce=0)
    >>> testing.assert_no_all_gather_of_parameters(step)
    >>> testing.assert_peak_memory_below(step, "1MiB")
    >>> testing.assert_no_warnings(step)
"""

import re
from typing import Any

from ._src.core.errors import InspectError
from ._src.core.format import num_bytes as size
from ._src.inspect.inspect import Inspection, inspect
from ._src.inspect.program import Buffer, Collective, Fusion

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def assert_collectives(
    step: Any,
    *args: Any,
    all_reduce: int | None = None,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    all_to_all: int | None = None,
    collective_permute: int | None = None,
    axis: str | None = None,
    task_graph: str | None = None,
    module: str | None = None,
) -> None:
    """Assert how many collectives of each kind a program's text has.

    A collective in a loop counts once; an asynchronous pair counts once.

    Args:
        step: The step, as `hxla.inspect` takes it.
        args: The arguments of a jitted function, as `hxla.inspect` takes them.
        all_reduce: The number of all-reduces; None: any number.
        all_gather: The number of all-gathers; None: any number.
        reduce_scatter: The number of reduce-scatters; None: any number.
        all_to_all: The number of all-to-alls; None: any number.
        collective_permute: The number of collective-permutes; None: any number.
        axis: Only those over this mesh axis.
        task_graph: Only those of TaskGraphs whose name starts so: `split(4)`.
        module: Only those whose module path contains this.

    Raises:
        AssertionError: If there are more or fewer, listing them.
        InspectError: If `axis` is given and the axes are not known.
    """
    wanted = {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "collective-permute": collective_permute,
    }
    inspection = _complete_inspection(step, *args)
    wrong = []
    for kind, number in wanted.items():
        matches = _select(inspection, kind, axis=axis, task_graph=task_graph, module=module)
        if number is not None and len(matches) != number:
            wrong.append(f"{len(matches)} {kind}s where {number} should be:{_listed(matches)}")
    if wrong:
        raise AssertionError("\n".join(wrong))


def assert_at_most(
    step: Any, *args: Any, kind: str, number: int, each: str = "", axis: str | None = None
) -> None:
    """Assert a limit on the collectives of one kind in each block of a model.

    Args:
        step: The step, as `hxla.inspect` takes it.
        args: The arguments of a jitted function, as `hxla.inspect` takes them.
        kind: The kind: `all-reduce`, `all-gather`, ...
        number: The most collectives of this kind in a block.
        each: The regular expression that finds a block in a module path, `Block_[0-9]+`; empty: the
            whole program is one block.
        axis: Only those over this mesh axis.

    Raises:
        AssertionError: If a block has more, listing them.
        InspectError: If `axis` is given and the axes are not known, or `each` finds no block.
    """
    inspection = _complete_inspection(step, *args)
    modules = _modules(inspection)
    if not any(re.search(each, module) for module in modules):
        raise InspectError(
            f"each={each!r} finds no block, so nothing would be limited; the programs' modules: "
            + ", ".join(sorted(modules - {""})[:20])
        )
    blocks: dict[str, list[Collective]] = {}
    for collective in _select(inspection, kind, axis=axis):
        block = re.search(each, collective.origin.module)
        if block is not None:
            blocks.setdefault(block[0], []).append(collective)
    wrong = [
        f"{len(matches)} {kind}s in {block or 'the program'} where at most {number} should be:"
        f"{_listed(matches)}"
        for block, matches in blocks.items()
        if len(matches) > number
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def assert_no_all_gather_of_parameters(step: Any, *args: Any) -> None:
    """Assert that no parameter is all-gathered, not even after a cast or a slice.

    Args:
        step: The step, as `hxla.inspect` takes it.
        args: The arguments of a jitted function, as `hxla.inspect` takes them.

    Raises:
        AssertionError: If parameters are gathered; it names them.
        InspectError: If the program has no argument that is a parameter: give `owners` to
            `hxla.inspect` and pass its result.
    """
    inspection = _complete_inspection(step, *args)
    parameters = {a.path for p in inspection.programs for a in p.arrays if a.owner == "parameter"}
    if not parameters:
        raise InspectError(
            "no argument of the program is known to be a parameter: pass "
            "hxla.inspect(step, owners={'name of the argument': 'parameter'})"
        )
    wrong = [
        c for c in inspection.collectives if c.kind == "all-gather" and {*c.operands} & parameters
    ]
    if wrong:
        rows = [f"\n  {', '.join(c.operands)}:{_listed([c])}" for c in wrong]
        raise AssertionError(f"parameters are gathered:{''.join(rows)}")


def assert_peak_memory_below(step: Any, limit: str | int, *args: Any) -> None:
    """Assert a limit on the memory of one device.

    Args:
        step: The step, as `hxla.inspect` takes it.
        limit: The limit in bytes, or a text with a unit: `"2GiB"`, `"500 MB"`.
        args: The arguments of a jitted function, as `hxla.inspect` takes them.

    Raises:
        AssertionError: If a program needs the limit or more; it lists the largest buffers.
        InspectError: If a program's memory is not known, or the limit is no size.
    """
    most = num_bytes(limit)
    for program in _complete_inspection(step, *args).programs:
        memory = program.memory
        if memory is None:
            raise InspectError(
                f"the memory of {program.name} is not known: {program.memory_missing}"
            )
        if memory.total_bytes >= most:
            owners = ", ".join(f"{owner} {size(n)}" for owner, n in memory.by_owner.items())
            rows = [f"\n  {size(b.num_bytes)} {b.owner} {b.name}" for b in memory.buffers[:5]]
            raise AssertionError(
                f"{program.title} needs {size(memory.total_bytes)} at its peak where less than "
                f"{limit} should do: {owners}; the largest:{''.join(rows)}"
            )


def assert_no_warnings(step: Any, *args: Any, kinds: tuple[str, ...] = ()) -> None:
    """Assert that there are no warnings.

    Args:
        step: The step, as `hxla.inspect` takes it.
        args: The arguments of a jitted function, as `hxla.inspect` takes them.
        kinds: The kinds of warnings, `replicated`, `hoistable`, `reshard`, `padding`, `unused axis`
            or `donation`; none: all.

    Raises:
        AssertionError: With the warnings.
    """
    warnings = [w for p in _complete_inspection(step, *args).programs for w in p.warnings]
    wrong = [w.text for w in warnings if not kinds or w.kind in kinds]
    if wrong:
        raise AssertionError("\n".join(wrong))


def num_bytes(limit: str | int) -> int:
    """Read a size in bytes: 2147483648 of `"2GiB"`.

    Args:
        limit: The bytes, or a text with a unit.

    Returns:
        The bytes.

    Raises:
        InspectError: If the text is no size.
    """
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", limit)
    if match is None or match[2] not in _UNITS:
        raise InspectError(f"{limit!r} is no size: write 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _complete_inspection(step: Any, *args: Any) -> Inspection:
    """An inspection without problems: assertions on an incomplete one would prove nothing."""
    inspection = inspect(step, *args)
    problems = [*inspection.problems, *(p for each in inspection.programs for p in each.problems)]
    if problems:
        raise InspectError(
            f"the step was not read completely, so nothing is asserted: {'; '.join(problems)}"
        )
    return inspection


def _select(inspection: Inspection, kind: str, **where: str | None) -> list[Collective]:
    missing = {c.axes_missing for c in inspection.collectives if c.axes is None}
    if where["axis"] is not None and missing:
        raise InspectError(f"the axes of collectives are not known: {'; '.join(sorted(missing))}")
    return [c for program in inspection.programs for c in program.select(kind, **where)]


def _modules(inspection: Inspection) -> set[str]:
    """Module paths of all operations and buffers; the empty path stands for no module."""
    modules = {""}
    for program in inspection.programs:
        buffers = program.memory.buffers if program.memory is not None else ()
        parts: list[Collective | Fusion | Buffer] = [
            *program.collectives,
            *program.fusions,
            *buffers,
        ]
        modules |= {part.origin.module for part in parts}
    return modules


def _listed(collectives: list[Collective]) -> str:
    rows = [
        f"\n  {c.kind} of {', '.join(c.arrays)} over {c.over} in {c.origin.where} "
        f"{c.origin.source}".rstrip()
        for c in collectives
    ]
    return "".join(rows) or " none"

"""The sharding inside a replica: dimensions, sizes of shards, and a check that it can run.

Shards are even by default: then XLA partitions the program. They are uneven if a ratio is stated,
if sizes do not divide over the devices, or if the devices of a replica are known to differ in
speed.

The measured seconds of its devices give better sizes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from ..cluster.cluster import Cluster
from ..core.errors import AnnotationError, PlanError
from ..core.types import TOKEN_AXIS
from ..graph.factors import fits
from ..graph.graph import Graph, leaves
from ..plan.axis_assignment import shard_graph
from ..plan.layout import Layout, dtype_name, from_spec
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..profile.profile import Profile
from .apportionment import SplitDevice, best_sizes
from .device_times import NUM_GRANULES, Place, are_alike, granules_of, places_of, split_devices
from .mesh_axes import resolve_rules
from .structures import ReplicaGroups
from .uneven_sizes import Sizes, sizes_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerSplit:
    """The sharding inside a replica.

    Attributes:
        sharded: The graph with the assignment of each axis.
        shares: The ratio of the one axis that may be uneven; empty if shards are even.
        sizes: For each parameter its shards; empty if even.
    """

    sharded: Sharded
    shares: tuple[int, ...] = ()
    sizes: tuple[Sizes, ...]
    reasons: tuple[str, ...] = ()


def inner_split(
    graph: Graph,
    structure: ReplicaGroups,
    cluster: Cluster,
    state_factor: float = 1.0,
    profile: Profile | None = None,
) -> InnerSplit:
    """Choose what is sharded, and the sizes of shards.

    Args:
        state_factor: The bytes of a device per byte of its parameters.
        profile: Times of the model on each kind of device alone; None: times by device figures.

    Raises:
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.
        PlanError: If a stated ratio cannot be met.
    """
    num_params = len(graph.param_names)
    why_not = _why_even(structure)
    if len(set(structure.shares)) > 1 or (len(structure.shares) > 1 and why_not):
        if why_not:
            raise PlanError(
                f"shares {_ratio(structure.shares)}: {why_not}. Leave the shares out, or the rest"
            )
        return _uneven_split(
            graph, structure, structure.shares, f"as {structure.shares_are}", stated=True
        )
    is_free = not why_not and not structure.shares
    places = places_of(graph, structure.replicas, cluster, profile) if is_free else ()
    notes: tuple[str, ...] = ()
    if places:
        try:
            uneven = _split_by_speed(graph, structure, places, state_factor)
            if uneven is not None:
                return uneven
        except (AnnotationError, PlanError) as error:
            notes = (f"parts are alike on devices of unlike speed: {_first_line(error)}",)
    num = structure.inner[0][1]
    try:
        sharded, reasons = _sharded(graph, structure, unlike=False)
    except AnnotationError as error:
        if structure.granules is not None:
            raise PlanError(
                f"numerics.cut of 'any' cuts dimensions into {structure.granules} granules, set "
                f"numerics.granules to another number, or:\n{error}"
            ) from None
        if why_not:
            raise
        try:
            return _uneven_split(
                graph, structure, (1,) * num, "for sizes do not divide", error=error
            )
        except (AnnotationError, PlanError):
            raise error from None
    if not why_not and _cuts_heads(graph, num):
        try:
            other = _uneven_split(graph, structure, (1,) * num, "for heads do not divide")
        except (AnnotationError, PlanError):
            pass
        else:
            if _sent_bytes(other.sharded) < 0.95 * _sent_bytes(sharded):
                return other
    return InnerSplit(sharded=sharded, sizes=((),) * num_params, reasons=(*reasons, *notes))


def _why_even(structure: ReplicaGroups) -> str:
    if structure.pipeline is not None:
        return (
            "parts of unlike sizes inside a pipeline's stages need stages with programs of their "
            "own: write stages=[{'tensor': (2, 1)}, {'tensor': (2, 1)}]"
        )
    if len(structure.inner) != 1:
        axes = [name for name, _ in structure.inner]
        instead = " (memory.zero shares them out as fsdp would)" * ("fsdp" in axes)
        return (
            "parts of unlike sizes are for replicas with one axis, these have "
            f"{', '.join(axes) or 'none'}{instead}"
        )
    if structure.granules is not None:
        return "numerics.cut of 'any' cuts a dimension into granules of one size"
    return "a single device has all of it" if structure.inner[0][1] < 2 else ""


def _sharded(
    graph: Graph, structure: ReplicaGroups, *, unlike: bool
) -> tuple[Sharded, tuple[str, ...]]:
    dims: Sequence[Mapping[str, int]] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if structure.rules is not None:
        granules = structure.granules
        cut = tuple((name, granules or size) for name, size in structure.inner)
        resolved = resolve_rules(graph, structure.rules, cut, unlike=unlike)
        dims, warnings = resolved.dims, resolved.report()
        if not any(dims) and TOKEN_AXIS not in dict(structure.inner):
            over = ", ".join(f"{name}={size}" for name, size in structure.inner)
            notes = (
                f"rules {structure.rules.name!r} cut nothing of this model over {over}: every "
                "device of a replica holds all parameters and computes the same",
            )
    roles = structure.roles
    sharded = shard_graph(
        graph,
        structure.inner,
        roles,
        dims,
        warnings,
        unlike=unlike,
        granules=structure.granules,
    )
    return sharded, notes


def _uneven_split(
    graph: Graph,
    structure: ReplicaGroups,
    shares: Sequence[int],
    why: str,
    *,
    stated: bool = False,
    error: AnnotationError | None = None,
    cut: tuple[Sharded, tuple[str, ...]] | None = None,
) -> InnerSplit:
    """Shards in a ratio, in whole units."""
    [(axis, num)] = structure.inner
    if len(shares) != num:
        raise PlanError(f"shares {_ratio(shares)}: {len(shares)} for the {num} devices of {axis!r}")
    sharded, notes = cut or _sharded(graph, structure, unlike=True)
    sizes, size_lines = sizes_of(graph, sharded.axes[axis], axis, shares, stated=stated)
    lines = [f"parts of unlike sizes, {why}: {_ratio(shares)} over {axis}"]
    if error is not None:
        lines.append(f"even parts are not possible: {_first_line(error)}")
    return InnerSplit(
        sharded=sharded,
        shares=tuple(shares),
        sizes=sizes,
        reasons=(*notes, *lines, *size_lines),
    )


def _split_by_speed(
    graph: Graph, structure: ReplicaGroups, places: Sequence[Place], state_factor: float
) -> InnerSplit | None:
    """Shards by the devices' speeds and memory; None if the devices are equal."""
    cut = _sharded(graph, structure, unlike=True)
    sharded = cut[0]
    devices = split_devices(graph, sharded, places, NUM_GRANULES)
    if are_alike(devices, NUM_GRANULES):
        return None
    granules = best_shares(graph, sharded, devices, state_factor)
    seconds = [d.seconds(n) for d, n in zip(devices, granules, strict=True)]
    shares = in_lowest_terms(granules)
    if len(set(shares)) == 1:
        raise PlanError("the memory of the slower devices is needed in full")
    repeated = "/".join(
        f"{d.fixed_seconds / total:.0%}" for d, total in zip(devices, seconds, strict=True)
    )
    how = "measured" if places[0].measured_seconds is not None else "estimated"
    why = f"by the speeds of the devices ({how}; of their time {repeated} is for what each repeats)"
    split = _uneven_split(graph, structure, shares, why, cut=cut)
    return dataclasses.replace(
        split, reasons=(*split.reasons, _waiting_line(graph, split, devices, structure.inner[0][0]))
    )


def best_shares(
    graph: Graph, sharded: Sharded, devices: Sequence[SplitDevice], state_factor: float
) -> tuple[int, ...]:
    """Granules of each device, `NUM_GRANULES` in all, under their memory.

    Args:
        state_factor: The bytes of a device per byte of its parameters.

    Raises:
        PlanError: If they do not fit.
    """
    bytes_of = {
        is_cut: state_factor
        * sum(
            graph.values[v].num_bytes
            for v in graph.param_values
            if (sharded.num_parts(v) > 1) == is_cut
        )
        for is_cut in (False, True)
    }
    return best_sizes(
        NUM_GRANULES,
        [dataclasses.replace(d, fixed_bytes=bytes_of[False]) for d in devices],
        padded_bytes=bytes_of[True] / NUM_GRANULES,
    )


def in_lowest_terms(granules: Sequence[int]) -> tuple[int, ...]:
    """The same ratio in the smallest whole numbers."""
    common = math.gcd(*granules)
    return tuple(n // common for n in granules)


def state_factor(graph: Graph, optimizer_bytes: float, sums: SumsForm) -> float:
    """The bytes of a device per byte of its parameters, with a gradient.

    Args:
        optimizer_bytes: Of the optimizer's state for the whole model.
    """
    whole = sum(graph.values[v].num_bytes for v in graph.param_values)
    return 2 + optimizer_bytes / max(whole, 1) + sums.num_parts


def _waiting_line(graph: Graph, made: InnerSplit, devices: Sequence[SplitDevice], axis: str) -> str:
    """The slowest device, and how long the others wait for it, with sizes in whole units."""
    parameters = layouts(graph, made.sharded.param_specs(), made.sizes)
    parts = granules_of(parameters, axis, made.shares) or [0.0] * len(devices)
    seconds = [d.fixed_seconds + d.unit_seconds * n for d, n in zip(devices, parts, strict=True)]
    last = max(range(len(devices)), key=seconds.__getitem__)
    waits = "; ".join(
        f"{d.name} waits {1 - busy / seconds[last]:.0%} of it"
        for d, busy in zip(devices, seconds, strict=True)
        if d is not devices[last]
    )
    return f"of a microbatch {devices[last].name} works all the time; {waits}"


def _cuts_heads(graph: Graph, num: int) -> bool:
    """Whether columns divide over the devices although whole units, such as heads, do not."""
    values = graph.values
    for op in leaves(graph.ops):
        if op.name != "reshape" or not isinstance(op.inputs[0], int):
            continue
        shapes = [values[op.inputs[0]].shape], [values[v].shape for v in op.outputs]
        for factor in op.factors:
            [a], [b] = factor.operands, factor.results
            sizes = [shape[0][d] for shape, d in zip(shapes, (a, b), strict=True) if d is not None]
            if (
                not fits(factor, *shapes, num)
                and fits(factor, *shapes, num, unlike=True)
                and any(size % num == 0 for size in sizes)
            ):
                return True
    return False


def _sent_bytes(sharded: Sharded) -> float:
    return sum(axis.sent_bytes for axis in sharded.axes.values())


def _ratio(shares: Sequence[int]) -> str:
    return ":".join(map(str, shares))


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def layouts(graph: Graph, specs: Sequence[P], sizes: Sequence[Sizes]) -> tuple[Layout, ...]:
    """The layout of each parameter of a graph."""
    return tuple(
        Layout(
            name=name,
            shape=graph.values[v].shape,
            dtype=dtype_name(graph.values[v].dtype),
            spec=from_spec(spec, len(graph.values[v].shape)),
            sizes=shard_sizes,
        )
        for name, v, spec, shard_sizes in zip(
            graph.param_names, graph.param_values, specs, sizes, strict=True
        )
    )


def lines_of(split: InnerSplit) -> Iterator[str]:
    """The lines of the plan about a split."""
    yield from split.reasons
    yield from split.sharded.explain()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BetterShares:
    """Another ratio for the devices of a split.

    Attributes:
        gain: The slowest device's present seconds over those with the new ratio, minus one.
    """

    shares: tuple[int, ...]
    gain: float


def better_shares(
    graph: Graph,
    sharded: Sharded,
    plan: Plan,
    cluster: Cluster,
    seconds: Sequence[float],
    state_factor: float,
) -> BetterShares | None:
    """The best ratio by measured times; None: the devices are not described, or nothing fits.

    The repeated part of a device's time is estimated, as for a plan; its total is measured.

    Args:
        seconds: Measured work of each device of a replica in a step.
        state_factor: The bytes of a device per byte of its parameters.
    """
    [axis] = plan.axes
    if axis.name == "fsdp":
        return None  # it shards examples, in no ratio
    places = places_of(graph, [r.devices for r in plan.replicas], cluster)
    if not places:
        return None
    granules = granules_of(plan.parameters, axis.name, axis.ratio)
    if not granules:
        return None
    devices = []
    for estimated, num_granules, measured in zip(
        split_devices(graph, sharded, places, NUM_GRANULES), granules, seconds, strict=True
    ):
        present = estimated.fixed_seconds + estimated.unit_seconds * num_granules
        devices.append(
            dataclasses.replace(
                estimated,
                unit_seconds=estimated.unit_seconds * measured / present,
                fixed_seconds=estimated.fixed_seconds * measured / present,
            )
        )
    try:
        best = best_shares(graph, sharded, devices, state_factor)
    except PlanError:
        return None
    then = max(d.seconds(n) for d, n in zip(devices, best, strict=True))
    return BetterShares(shares=in_lowest_terms(best), gain=max(seconds) / then - 1)

"""Pipelines of unlike stages by search: several devices of a kind share a stage of their own.

The other searches give all stages one form. So devices that are no multiple of each other make
many stages of one device, of which each adds to the time in which a pipeline fills and empties. And
a layer with most of the work has one device. Here the devices of a kind in a node are stages of one
device, or share stages by examples (`data`) or parameters (`tensor`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import AnnotationError, PlanError
from ..core.format import span
from ..core.types import DATA_AXIS, TENSOR_AXIS
from ..launch.channel import own_member
from ..plan.parts import Prediction, RunnerUp, SumsForm
from ..plan.plan import Plan
from ..profile.profile import Profile, are_all_known, measured_sum
from .chain import UNBOUNDED, Chain, Group, ReplicaSort, Staging, best_pipeline
from .complete import complete
from .device_times import Alternative, layer_times
from .pipeline_request import PipelineRequest
from .placement import Ranks
from .proposals import ChainWork, slowest_link
from .stage_forms import StageForm, faults_of
from .staging_cost import staging_cost
from .structures import unlike_stages
from .workload import Workloads

_MOST_PIPELINES = 8  # of equal form
_MOST_FORMS = 2000  # of the stages of one number of pipelines
_MOST_WORK = 3e7  # of a dynamic programme, as `_work` counts it: about a second
_MOST_SOLVED = 8  # cuts of the most promising forms, each a dynamic programme
_LEAST_GAIN = 0.03  # of a step, relative: less is within what estimates are off


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlikeProposal:
    """Equal pipelines of unlike stages.

    Attributes:
        replicas: Ranks of each pipeline's devices, stage by stage.
        forms: The form of each stage.
        layers: Layers of the chain on each stage.
    """

    alternative: Alternative
    replicas: tuple[Ranks, ...]
    forms: tuple[StageForm, ...]
    layers: tuple[int, ...]
    counts: tuple[int, ...]
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class _Cell:
    """Like devices of one node in each pipeline, as stages of one form.

    Attributes:
        ranks: [R, n] Of all its devices in each pipeline.
        size: Devices of a stage.
        axis: What they share; empty: a stage is one device.
    """

    ranks: tuple[Ranks, ...]
    size: int
    axis: str

    @property
    def num_stages(self) -> int:
        return len(self.ranks[0]) // self.size


def unlike_plan(
    jobs: Workloads,
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    in_form: Callable[[Plan], Plan],
    *,
    best: Plan | None,
    described: Cluster,
    num_segments: int,
    recompute: Sequence[bool],
    max_stages: int | None,
    sums: SumsForm,
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan of the fastest pipelines of unlike stages, if they are clearly the fastest.

    Args:
        in_form: Gives a plan the cheapest memory layout that fits.
        best: The best plan whose stages have one form; None: none fits.
        described: The cluster without measured links.
        recompute: Whether stages run forwards again: what to try.
        max_stages: Most stages of a pipeline; None: any number.

    Returns:
        The plan, or a line why it is not taken although it would be faster.
    """
    settings = jobs.settings
    if (
        not are_all_known(cluster)
        or own_member() is not None  # other devices could not keep the bits of unlike stages
        or sums.kind != "exact"
        or settings.communication.microbatch_clip_norm is not None
        or faults_of(settings)
    ):
        return None, ()
    known = None if best is None else best.prediction
    found = unlike_pipelines(
        work,
        cluster,
        profile,
        recompute=recompute,
        max_stages=max_stages,
        faster_than=math.inf if known is None else known.step_seconds,
    )
    if found is None:
        return None, ()
    job = jobs.at(found.alternative.microbatch_size)
    request = PipelineRequest(
        num=len(found.forms),
        recompute=found.alternative.recompute,
        num_segments=num_segments,
        cut=found.layers,
    )
    try:
        plan = complete(
            job.graph,
            unlike_stages([*itertools.chain(*found.replicas)], request, found.forms, None),
            cluster=described,
            batch_size=job.batch_size,
            microbatch_size=job.microbatch_size,
            sums=sums,
            optimizer_bytes=job.optimizer_bytes,
            counts=found.counts,
            prediction=found.prediction,
            runners_up=() if best is None else as_runners_up(best),
        )
        return in_form(plan), ()
    except (AnnotationError, PlanError) as error:  # the model, or its memory
        why = str(error).splitlines()[0]
        return None, (f"unlike stages of {span(found.prediction.step_seconds)} a step: {why}",)


def as_runners_up(plan: Plan) -> tuple[RunnerUp, ...]:
    """A searched plan and its runners-up, as those of a faster plan."""
    assert plan.prediction is not None
    words = f"microbatches of {plan.microbatch_size}, {plan.mesh_in_words}"
    seconds = plan.prediction.step_seconds
    return RunnerUp(description=words, step_seconds=seconds), *plan.runners_up


def unlike_pipelines(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    *,
    recompute: Sequence[bool],
    max_stages: int | None,
    faster_than: float,
) -> UnlikeProposal | None:
    """The fastest pipelines of unlike stages on all devices; None: none is fast enough.

    Forms are ordered by what they would take with stages of equal times, and no transfers. The cuts
    and the order of the first few are found exactly (`best_pipeline`), and replayed.

    Args:
        work: All links between the devices are described or measured.
        recompute: Whether stages run forwards again: what to try.
        max_stages: Most stages of a pipeline; None: any number.
        faster_than: Seconds of the best plan so far.
    """
    costs = functools.cache(functools.partial(_group, work, cluster, profile))
    least = faster_than * (1 - _LEAST_GAIN)
    most = min(len(work.layers), max_stages or len(work.layers))
    ranked = []
    for size in sorted({size for size, _ in work.sizes}):
        num = work.batch_size // size
        for number, cells in enumerate(_choices(work, cluster, size)):
            stages = sum(cell.num_stages for cell in cells)
            pipelines = len(cells[0].ranks)
            if pipelines > num or not 2 <= stages <= most:
                continue
            if _work(cells, len(work.layers)) > _MOST_WORK:
                continue
            groups = [costs(cell, size, False) for cell in cells]
            rate = sum(c.num_stages / _seconds(g) for c, g in zip(cells, groups, strict=True))
            seconds = (math.ceil(num / pipelines) - 1 + stages) / rate
            if seconds < least:
                ranked.append((seconds, size, number, cells))
    best: UnlikeProposal | None = None
    for seconds, size, _, cells in sorted(ranked, key=lambda x: x[:3])[:_MOST_SOLVED]:
        if seconds >= least:
            break
        for again in sorted({*recompute}):
            groups = [costs(cell, size, again) for cell in cells]
            try:
                found = _solved(work, cluster, profile, Alternative(size, 1, again), cells, groups)
            except PlanError:  # they do not fit
                continue
            if found.prediction.step_seconds < least:
                best, least = found, found.prediction.step_seconds
            break
    return best


def _work(cells: Sequence[_Cell], num_layers: int) -> float:
    """Of `best_pipeline`: its states, and the steps from each."""
    states = math.prod(cell.num_stages + 1 for cell in cells)
    return float(states * len(cells) * ((num_layers + 1) * (len(cells) + 1)) ** 2)


def _seconds(group: Group) -> float:
    """Of a microbatch of the whole model."""
    return sum(group.forward_seconds) + sum(group.backward_seconds)


def _choices(work: ChainWork, cluster: Cluster, size: int) -> Iterator[tuple[_Cell, ...]]:
    """The forms of every cell, for every number of equal pipelines."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        kinds.setdefault((device.label, device.memory_bytes), []).append(rank)
    common = math.gcd(*map(len, kinds.values()))
    for pipelines in range(1, min(common, _MOST_PIPELINES) + 1):
        if common % pipelines:
            continue
        cells: list[tuple[Ranks, ...]] = []
        for ranks in kinds.values():
            num = len(ranks) // pipelines
            blocks = [ranks[i : i + num] for i in range(0, len(ranks), num)]
            rows = [_by_node(cluster, block) for block in blocks]
            if any([*map(len, row)] != [*map(len, rows[0])] for row in rows):
                break  # pipelines would have unlike cells
            cells += zip(*rows, strict=True)
        else:
            forms = [_forms(work, cell, size) for cell in cells]
            if math.prod(map(len, forms)) > _MOST_FORMS:
                continue
            for chosen in itertools.product(*forms):
                if any(cell.axis for cell in chosen):
                    yield chosen


def _by_node(cluster: Cluster, ranks: Sequence[int]) -> list[Ranks]:
    groups = itertools.groupby(ranks, key=lambda rank: cluster.devices[rank].node)
    return [tuple(group) for _, group in groups]


def _forms(work: ChainWork, ranks: tuple[Ranks, ...], size: int) -> list[_Cell]:
    num = len(ranks[0])
    forms = [_Cell(ranks, 1, "")]
    for part in range(2, num + 1):
        if num % part:
            continue
        if size % part == 0:
            forms.append(_Cell(ranks, part, DATA_AXIS))
        if (size, part) in work.sizes:
            forms.append(_Cell(ranks, part, TENSOR_AXIS))
    return forms


def _group(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    cell: _Cell,
    size: int,
    again: bool,
) -> Group:
    """A cell as devices of a chain, each a stage."""
    rank, part = cell.ranks[0][0], cell.size
    device = cluster.devices[rank]
    inside = cluster.link(rank, cell.ranks[0][1]) if part > 1 else None
    by_data = part if cell.axis == DATA_AXIS else 1
    tensor = part if cell.axis == TENSOR_AXIS else 1
    # Fewer examples take longer each: their own times, where these are known.
    examples = size // by_data if (size // by_data, 1) in work.sizes else size
    by_data = by_data * examples // size
    key, sizes = Alternative(examples, tensor, again), work.sizes[examples, tensor]
    seconds, _ = layer_times(
        device,
        key,
        sizes,
        profile,
        state_factor=work.state_factor,
        whole=work.sizes[examples, 1],
        sent_bytes=work.sent_bytes[size, tensor] if tensor > 1 else (),
        num_collectives=work.num_collectives.get((size, tensor), ()),
        link=inside,
    )
    seconds[:2] /= by_data
    if cell.axis == DATA_AXIS and inside is not None:  # a microbatch's gradients are summed
        ring = 2 * (1 - 1 / part) / inside.bytes_per_second
        seconds[1] += [inside.all_reduce_seconds + ring * layer.parameter_bytes for layer in sizes]
    return Group(
        kind=f"{device.label} x {part}",
        num_devices=cell.num_stages,
        memory_bytes=UNBOUNDED if device.memory_bytes is None else device.memory_bytes,
        forward_seconds=tuple(seconds[0].tolist()),
        backward_seconds=tuple(seconds[1].tolist()),
        update_seconds=tuple((seconds[2] * work.counts_updates).tolist()),
        parameter_bytes=tuple(s.parameter_bytes for s in sizes),
        stash_bytes=tuple(s.stash_bytes / by_data for s in sizes),
    )


def _solved(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    alternative: Alternative,
    cells: Sequence[_Cell],
    groups: Sequence[Group],
) -> UnlikeProposal:
    """The best order and cut of stages, and its replay."""
    pipelines = len(cells[0].ranks)
    num = work.batch_size // alternative.microbatch_size
    links = [[slowest_link(cluster, a.ranks[0], b.ranks[0]) for b in cells] for a in cells]
    measured = measured_sum(profile, (device.label for device in cluster.devices))
    gathers = [
        (cell.size - 1) / cell.size / inside.bytes_per_second
        if cell.axis == TENSOR_AXIS and (inside := cluster.link(*cell.ranks[0][:2])) is not None
        else 0.0
        for cell in cells
    ]
    chain = Chain(
        groups=tuple(groups),
        num_microbatches=math.ceil(num / pipelines),
        output_bytes=tuple(s.output_bytes for s in work.sizes[alternative.microbatch_size, 1]),
        state_factor=work.state_factor,
        keeps_inputs=alternative.recompute,
        send_seconds=tuple(
            tuple(
                (1 / x.bytes_per_second if x else 0.0) + gather
                for x, gather in zip(row, gathers, strict=True)
            )
            for row in links
        ),
        send_latency_seconds=tuple(
            tuple(x.latency_seconds if x else 0.0 for x in row) for row in links
        ),
        reduce_seconds=tuple(
            2 * work.reduce_factor / min((x.bytes_per_second for x in row if x), default=math.inf)
            for row in links
        )
        if measured is None
        else (),
        meeting_seconds=measured or 0.0,
    )
    stages = sum(cell.num_stages for cell in cells)
    one = best_pipeline(chain, num_stages=stages)
    [sort] = one.replicas
    few, more = divmod(num, pipelines)
    sorts = tuple(
        ReplicaSort(groups=sort.groups, count=count, num_microbatches=each)
        for count, each in ((more, few + 1), (pipelines - more, few))
        if count
    )
    ends = (*one.cuts[1:], len(chain.output_bytes))
    cost = staging_cost(
        dataclasses.replace(
            chain,
            num_microbatches=num,
            groups=tuple(
                dataclasses.replace(g, num_devices=g.num_devices * pipelines) for g in groups
            ),
        ),
        Staging(cuts=one.cuts, replicas=sorts, step_seconds=one.step_seconds),
        state_parts=sum(len(cell.ranks[0]) for cell in cells),
    )
    order = _order(cells, sort.groups)
    replicas, counts, devices = [], [], []
    numbers = iter(range(pipelines))
    for each, spent in zip(sorts, cost.stages, strict=True):
        for r in itertools.islice(numbers, each.count):
            stage_ranks = [cells[g].ranks[r][i : i + cells[g].size] for g, i in order]
            for ranks, one_stage in zip(stage_ranks, spent, strict=True):
                devices += [one_stage.model_copy(update={"rank": rank}) for rank in ranks]
            replicas.append(tuple(itertools.chain(*stage_ranks)))
            counts.append(each.num_microbatches)
    return UnlikeProposal(
        alternative=alternative,
        replicas=tuple(replicas),
        forms=tuple(
            StageForm(
                axes=((cells[g].axis, cells[g].size),) if cells[g].axis else (),
                work=float(cells[g].size),
            )
            for g in sort.groups
        ),
        layers=tuple(b - a for a, b in zip(one.cuts, ends, strict=True)),
        counts=tuple(counts),
        prediction=Prediction(step_seconds=cost.step_seconds, devices=tuple(devices)),
    )


def _order(cells: Sequence[_Cell], groups: Sequence[int]) -> list[tuple[int, int]]:
    """For each stage its cell, and the place of its first device there."""
    used = [0] * len(cells)
    out = []
    for group in groups:
        out.append((group, used[group]))
        used[group] += cells[group].size
    return out

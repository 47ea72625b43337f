"""Plans of a job by search: for a cluster that is described, or for the devices that are here."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from ..cluster.cluster import Cluster, Device, Node
from ..core.errors import AnnotationError, ConfigError, PlanError
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import RunnerUp, SumsForm
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..profile.profile import LayerSize, Profile
from ..profile.segment_times import kept_bytes, layer_sizes
from .complete import complete
from .measure import Measure
from .mesh_axes import split_over
from .microbatch_sizes import candidate_sizes
from .pipeline_request import PipelineRequest
from .proposals import ChainWork, Proposal, propose
from .reduction import with_sums_and_memory
from .search import NothingFitsError
from .search_options import FoundPlan, SearchOptions
from .structures import ReplicaGroups, check_unannotated
from .workload import Workloads
from .zero_search import SharingCopies, least_seconds, sharing_copies

_MAX_TENSOR = 8  # a node of NVLinked cards
_MEASURED_SEGMENTS = 8  # each takes a compilation
_MOST_SEGMENTS = 96  # of estimated times; the search is measured up to so many


def search_plan(
    jobs: Workloads,
    cluster: Cluster,
    profile: Profile | None,
    wishes: SearchOptions,
    *,
    sums: SumsForm,
    size: int | None = None,
    all_devices: bool = False,
    measure: Measure | None = None,
) -> FoundPlan:
    """The fastest plan that the search finds for a cluster.

    Args:
        profile: Measured times; what it lacks is estimated from the mesh file's rates.
        sums: How gradients are added up.
        size: Examples of a microbatch, if that is asked for.
        all_devices: Whether only plans in which every device takes part are wanted.
        measure: None: the devices are not here.

    Raises:
        ConfigError: If the model is annotated, or sizes do not divide the batch.
        PlanError: If a kind of device has neither a profile nor a rate, or nothing fits.
    """
    tried = wishes.microbatch_sizes
    if profile is not None and not tried and size is None:
        tried = tuple({s.microbatch_size for s in profile.times})
    sizes = _sizes(jobs.batch_size, tried, size, len(cluster.devices))
    check_unannotated(jobs.at(sizes[0]).graph, "plan='auto'")
    some = min(max(_MEASURED_SEGMENTS, 2 * len(cluster.devices)), _MOST_SEGMENTS)
    num_segments = wishes.num_segments or some
    if profile is not None:
        num_segments = profile.most_segments

    timed_form = "" if profile is None else profile.form

    def in_form(plan: Plan) -> Plan:
        if measure is not None:  # programs are compiled, by every process
            measure.agree(plan)
        work = jobs.at(plan.microbatch_size)
        return with_sums_and_memory(work, plan, cluster, measure, timed_form=timed_form)

    def least(plan: Plan, seconds: float) -> float:
        # Times that were measured in a form know what it runs again, and hardly without it.
        if timed_form:
            return seconds
        return least_seconds(jobs.at(plan.microbatch_size), plan, cluster, seconds)

    def of(sizes: Sequence[int], num_segments: int, said: Sequence[str] = ()) -> FoundPlan:
        tensors = _tensors(wishes.tensors, cluster)
        work, uncut = chain_work(jobs, sizes, tensors, num_segments, sums)
        if profile is not None:
            profile.check(work.layers)
        whole: FoundPlan | None = None
        refused: PlanError | None = None
        try:
            found, timelines = propose(
                work,
                cluster,
                profile,
                max_stages=wishes.max_stages,
                recompute=wishes.recompute,
                uncounted=bool(wishes.tensors),
                all_devices=all_devices,
                time_budget_seconds=wishes.seconds,
                most_seconds=wishes.most_seconds,
            )
            plan = _completed(jobs, cluster, found, num_segments, sums, (*said, *uncut))
            whole = FoundPlan(plan=in_form(plan), timelines=timelines)
        except PlanError as error:  # nothing fits, or what is found cannot be as settings ask
            refused = error
        shared = sharing_copies(
            work,
            cluster,
            profile,
            lambda own: _completed(jobs, cluster, own, num_segments, sums, said),
            in_form,
            least,
            faster_than=_step_seconds(whole),
            all_devices=all_devices,
            seconds=wishes.seconds,
        )
        if shared is None:
            if whole is None:
                assert refused is not None
                raise refused
            return whole
        return FoundPlan(plan=_beside(shared, whole))

    if tried or size is not None:
        return of(sizes, num_segments)
    try:
        return of(sizes, num_segments)
    except NothingFitsError:
        finer, segments = _finer(jobs.batch_size, sizes), wishes.num_segments or _MOST_SEGMENTS
        if (finer, segments) == (sizes, num_segments):
            raise
        larger = ", ".join(map(str, sizes))
        said = f"nothing fits of sizes {larger} in {num_segments} segments: finer ones were tried"
        return of(finer, segments, (said,))


def auto_plan(
    jobs: Workloads, cluster: Cluster, measure: Measure, *, sums: SumsForm, size: int | None
) -> Plan:
    """The fastest plan for the devices that are here, by a short profile of them.

    Every process of the job takes part, and finds the same plan.

    Args:
        cluster: Of those devices.
        sums: How gradients are added up.
        size: Examples of a microbatch, if that is asked for.
    """
    wishes = SearchOptions()
    cluster = _linked(cluster, measure)
    sizes = _sizes(jobs.batch_size, (), size, len(cluster.devices))
    profile = measure.profile(cluster, sizes, _MEASURED_SEGMENTS, sums)
    found = search_plan(
        jobs, cluster, profile, wishes, sums=sums, size=size, all_devices=True, measure=measure
    )
    return found.plan.replaced(reasons=("chosen by search", *found.plan.reasons))


def _linked(cluster: Cluster, measure: Measure) -> Cluster:
    """The cluster with what its devices' transfers were measured to take, where no file says."""
    nodes = cluster.nodes or (Node(name="here"),)
    known = cluster.default_link is not None or len(nodes) == 1
    if len(cluster.devices) == 1 or (known and all(node.link is not None for node in nodes)):
        return cluster
    link = measure.link()
    filled = tuple(
        node if node.link is not None else node.model_copy(update={"link": link}) for node in nodes
    )
    return cluster.model_copy(
        update={"nodes": filled, "default_link": cluster.default_link or link}
    )


def _sizes(
    batch_size: int, asked: Sequence[int], size: int | None, num_devices: int
) -> tuple[int, ...]:
    sizes = tuple(asked) or ((size,) if size else candidate_sizes(batch_size, num_devices))
    wrong = [b for b in sizes if batch_size % b]
    if wrong:
        raise ConfigError(
            f"microbatch sizes {wrong} do not divide the job's batch_size={batch_size}"
        )
    return tuple(sorted(sizes))


def _finer(batch_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The least of sizes that were tried, two below it, and single examples."""
    least = min(sizes)
    below = [size for size in range(1, least) if batch_size % size == 0]
    return tuple(sorted({1, *below[-2:], least}))


def _tensors(asked: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Sizes of tensor-parallel groups: powers of two of like devices of a node."""
    if asked:
        return tuple(sorted({1, *asked}))

    def key(device: Device) -> tuple[str, int | None, int]:
        return device.label, device.memory_bytes, device.node

    largest = max(collections.Counter(map(key, cluster.devices)).values())
    return tuple(2**k for k in range(min(largest, _MAX_TENSOR).bit_length()))


def chain_work(
    jobs: Workloads,
    sizes: Sequence[int],
    tensors: Sequence[int],
    num_segments: int,
    sums: SumsForm,
) -> tuple[ChainWork, tuple[str, ...]]:
    """The job's chain at every size, as the search takes it, and what could not be cut."""
    chains: dict[tuple[int, int], tuple[LayerSize, ...]] = {}
    sent: dict[tuple[int, int], tuple[float, ...]] = {}
    names: tuple[str, ...] = ()
    said: dict[str, None] = {}
    solved: dict[int, Sharded] = {}
    for size in sorted(sizes, reverse=True):  # the largest sends most, so its cut is what matters
        own = jobs.at(size)
        graph, opened = own.graph, graph_of(own.graph)
        chain = segments(opened, num_segments)
        names = names or tuple(s.name for s in chain)
        kept = kept_bytes(opened, chain, own.model.trained_places)
        for tensor in tensors:
            try:
                cut = shard_graph(graph, *split_over(graph, tensor), like=solved.get(tensor))
            except (AnnotationError, PlanError) as error:
                said[f"tensor {tensor}: not tried: {str(error).splitlines()[0]}"] = None
                continue
            solved.setdefault(tensor, cut)
            chains[size, tensor] = layer_sizes(opened, chain, cut.over(opened), kept=kept)
            total = sum(s.flops for s in chain) or 1.0
            bytes_sent = sum(axis.sent_bytes for axis in cut.axes.values())
            sent[size, tensor] = tuple(bytes_sent * s.flops / total for s in chain)
    first = jobs.at(sizes[0])
    param_bytes = tree_bytes(first.model.params)
    work = ChainWork(
        layers=names,
        sizes=chains,
        sent_bytes=sent,
        input_bytes={size: jobs.at(size).input_bytes for size in sizes},
        batch_size=jobs.batch_size,
        # Itself, its gradient, what gradients are summed in, the optimizer's state.
        state_factor=2 + sums.num_parts + first.optimizer_bytes / max(1, param_bytes),
        reduce_factor=sums.travel_factor,
    )
    return work, tuple(said)


def _completed(
    jobs: Workloads,
    cluster: Cluster,
    found: Proposal,
    num_segments: int,
    sums: SumsForm,
    said: Sequence[str],
) -> Plan:
    own, num_stages = found.alternative, len(found.cuts)
    work = jobs.at(own.microbatch_size)
    graph = work.graph
    inner, roles = split_over(graph, own.tensor)
    structure = ReplicaGroups(replicas=found.replicas, axes=inner, roles=roles)
    if num_stages > 1:
        ends = (*found.cuts[1:], len(segments(graph_of(graph), num_segments)))
        request = PipelineRequest(
            num=num_stages,
            recompute=own.recompute,
            num_segments=num_segments,
            cut=tuple(b - a for a, b in zip(found.cuts, ends, strict=True)),
        )
        structure = dataclasses.replace(
            structure, axes=(("stage", num_stages), *inner), pipeline=request
        )
    return complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=work.batch_size,
        microbatch_size=work.microbatch_size,
        sums=sums,
        optimizer_bytes=work.optimizer_bytes,
        counts=found.counts,
        starts=found.starts,
        prediction=found.prediction,
        runners_up=found.runners_up,
        reasons=(*found.reasons, *said),
    )


def _step_seconds(found: FoundPlan | None) -> float:
    known = found.plan.prediction if found is not None else None
    return math.inf if known is None else known.step_seconds


def _beside(shared: SharingCopies, whole: FoundPlan | None) -> Plan:
    """Copies that share their state, with the best plan of whole state as their runner-up."""
    plan, known = shared.plan, shared.plan.prediction
    assert known is not None
    bound = shared.bound_seconds
    others: tuple[RunnerUp, ...] = ()
    if whole is None:
        said = "no plan with whole state fits, or can be as settings ask"
    else:
        before = whole.plan.prediction
        assert before is not None
        bound = min(bound, before.bound_seconds)
        words = f"microbatches of {whole.plan.microbatch_size}, {whole.plan.mesh_in_words}"
        best = RunnerUp(description=words, step_seconds=before.step_seconds)
        others = (best, *whole.plan.runners_up)
        said = f"with whole state the best plan takes {before.step_seconds:.4g} s"
    return plan.replaced(
        prediction=known.model_copy(update={"bound_seconds": bound}),
        runners_up=(*others, *plan.runners_up),
        reasons=(f"copies of one device each: {said}", *plan.reasons),
    )

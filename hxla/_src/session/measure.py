"""Measures the present devices for plans: links, segments alone, and some training steps.

Links between the devices of a job are measured by the messages that a pipeline's ticks send. Some
steps of training give the times of a plan, which is compiled for them.
"""

import collections
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..choose.apportionment import default_sizes, finish_seconds
from ..choose.make_plan import workloads
from ..choose.planning import PlanRequest, plan_for
from ..choose.workload import TriedSizes
from ..cluster.cluster import Cluster, Link
from ..cluster.kinds import are_unlike
from ..core.config import BalanceConfig
from ..core.errors import PlanError
from ..core.timing import middle_mean
from ..core.types import PyTree
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here, process_of
from ..job.agreement import facts_of_plan
from ..job.context import JobContext
from ..lower.compile import adds_in_order, compiler_options
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..profile.profile import MeasuredLink, Profile, Setting, merge_profiles, together_key
from ..profile.segment_times import layer_sizes, measure, model_name
from ..report.history import StepRecord
from .device_memory import largest_lack, needed_bytes
from .session import Session
from .values import SessionOptions
from .watch import FIRST_MEASURED, has_clocks

_AXIS = "pair"
_MESSAGE_BYTES = (1 << 12, 1 << 18, 1 << 22)
_REPEATS = 3
_LOOP_SECONDS = 0.15  # of a timed loop: several periods of a throttled process's CPU quota
_MOST_ROUNDS = 256
_SLOW = 1.0  # seconds of an exchange, above which no longer message is tried
_SOURCE = f"measured by exchanges of messages, jax {jax.__version__}"


def measured_links(
    job: JobContext, cluster: Cluster, devices: Sequence[jax.Device]
) -> tuple[MeasuredLink, ...]:
    """The links between neighbours by rank, one pair of devices for each pair of kinds.

    Every process of the job takes part and gets the same figures. Devices whose libraries for
    collectives differ send each other nothing, so their links are not measured.
    """
    return tuple(
        MeasuredLink(
            kinds=kinds,
            in_node=in_node,
            mesh=cluster.name,
            link=_measured(job, [devices[rank] for rank in pair]),
        )
        for kinds, in_node, pair in _pairs(cluster)
    )


def _pairs(cluster: Cluster) -> Iterator[tuple[tuple[str, str], bool, tuple[int, int]]]:
    """The kinds of two neighbours, whether a node has both, and their ranks: each case once."""
    num, seen = len(cluster.devices), set()
    for i, j in itertools.pairwise((*range(num), 0)):
        a, b = cluster.devices[i], cluster.devices[j]
        first, second = sorted((a.label, b.label))
        case = (first, second), a.node == b.node
        if i != j and case not in seen and not are_unlike((a.kind, b.kind)):
            seen.add(case)
            yield *case, (i, j)


def _measured(job: JobContext, pair: Sequence[jax.Device]) -> Link:
    """Half of the time of an exchange, by message size: in a tick both devices send."""
    takes_part = any(map(is_here, pair))
    curve: list[tuple[float, float]] = []
    for num_bytes in _MESSAGE_BYTES:
        exchange = _exchange(pair, num_bytes) if takes_part else None
        seconds, once = _timed(job, exchange)
        seconds /= 2
        curve.append((float(num_bytes), float(f"{num_bytes / seconds:.4g}")))
        if once > _SLOW:
            break
    meet = _exchange(pair, _MESSAGE_BYTES[0], _all_reduce) if takes_part else None
    meeting, _ = _timed(job, meet)
    (least, slowest), (_, fastest) = curve[0], curve[-1]
    return Link(
        bytes_per_second=fastest,
        latency_seconds=float(f"{least / slowest:.4g}"),
        all_reduce_seconds=float(f"{meeting:.4g}"),
        curve=tuple(curve),
        source=_SOURCE,
    )


def _timed(job: JobContext, exchange: Callable[[int], float] | None) -> tuple[float, float]:
    """Seconds of one of many moves that follow one another, and of a move alone."""
    once = _agreed(job, exchange, 1, repeats=1)
    num = min(_MOST_ROUNDS, max(1, round(_LOOP_SECONDS / max(once, 1e-9))))
    return _agreed(job, exchange, num, repeats=_REPEATS), once


def _agreed(
    job: JobContext, exchange: Callable[[int], float] | None, num: int, *, repeats: int
) -> float:
    """Seconds of one of `num` exchanges that follow one another, the same on every process."""
    seconds = 0.0
    if exchange is not None:
        seconds = statistics.median(exchange(num) for _ in range(repeats))
    texts = job.gather("seconds of exchanges", json.dumps(seconds / num))
    return max(float(json.loads(text)) for text in texts)


def _both_ways(down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.ppermute(down, _AXIS, [(0, 1)]), jax.lax.ppermute(up, _AXIS, [(1, 0)])


def _all_reduce(down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.psum(down, _AXIS), up


def _exchange(
    pair: Sequence[jax.Device],
    num_bytes: int,
    move: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] = _both_ways,
) -> Callable[[int], float]:
    """A function that runs so many moves, in one program, and returns their seconds."""
    mesh = Mesh(np.array(pair), (_AXIS,), axis_types=(AxisType.Auto,))

    def run(num: jax.Array, down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        def once(_: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return move(*arrays)

        return jax.lax.fori_loop(0, num, once, (down, up))

    mapped = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(P(), P(_AXIS), P(_AXIS)), out_specs=P(_AXIS), check_vma=False
        )
    )
    shape, everywhere = (2 * num_bytes // 4,), NamedSharding(mesh, P())
    zeros = jax.jit(
        lambda: jnp.zeros(shape, jnp.int32), out_shardings=NamedSharding(mesh, P(_AXIS))
    )()

    def number(num: int) -> jax.Array:
        here = [jax.device_put(np.int32(num), device) for device in pair if is_here(device)]
        return jax.make_array_from_single_device_arrays((), everywhere, here)

    def timed(num: int) -> float:
        rounds = number(num)
        begin = time.perf_counter()
        jax.block_until_ready(mapped(rounds, zeros, zeros))
        return time.perf_counter() - begin

    timed(1)  # compiles, and opens connections
    return timed


_COPIED_BYTES = 1 << 26


def short_profile(
    job: JobContext,
    cluster: Cluster,
    devices: tuple[jax.Device, ...],
    sizes: Sequence[int],
    num_segments: int,
    sums: SumsForm,
) -> Profile:
    """Times of the job's segments on the kinds of devices here; every process takes part.

    A device holds one segment's parameters at a time, so a model that fits no device is measured
    too. An update takes the time of its bytes through the device's memory.

    Args:
        num_segments: Most segments of the chain.

    Returns:
        The same profile on every process.
    """
    from ..cluster.detect import copy_bytes_per_second  # with the command that describes devices

    device = next(d for d in devices if is_here(d))
    label = cluster.devices[devices.index(device)].label
    rate = copy_bytes_per_second(device, _COPIED_BYTES)
    param_bytes = max(tree_bytes(job.functional(sizes[0]).params), 1)
    # Per byte of parameters: it and the optimizer's state are read and written, sums are read.
    touched = 2 + sums.num_parts + 2 * job.optimizer_bytes(sizes[0]) / param_bytes
    profiles: list[Profile] = []
    for size in sizes:
        alone = segment_profile(job, Setting(label, size), num_segments, device, sums)
        [(setting, times)], [whole] = alone.times.items(), alone.sizes.values()
        updated = tuple(
            dataclasses.replace(t, update=touched * s.parameter_bytes / rate)
            for t, s in zip(times, whole, strict=True)
        )
        profiles.append(dataclasses.replace(alone, times={setting: updated}))
    known = everywhere(job, merge_profiles(profiles))
    return dataclasses.replace(known, links=measured_links(job, cluster, devices))


def segment_profile(
    job: JobContext,
    setting: Setting,
    num_segments: int,
    device: jax.Device,
    sums: SumsForm,
    done: Callable[[int], None] = lambda _: None,
) -> Profile:
    """Seconds of each segment on one device of this process, without updates.

    Args:
        num_segments: Most segments of the chain.
        done: Called with the number of segments measured so far.
    """
    graph = graph_of(job.graph(setting.microbatch_size))
    model = job.functional(setting.microbatch_size)
    chain = segments(graph, num_segments)
    params, aux = model.arrays
    times = measure(
        graph,
        chain,
        params=params,
        aux=aux,
        batch=job.as_inputs(job.first_batch(0, setting.microbatch_size)),
        device=device,
        options=compiler_options(device.platform, sums),
        in_order=adds_in_order(device.platform, sums),
        done=done,
    )
    whole = layer_sizes(graph, chain, shard_graph(graph, (), {}), trained=model.trained_places)
    return Profile(
        model=model_name(model.params),
        layers=tuple(s.name for s in chain),
        num_segments=num_segments,
        sizes={(setting.microbatch_size, 1): whole},
        times={setting: times},
    )


def everywhere(job: JobContext, profile: Profile) -> Profile:
    """The profiles of all processes, merged on each of them."""
    texts = job.gather("profile", json.dumps(profile.to_table()))
    return merge_profiles(Profile.from_table(json.loads(text)) for text in texts)


MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_TIMED_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """Times of some training steps.

    Attributes:
        micro_seconds: Seconds of a microbatch's forward and backward, by device.
        counts: Microbatch counts of most of the steps.
        end_step: First step whose data was not read.
        form: The memory layout, as `Plan.memory_form` names it.
    """

    micro_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    step_seconds: float
    peak_bytes: int
    end_step: int
    form: str = ""

    def by_kind(self, labels: Sequence[str]) -> "ObservedSteps":
        """Average times over the devices of each kind."""

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            by_label = collections.defaultdict(list)
            for label, value in zip(labels, values, strict=True):
                by_label[label].append(value)
            return tuple(statistics.mean(by_label[label]) for label in labels)

        return dataclasses.replace(
            self,
            micro_seconds=mean(self.micro_seconds),
            update_seconds=mean(self.update_seconds),
        )

    @property
    def rest_seconds(self) -> float:
        """Seconds of a step beyond the slowest device's work: the all-reduce and the loop."""
        busy = finish_seconds(self.counts, self.micro_seconds, self.update_seconds)
        return max(0.0, self.step_seconds - max(busy))


class Observer:
    """Collects steps until enough of them have the same counts."""

    def __init__(self, fewest_seconds: float = _FEWEST_SECONDS) -> None:
        self._fewest_seconds = fewest_seconds
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_enough_steps(self, record: StepRecord) -> bool:
        """Add a step; returns whether its counts have enough steps now."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        seconds = self._seconds[record.counts]
        seconds.append(record.seconds)
        return len(seconds) >= _FEWEST_TIMED_STEPS and sum(seconds) >= self._fewest_seconds

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The most frequent counts, and the mean of the middle half of their seconds."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)


def run_trial(
    job: JobContext,
    plan: Plan,
    devices: tuple[jax.Device, ...],
    *,
    start: int = 0,
    batch: PyTree | None = None,
    fewest_seconds: float = _FEWEST_SECONDS,
) -> ObservedSteps:
    """Train a plan from a step on until enough steps are timed; every process takes part.

    Args:
        batch: The batch of every step; None: those of the data.
    """
    # Counts that follow small changes would leave too few steps of each.
    moves = job.settings.balance
    calm = BalanceConfig(
        min_gain=max(0.1, moves.min_gain),
        patience_steps=moves.patience_steps,
        window_steps=MOST_STEPS,
        retry_steps=moves.retry_steps,
    )
    observer = Observer(fewest_seconds)
    options = SessionOptions(
        steps=start + MOST_STEPS, balance=calm, first_step=start, is_trial=True
    )
    with Session(job, plan, devices, options) as session:
        if batch is None:
            for record in session:
                if observer.has_enough_steps(record):
                    session.stop()
        else:
            for _ in range(_num_steps(job, session, observer, batch, fewest_seconds)):
                observer.has_enough_steps(session.step(batch))
        counts, seconds = observer.most
        return ObservedSteps(
            micro_seconds=session.running_plan.balancer.seconds,
            update_seconds=session.running_plan.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=session.running_plan.memory_bytes,
            end_step=session.step_number + job.settings.data.prefetch_steps,
            form=plan.memory_form,
        )


def _num_steps(
    job: JobContext, session: Session, observer: Observer, batch: PyTree, fewest_seconds: float
) -> int:
    """How many steps take so many seconds, the same on every process, by some first steps."""
    for _ in range(_WARM_STEPS + 1):
        record = session.step(batch)
        observer.has_enough_steps(record)
    slowest = max(map(float, job.gather("step of a trial", str(record.seconds))))
    return min(max(math.ceil(fewest_seconds / slowest), _FEWEST_TIMED_STEPS), MOST_STEPS)


_TRIAL_SECONDS = 1.0  # of steps as replicas
_SECONDS = 3.0  # of measured steps, within these numbers
_FEWEST_STEPS, _MOST_STEPS = 4, 24


@dataclasses.dataclass(frozen=True)
class SessionMeasure:
    """The `Measure` of a planner, by trial sessions.

    Attributes:
        devices: All devices of the job, by rank.
    """

    job: JobContext
    devices: tuple[jax.Device, ...]

    def microbatch_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica."""
        options = SessionOptions(balance=self.job.settings.balance, is_trial=True)
        with Session(self.job, plan, self.devices, options) as trial:
            return trial.running_plan.balancer.seconds

    def split_sizes(self, plan: Plan) -> TriedSizes | None:
        """Sizes of an uneven split by the measured work of its devices; None without CPU times.

        If the sizes stay, training uses the compiled programs.
        """
        job, devices = self.job, self.devices
        processes = {rank: process_of(devices[rank]) for r in plan.replicas for rank in r.devices}
        if not has_clocks(plan, job.cluster(devices), processes):
            return None
        batch = job.first_batch(0, plan.batch_size)
        with Session(job, plan, devices, SessionOptions(is_trial=True)) as trial:
            for _ in range(FIRST_MEASURED):
                seconds = trial.step(batch).seconds
            slowest = max(map(float, job.gather("step of a trial", str(seconds))))
            num = math.ceil(_SECONDS / slowest)
            for _ in range(min(max(num, _FEWEST_STEPS), _MOST_STEPS)):
                trial.step(batch)
            work = trial.running_plan.split.measured()
        assert work is not None
        [axis] = plan.axes
        worked = ", ".join(
            f"{name} worked {busy / work.step_seconds:.0%}"
            for name, busy in zip(work.names, work.work_seconds, strict=True)
        )
        shares = work.better_shares or axis.shares
        mesh = {"data": len(plan.replicas), axis.name: shares}
        ratio = ":".join(map(str, axis.shares))
        return TriedSizes(
            shares=work.better_shares,
            reason=f"in {work.num_steps} steps of a trial with {ratio} over {axis.name} {worked} "
            f"of the time, so sizes {'move' if work.better_shares else 'stay'}: pass mesh={mesh} "
            "to get the same bits where a trial would tell otherwise",
        )

    def segment_seconds(
        self, cluster: Cluster, size: int, num_segments: int, sums: SumsForm
    ) -> Mapping[int, np.ndarray]:
        """Seconds [2, L] of the forwards and backwards of segments on each device, by rank."""
        local = {}
        for rank, device in enumerate(self.devices):
            if is_here(device):
                setting = Setting(cluster.devices[rank].label, size)
                measured = segment_profile(self.job, setting, num_segments, device, sums)
                local[rank] = [(t.forward, t.backward) for t in measured.times[setting]]
        times: dict[int, np.ndarray] = {}
        for text in self.job.gather("segments", json.dumps(local)):
            times |= {int(rank): np.array(rows).T for rank, rows in json.loads(text).items()}
        return times

    def profile(
        self, cluster: Cluster, sizes: Sequence[int], num_segments: int, sums: SumsForm
    ) -> Profile:
        """Times of the job's segments on each kind of device, of its training, and of its links."""
        job, devices = self.job, self.devices
        profile = short_profile(job, cluster, devices, sizes, num_segments, sums)
        usual = default_sizes(job.batch_size, 1)[0]
        size = usual if usual in sizes else sizes[len(sizes) // 2]
        try:
            request = PlanRequest(microbatch_size=size)
            plan = plan_for(workloads(job), request, cluster, sums, self)
        except PlanError:  # no device has room for a whole replica
            return profile
        if plan.axes:
            return profile
        batch = job.first_batch(0, plan.batch_size)
        trial = run_trial(job, plan, devices, batch=batch, fewest_seconds=_TRIAL_SECONDS)
        labels = [device.label for device in cluster.devices]
        # Each process has clocked its steps; all need one profile.
        return everywhere(job, in_training(profile, trial.by_kind(labels), labels, size))

    def compiled_lack(self, plan: Plan, cluster: Cluster) -> float:
        """The most bytes that a device lacks for a plan's compiled programs and their inputs.

        Returns:
            Bytes, equal on every process; at most 0 if the programs fit.
        """
        programs = self.job.programs(plan, self.devices, lambda _: None, keep=True)
        inputs = self.job.batch_bytes(plan.microbatch_size)
        lack, _ = largest_lack(needed_bytes(programs, plan, programs.state_bytes, inputs), cluster)
        return max(map(float, self.job.gather("bytes of the programs", str(lack))))

    def agree(self, plan: Plan) -> None:
        """Stop if processes have made different plans."""
        self.job.agree("a plan of the search", lambda: facts_of_plan(plan))


def in_training(
    profile: Profile, trial: ObservedSteps, labels: Sequence[str], size: int
) -> Profile:
    """Times of segments alone, as in a trial of replicas of one device each.

    A microbatch in training takes longer than its segments alone, by calls of programs and by the
    sums of its gradients. Neither depends on its size, so every size takes the same seconds more.

    Args:
        trial: Its times by kind of device.
        labels: The kind of each device.
        size: Examples of a microbatch in the trial.
    """
    alone = {
        setting: sum(t.forward + t.backward for t in times)
        for setting, times in profile.times.items()
    }
    times = dict(profile.times)
    spent = zip(trial.micro_seconds, trial.update_seconds, strict=True)
    by_kind = dict(zip(labels, spent, strict=True))
    rest = trial.rest_seconds
    for setting, layers in profile.times.items():
        micro, update = by_kind[setting.kind]
        before = alone[Setting(setting.kind, size)]
        if not micro or not before:
            continue  # a device without microbatches
        more = micro - before
        factor = 1 + more / alone[setting] if more > 0 else micro / before
        if len(labels) == 1:
            update += rest
        planned = sum(t.update for t in layers) or 1.0
        times[setting] = tuple(
            dataclasses.replace(
                t,
                forward=t.forward * factor,
                backward=t.backward * factor,
                update=t.update * update / planned,
            )
            for t in layers
        )
    sums = {together_key(labels): rest} if len(labels) > 1 else {}
    return dataclasses.replace(
        profile, times=times, reductions={**profile.reductions, **sums}, form=trial.form
    )

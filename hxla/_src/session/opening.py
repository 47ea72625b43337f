"""A session's opening: compiled programs, the first state, and the speed of every replica.

The local replica gets the fastest number of executors.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable

import numpy as np

from ..choose.microbatch_counts import lack, pooled, shared_numbers, with_executors
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..core.config import Config
from ..core.types import PyTree
from ..jax.devices import is_here, keep_heap_small
from ..job.agreement import facts_of_data
from ..job.context import JobContext
from ..launch.channel import own_member
from ..lower.lower import Programs
from ..lower.store import Store
from ..plan.plan import Plan
from .ending import Termination
from .member import SessionMember, rehearse
from .saved_state import RestoreSource
from .step import Stepper
from .validate_plan import agree_on_asked, check_runnable
from .values import SessionOptions

_REPEATS = 5
_MOST_OF_WORK = 1 / 20  # largest share of the remaining work for trials
_LONG_SECONDS = 0.1  # of a run in which adding the sums of executors is negligible


def with_fastest_executors(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    min_gain: float,
    num_steps: int,
) -> tuple[Plan, list[float]]:
    """Double the executors of the local replica while microbatches become faster.

    Every process of a job must call this. A plan with several executors stays.

    Args:
        stepper: A warm one, which then uses the fastest number.
        seconds: Of a microbatch on each local replica.
        min_gain: Relative gain in seconds that a doubling must reach.
        num_steps: Remaining steps; trials take at most a twentieth of their work.

    Returns:
        The plan with the fastest number of executors on each replica, and their seconds.
    """
    if any(r.executors > 1 for r in plan.replicas):
        return plan, seconds
    best, most, num = plan, _most_executors(programs), 1
    budget = _MOST_OF_WORK * num_steps * max(plan.counts)
    min_microbatches = math.ceil(_LONG_SECONDS / max(seconds[0], 1e-9))
    while 2 * num <= most:
        num *= 2
        at_once = min(max(2 * num, min_microbatches), max(plan.counts))
        budget -= 2 * _REPEATS * at_once
        if budget < 0:
            break
        more = with_executors(plan, (num,) * len(plan.replicas))
        timed = functools.partial(stepper.seconds_of_microbatches, 0, batch, at_once)
        before = timed(repeats=_REPEATS, apart=True)
        stepper.use_executors(more.replicas)
        after = timed(repeats=_REPEATS, apart=True)
        if not np.median(after) < (1 - min_gain) * np.median(before):
            stepper.use_executors(best.replicas)
            break
        best, seconds = more, [float(np.median(after))]
    local = programs.reducer.local
    executors = shared_numbers(programs.reducer, [best.replicas[r.index].executors for r in local])
    return with_executors(plan, tuple(map(int, executors))), seconds


def seconds_of_replicas(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    settings: Config,
    num_steps: int | None,
) -> tuple[Plan, tuple[float, ...]]:
    """The plan with the executors of the settings, and seconds of a microbatch on each replica.

    Args:
        seconds: Of a microbatch on each local replica.
        num_steps: Remaining steps; None: not known.
    """
    if settings.cluster.executors == "auto" and num_steps is not None:
        gain = settings.balance.min_gain
        plan, seconds = with_fastest_executors(
            stepper, programs, plan, batch, seconds, gain, num_steps
        )
    return plan, pooled(shared_numbers(programs.reducer, seconds), plan)


def _most_executors(programs: Programs) -> int:
    """The largest useful number of executors: the cores of a single CPU device.

    A GPU runs the programs of a process one after another.
    """
    plan, local = programs.plan, programs.reducer.local
    has_others = plan.axes or plan.chain is not None or plan.placement.zero > 1
    if len(local) != 1 or has_others or plan.sums.kind != "exact":
        return 1
    if local[0].devices[0].platform != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), max(plan.counts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """What a session steps with.

    Attributes:
        plan: The plan with the measured executors, if counts follow the devices.
        source: The checkpoints, and the state with which the session begins.
        member: The elastic part of the session; None: it is not elastic.
        first_batch: The examples whose shapes the programs are compiled for.
        inputs: `first_batch` as programs take it.
        seconds: Of a microbatch on each replica; None: not measured.
        memory_bytes: Of one device, for its state, its sums and the largest of its programs.
        waits_for_saves: Whether training waits for a checkpoint, because memory is scarce.
    """

    plan: Plan
    cluster: Cluster
    programs: Programs
    store: Store
    stepper: Stepper
    source: RestoreSource
    member: SessionMember | None
    first_batch: PyTree
    inputs: PyTree
    seconds: tuple[float, ...] | None
    memory_bytes: int
    waits_for_saves: bool


def opened_session(
    job: JobContext,
    plan: Plan,
    devices: Devices,
    options: SessionOptions,
    termination: Termination,
    stack: contextlib.ExitStack,
    tell: Callable[[str], None],
) -> Opened:
    """Compile a plan's programs, put the state in its places and run everything once.

    Every process must call this. An elastic session compiles before its generation is formed.
    """
    cluster = job.cluster(devices)
    agree_on_asked(plan, job, options)
    check_runnable(plan, job, cluster, devices)
    on_cpu = any(d is not None and is_here(d) and d.platform == "cpu" for d in devices)
    is_tight = on_cpu and plan.placement.sums == "released"
    if is_tight:
        keep_heap_small()
    own = own_member() if not options.is_trial and options.steps is not None else None
    make_source = functools.partial(RestoreSource, job, plan, options, stack, is_tight=is_tight)
    source = make_source() if own is None else None
    start = options.first_step if source is None else source.first_step
    resumed = None if source is None else source.step
    inputs = job.as_inputs(batch := job.first_batch(start, plan.microbatch_size))
    job.agree("data", lambda: facts_of_data(batch, f"data of step {start + 1}: "))
    weights = job.opened_weights(plan.microbatch_size) if resumed is None else None
    stack.enter_context(job.functional(plan.microbatch_size).in_host_memory())
    programs = job.programs(plan, devices, tell, keep=options.is_trial)
    store = programs.store()
    stack.callback(store.close)
    tell("putting the state in its places")
    if source is None or not source.load(store):
        store.initialise(job.gather, weights)
    tell("running every program once")
    stepper = Stepper(programs, store)
    stack.callback(stepper.close)
    stepper.use_executors(plan.replicas)
    repeats = 3 if options.balance else 0
    times = stepper.warm_up(inputs, repeats=repeats, has_scales=resumed is not None)
    seconds, member = None, None
    if options.balance:
        num_left = None if options.steps is None else options.steps - start
        parts = stepper, programs, plan, inputs, times
        plan, seconds = seconds_of_replicas(*parts, job.settings, num_left)
    if own is not None:
        rehearse(own, store, job)
        tell("waiting for the generation to be formed")
        source = make_source(folders=own.wait_for_the_others())
        if source.load(store):
            stepper.scales.restored()
        member = SessionMember(own, store, termination, job, source)
    assert source is not None  # made in one of the two branches
    state_bytes = store.num_bytes()
    memory_bytes = programs.memory_bytes(state_bytes)
    return Opened(
        plan=plan,
        cluster=cluster,
        programs=programs,
        store=store,
        stepper=stepper,
        source=source,
        member=member,
        first_batch=batch,
        inputs=inputs,
        seconds=seconds,
        memory_bytes=memory_bytes,
        waits_for_saves=on_cpu and lack(devices, cluster, state_bytes + memory_bytes),
    )

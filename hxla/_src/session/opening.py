"""A session's opening: compiled programs, the first state, and the speed of every replica."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from ..choose.microbatch_counts import lack
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..core.types import PyTree
from ..jax.devices import is_here, keep_heap_small
from ..job.agreement import facts_of_data
from ..job.context import JobContext
from ..launch.member import own_member
from ..lower.lower import Programs
from ..lower.store import Store
from ..plan.plan import Plan
from .ending import Termination
from .fastest_executors import seconds_of_replicas
from .member import SessionMember, rehearse
from .restore import RestoreSource
from .step import Stepper
from .validate_plan import agree_on_asked, check_runnable
from .values import SessionOptions


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

    Args:
        stack: Closes what is opened.
        tell: Called with what begins.
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

"""The plan that a session runs: its counts follow the balancer, its prediction measured times."""

from collections.abc import Sequence

from ..choose.apportionment import best_counts
from ..choose.microbatch_counts import check_limits, count_limits, predicted, shared_numbers
from ..core.config import BalanceConfig
from ..job.context import JobContext
from ..lower.lower import Programs
from ..plan.plan import Plan
from ..report.history import StepRecord
from .balancer import Balancer
from .opening import Opened
from .recorder import Recorder
from .step import Outcome
from .values import SessionOptions
from .watch import PipelineWatch, SplitWatch


class RunningPlan:
    """The present plan of a session.

    Attributes:
        plan: The plan of the next step.
        plans: The plans that ran, and the present one, by their first step.
        balancer: Moves counts, and has the measured times.
        pipelines: Compares pipelines with their prediction.
        split: Compares an uneven split with its prediction.
        memory_bytes: Of one device of this process.

    Raises:
        PlanError: If a device has no memory for its counts.
    """

    def __init__(self, opened: Opened, job: JobContext, options: SessionOptions):
        programs, plan = opened.programs, opened.plan
        self._cluster, self._is_late = opened.cluster, opened.stepper.is_late
        self._is_moved = options.balance is not None
        self.memory_bytes = opened.memory_bytes
        local_bytes = [opened.memory_bytes] * len(programs.reducer.local)
        self._replica_bytes = shared_numbers(programs.reducer, local_bytes)
        sizes = self._replica_bytes, opened.inputs, programs.most_inputs
        limits = count_limits(plan, self._cluster, *sizes)
        moves = options.balance or job.settings.balance
        self.plan, self.balancer = _balanced(plan, moves, limits, opened.seconds)
        self.pipelines = PipelineWatch(opened.stepper, programs, job.gather)
        notes = _unplanned_gathers(programs)
        notes += self.pipelines.measure(opened.inputs, self.plan)
        self.plan = self._predicted(self.plan).replaced(reasons=(*plan.reasons, *notes))
        self.split = SplitWatch(programs, self._cluster, job)
        self.plans = opened.source.plans | {opened.source.first_step: self.plan}
        self._counts_before = self.plan.counts

    def stepped(self, record: StepRecord, outcome: Outcome, recorder: Recorder) -> None:
        """Learn the times of a step, and perhaps move counts; records what follows."""
        change, before = None, self._counts_before
        self._counts_before = self.plan.counts
        if self._is_moved and any(outcome.busy_seconds):
            counts = before if self._is_late else self.plan.counts
            seconds_of = outcome.busy_seconds, outcome.update_seconds
            change = self.balancer.observe(record.step - 1, *seconds_of, counts=counts)
        # Without a change, a parked device may be tried for one step.
        if change is not None or self.balancer.counts != self.plan.counts:
            self.plan = self._predicted(self.plan.with_counts(self.balancer.counts))
        if change is not None:
            self.plans[change.step] = self.plan
            recorder.rebalanced(change)
        if advice := self.split.stepped():
            recorder.log(f"step {record.step}: {advice}")
        if (settled := self.balancer.stepped(record.seconds)) is not None:
            recorder.settled(settled)

    def predict(self) -> None:
        """Predict the step anew, by the times that are known now."""
        self.plan = self._predicted(self.plan)

    def _predicted(self, plan: Plan) -> Plan:
        prediction = predicted(
            plan,
            self.balancer.seconds,
            self.balancer.fixed,
            memory_bytes=self._replica_bytes,
            cluster=self._cluster,
        )
        return plan.replaced(prediction=self.pipelines.predicted(prediction))


def _balanced(
    plan: Plan,
    config: BalanceConfig,
    limits: Sequence[int | None],
    seconds: Sequence[float] | None,
) -> tuple[Plan, Balancer]:
    """A plan with the counts with which its session begins, and what moves them.

    Args:
        limits: Most microbatches of each device; None for no limit.
        seconds: Seconds of a microbatch on each device; None if not measured.

    Raises:
        PlanError: If a device has no memory for its counts.
    """
    counts = plan.counts
    if seconds is not None:
        counts = best_counts(plan.num_microbatches, seconds, None, limits)
    check_limits(counts, limits)
    balancer = Balancer(config, counts, limits, seconds)
    return plan if counts == plan.counts else plan.with_counts(counts), balancer


def _unplanned_gathers(programs: Programs) -> tuple[str, ...]:
    if programs.sharded is None:
        return ()
    from ..inspect.unplanned_gathers import unplanned_gathers  # a reader of XLA's text

    return unplanned_gathers(programs)

"""SessionMeasure of a plan: some steps of training on its devices, of which nobody is told."""

import math

import jax

from ..choose.measure import TriedSizes
from ..jax.devices import process_of
from ..job.context import JobContext
from ..plan.plan import Plan
from .session import Session
from .values import SessionOptions
from .watch import FIRST_MEASURED, has_clocks

_SECONDS = 3.0  # that are measured, in so many steps
_FEWEST_STEPS, _MOST_STEPS = 4, 24


class SessionMeasure:
    """Sessions that measure a plan: see `Measure`."""

    def microbatch_seconds(
        self, job: JobContext, plan: Plan, devices: tuple[jax.Device, ...]
    ) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica."""
        options = SessionOptions(balance=job.settings.balance, is_trial=True)
        with Session(job, plan, devices, options) as trial:
            return trial.balancer.seconds

    def split_sizes(
        self, job: JobContext, plan: Plan, devices: tuple[jax.Device, ...]
    ) -> TriedSizes | None:
        """Sizes of a split by how long its devices work with those that are estimated.

        Programs that were compiled for it serve the training, if the sizes stay.
        """
        holders = {rank: process_of(devices[rank]) for r in plan.replicas for rank in r.devices}
        if not has_clocks(plan, job.cluster(devices), holders):
            return None
        batch = job.first_batch(0, plan.batch_size)
        with Session(job, plan, devices, SessionOptions(is_trial=True)) as trial:
            for _ in range(FIRST_MEASURED):
                seconds = trial.step(batch).seconds
            slowest = max(map(float, job.gather("step of a trial", str(seconds))))
            num = math.ceil(_SECONDS / slowest)
            for _ in range(min(max(num, _FEWEST_STEPS), _MOST_STEPS)):
                trial.step(batch)
            work = trial.split_watch.measured()
        assert work is not None
        [axis] = plan.axes
        told = ", ".join(
            f"{name} worked {own / work.step_seconds:.0%}"
            for name, own in zip(work.names, work.work_seconds, strict=True)
        )
        shares = work.better_shares or axis.shares
        mesh = {"data": len(plan.replicas), axis.name: shares}
        ratio = ":".join(map(str, axis.shares))
        return TriedSizes(
            shares=work.better_shares,
            reason=f"in {work.num_steps} steps of a trial with {ratio} over {axis.name} {told} of "
            f"the time, so sizes {'move' if work.better_shares else 'stay'}: pass mesh={mesh} to "
            "get the same bits where a trial would tell otherwise",
        )

"""Plans measured on the devices that are here: compiled, and trained for some untold steps."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ..choose.measure import TriedSizes
from ..choose.memory_model import tightest
from ..choose.short_profile import measured_link, segment_profile, short_profile
from ..cluster.cluster import Cluster, Link
from ..jax.devices import is_here, process_of
from ..job.agreement import facts_of_plan
from ..job.context import JobContext
from ..plan.parts import SumsForm
from ..plan.plan import Plan
from ..profile.profile import Profile, Setting
from .session import Session
from .values import SessionOptions
from .watch import FIRST_MEASURED, has_clocks

_SECONDS = 3.0  # that are measured, in so many steps
_FEWEST_STEPS, _MOST_STEPS = 4, 24


@dataclasses.dataclass(frozen=True)
class SessionMeasure:
    """Sessions that measure plans: see `Measure`.

    Attributes:
        devices: All devices of the job, by rank.
    """

    job: JobContext
    devices: tuple[jax.Device, ...]

    def microbatch_seconds(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of a microbatch on each replica."""
        options = SessionOptions(balance=self.job.settings.balance, is_trial=True)
        with Session(self.job, plan, self.devices, options) as trial:
            return trial.balancer.seconds

    def split_sizes(self, plan: Plan) -> TriedSizes | None:
        """Sizes of a split by how long its devices work with those that are estimated.

        Programs that were compiled for it serve the training, if the sizes stay.
        """
        job, devices = self.job, self.devices
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

    def segment_seconds(
        self, cluster: Cluster, size: int, num_segments: int, sums: SumsForm
    ) -> Mapping[int, np.ndarray]:
        """[2, L] Seconds of the segments' forwards and backwards on each device, by rank."""
        own = {}
        for rank, device in enumerate(self.devices):
            if is_here(device):
                setting = Setting(cluster.devices[rank].label, size)
                found = segment_profile(self.job, setting, num_segments, device, sums)
                own[rank] = [(t.forward, t.backward) for t in found.times[setting]]
        times: dict[int, np.ndarray] = {}
        for text in self.job.gather("segments", json.dumps(own)):
            times |= {int(rank): np.array(rows).T for rank, rows in json.loads(text).items()}
        return times

    def profile(
        self, cluster: Cluster, sizes: Sequence[int], num_segments: int, sums: SumsForm
    ) -> Profile:
        """Times of the job's segments on each kind of device."""
        return short_profile(self.job, cluster, self.devices, sizes, num_segments, sums)

    def link(self) -> Link:
        """A link like the slowest between neighbours while all of them hand on at once."""
        return measured_link(self.job, self.devices)

    def compiled_lack(self, plan: Plan, cluster: Cluster) -> float:
        """The most bytes that a device lacks for a plan's compiled programs and their inputs.

        Returns:
            The same on every process; 0 or less: they fit.
        """
        programs = self.job.programs(plan, self.devices, lambda _: None, keep=True)
        needed = programs.memory_bytes(programs.state_bytes)
        needed += programs.most_inputs * self.job.batch_bytes(plan.microbatch_size)
        lacks = []
        for replica in programs.reducer.local:
            rank = tightest(cluster, plan.replicas[replica.index])
            room = cluster.devices[rank].memory_bytes
            lacks.append(needed - (math.inf if room is None else room))
        return max(map(float, self.job.gather("bytes of the programs", str(max(lacks)))))

    def agree(self, plan: Plan) -> None:
        """Refuse to go on where processes have made different plans."""
        self.job.agree("a plan of the search", lambda: facts_of_plan(plan))

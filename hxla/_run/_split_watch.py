"""How long each device of a split works in a step, and what better sizes would be.

Devices of a copy wait for each other inside its programs, so the seconds of a step say nothing of
one of them. What does is the processor time of a process that has one device and a share of a core.
An accelerator has no such clock: there nothing is said.
"""

import json
import time
from collections.abc import Mapping, Sequence

import jax

from .._cluster._cluster import Cluster
from .._jax._local_clients import process_of
from .._lower._lower import Programs
from .._plan._plan import Plan
from .._planner._inner_split import state_factor
from .._planner._split_advice import BetterShares, better_shares
from .._report._history import SplitWork
from ._traced_job import TracedJob

FIRST_MEASURED = 2  #: Steps before are left out: they may compile, and load.
_ADVISED_AFTER = 8  # steps that were measured


def has_clocks(plan: Plan, cluster: Cluster, process_of: Mapping[int, int]) -> bool:
    """Whether the devices of a split each have a clock that tells work from waiting.

    Args:
        plan: Of the split.
        cluster: Its devices.
        process_of: For each rank of the plan the process that has it. All of this is known to all
            processes, so that each decides alike.
    """
    return (
        plan.pipeline is None
        and len(plan.axes) == 1
        and len(set(process_of.values())) == len(process_of)
        and all(cluster.devices[rank].core_share is not None for rank in process_of)
    )


class SplitWatch:
    """Nothing at all in a session without a split over processes that have a share of a core each.

    Args:
        programs: Of the session.
        cluster: Its devices.
        job: That is trained.
    """

    def __init__(self, programs: Programs, cluster: Cluster, job: TracedJob):
        self._programs, self._cluster, self._job = programs, cluster, job
        self._plan = programs.plan
        replicas = zip(self._plan.replicas, programs.reducer.replicas, strict=True)
        #: Rank of each device, and the process that has it.
        self._process = {
            rank: process_of(device)
            for planned, replica in replicas
            for rank, device in zip(planned.devices, replica.devices, strict=True)
        }
        self._is_on = has_clocks(self._plan, cluster, self._process)
        self._num_seen = 0
        self._begun = self._cpu_begun = 0.0

    def stepped(self) -> str:
        """Take in that a step is done; returns what to say of the sizes, mostly nothing."""
        if not self._is_on:
            return ""
        self._num_seen += 1
        if self._num_seen == FIRST_MEASURED:
            self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
        if self._num_seen != FIRST_MEASURED + _ADVISED_AFTER:
            return ""
        found = self.measured()
        return found.advice if found is not None else ""

    def measured(self) -> SplitWork | None:
        """What all devices worked since; every process calls this at the same time."""
        num_steps = self._num_seen - FIRST_MEASURED
        if not self._is_on or num_steps < 1:
            return None
        seconds = (time.perf_counter() - self._begun) / num_steps
        cpu = (time.process_time() - self._cpu_begun) / num_steps
        texts = self._job.gather("work of a split", json.dumps([jax.process_index(), seconds, cpu]))
        told = {process: own for process, *own in map(json.loads, texts)}
        work = {}
        for rank, process in self._process.items():
            share = self._cluster.devices[rank].core_share
            assert share is not None
            work[rank] = told[process][1] / share
        step = max(wall for wall, _ in told.values())
        places = zip(*(r.devices for r in self._plan.replicas), strict=True)
        slowest = [max(work[rank] for rank in own) for own in places]
        better = self._better(slowest)
        return SplitWork(
            num_steps=num_steps,
            step_seconds=step,
            names=tuple(f"device {rank}" for rank in sorted(work)),
            work_seconds=tuple(work[rank] for rank in sorted(work)),
            better_shares=() if better is None else better.shares,
            advice="" if better is None else self._in_words(better, slowest, step),
        )

    def _better(self, slowest: Sequence[float]) -> BetterShares | None:
        programs, plan = self._programs, self._plan
        assert programs.sharded is not None
        optimizer_bytes = self._job.optimizer_bytes(plan.microbatch_size)
        factor = state_factor(programs.graph, optimizer_bytes, plan.sums)
        found = better_shares(
            programs.graph, programs.sharded, plan, self._cluster, slowest, factor
        )
        least = self._job.settings.balance.min_gain
        return found if found is not None and found.gain >= least else None

    def _in_words(self, better: BetterShares, slowest: Sequence[float], step: float) -> str:
        [axis] = self._plan.axes
        now = ", ".join(f"place {k} works {s / step:.0%}" for k, s in enumerate(slowest))
        mesh = {"data": len(self._plan.replicas), axis.name: better.shares}
        return (
            f"of a step, {now}: with mesh={mesh} the slowest would work "
            f"{1 - 1 / (1 + better.gain):.0%} less. That is another plan, with other bits: a "
            "checkpoint resumes with it"
        )

"""The microbatches of a session's steps, for the copies of the model that are here."""

import itertools
from collections.abc import Sequence

from .._core._types import PyTree
from .._plan._plan import Plan
from ._agreement import facts_of_data
from ._data import Loader, cut_batch
from ._traced_job import TracedJob


class Feed:
    """Loads the job's data ahead of the step, or cuts batches that the user has.

    Args:
        job: That is trained.
        first: Arrays of the first examples of the data, as programs are compiled for them.
        num_steps: Of the run; None: not known.
    """

    def __init__(self, job: TracedJob, first: PyTree, num_steps: int | None):
        self._job, self._first = job, first
        self._num_steps = num_steps if num_steps is not None else 1 << 62
        self._loader: Loader | None = None

    def close(self) -> None:
        """End the thread that loads."""
        if self._loader is not None:
            self._loader.close()

    def loaded(self, step: int, ids: Sequence[range], plan: Plan) -> list[list[PyTree]]:
        """Those of the job's data.

        Raises:
            DataError: And whatever else the user's data raises.
        """
        if self._loader is None:
            self._loader = Loader(
                self._job.source,
                microbatch_size=plan.microbatch_size,
                num_steps=self._num_steps,
                depth=self._job.settings.data.prefetch_steps,
            )
        loaded = iter(self._loader.get(step, list(itertools.chain(*ids))))
        return [[next(loaded) for _ in own] for own in ids]

    def given(
        self, batch: PyTree, step: int, ids: Sequence[range], plan: Plan, *, compares: bool
    ) -> list[list[PyTree]]:
        """Those of a global batch of the user's own.

        Args:
            batch: The same on every process.
            step: That it is for.
            ids: Of the microbatches of each local copy.
            plan: That runs.
            compares: Whether processes compare what they were given.

        Raises:
            DataError: If it is malformed, or other than the job's data.
            LaunchError: If processes were given other batches than one another.
        """
        found = cut_batch(batch, ids, plan, f"the batch of step {step}", self._first)
        if compares:
            self._job.agree("batch", lambda: facts_of_data(batch, f"batch of step {step}: "))
        return found

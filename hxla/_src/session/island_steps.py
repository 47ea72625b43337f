"""When a run of islands has one state: after a meeting, and not between two."""

import numpy as np

from ..core.errors import ConfigError
from ..core.format import plural
from ..launch.channel import own_member
from ..lower.lower import Programs
from ..lower.store import Store
from ..plan.parts import Islands
from ..plan.plan import Plan
from .step import Stepper
from .values import Every, SessionOptions

_MOST_STEPS = 10_000  # looked through for a period's first step


def check_options(plan: Plan, options: SessionOptions) -> None:
    """Refuse a session whose checkpoints, end or members need a state between two meetings.

    Raises:
        ConfigError: With the argument and a value that fits.
    """
    islands = plan.islands
    if islands is None:
        return
    if options.steps is not None and own_member() is not None:
        raise ConfigError(
            "islands do not run under hxla run --elastic: a process that leaves takes its island's "
            "steps with it. Leave out --elastic, or islands"
        )
    every, steps, counts = islands.every, options.steps, islands.counts(plan.counts)
    if options.balance is None and not all(counts):
        raise ConfigError(
            f"counts: the islands have {'+'.join(map(str, counts))} microbatches in a step, and "
            "each needs one"
        )
    if steps is not None and not islands.meets(steps):
        raise ConfigError(
            f"steps={steps}: the islands meet every {plural(every, 'step')}, and a run ends with a "
            f"meeting: use {max(1, steps // every) * every} or {(steps // every + 1) * every}"
        )
    check_period(islands, "checkpoint_every", options.checkpoint_every, steps)


def check_period(islands: Islands, name: str, period: Every | None, steps: int | None) -> None:
    """Refuse a period that is due between two meetings; by the clock, it waits for the next.

    Raises:
        ConfigError: With the period and one that fits.
    """
    if period is None or period.seconds is not None:
        return
    every = islands.every
    last = min(steps or _MOST_STEPS, _MOST_STEPS)
    wrong = next((s for s in range(1, last + 1) if period.is_due(s) and s % every), None)
    if wrong is not None:
        raise ConfigError(
            f"{name}: it is due after step {wrong}, and the islands meet every "
            f"{plural(every, 'step')}: use a multiple of {every}"
        )


class IslandSteps:
    """The meetings of a session.

    Args:
        first_step: The updates done when the session begins, with one state.
    """

    def __init__(self, programs: Programs, store: Store, stepper: Stepper, first_step: int):
        self._islands, self._meetings = programs.plan.islands, programs.meetings
        self._store, self._stepper = store, stepper
        self._first = self._step = first_step
        self._local = programs.reducer.local
        self._counts = programs.plan.counts
        self.use_counts(self._counts)
        if self._meetings is not None:
            self._meetings.begin(store.held)
            self._meetings.compile(store.held)

    def use_counts(self, counts: tuple[int, ...]) -> None:
        """Tell the sums how many microbatches each replica runs in a step."""
        self._counts = counts
        if self._islands is not None:
            bounds = np.cumsum([0, *self._islands.counts(counts)]).astype(np.int32)
            self._stepper.bounds = [(replica.put(bounds),) for replica in self._local]

    def begin(self) -> None:
        """Begin anew from a state that is equal everywhere."""
        if self._meetings is not None:
            self._meetings.begin(self._store.held)

    def updated(self, step: int) -> None:
        """Meet, if it is time after a number of updates; every process calls this."""
        self._step = step
        if self._islands is not None and self._islands.meets(step):
            assert self._meetings is not None
            self._meetings.meet(self._store.held, self._islands.counts(self._counts))

    @property
    def are_one(self) -> bool:
        """Whether there is one state now, and not one of each island."""
        return self._islands is None or self._step == self._first or self._islands.meets(self._step)

    def check(self, what: str) -> None:
        """Refuse to use the state between two meetings.

        Raises:
            ConfigError: With the step of the next meeting.
        """
        if self.are_one:
            return
        assert self._islands is not None
        every = self._islands.every
        raise ConfigError(
            f"{what} after step {self._step}: the islands have parameters of their own until they "
            f"meet after step {(self._step // every + 1) * every}: do it then, when step % {every} "
            "is 0"
        )

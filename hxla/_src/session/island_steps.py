"""When a run of islands has one state: after a meeting, and not between two."""

import itertools
import math
from collections.abc import Iterable

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
        fits = sorted({max(1, steps // every) * every, (steps // every + 1) * every})
        raise ConfigError(
            f"a run of {plural(steps, 'step')} ends between two meetings of the islands, which "
            f"meet every {plural(every, 'step')}: pass steps={' or steps='.join(map(str, fits))}"
        )
    check_meets(islands, "checkpoint_every", options.checkpoint_every, steps)


def check_meets(islands: Islands, name: str, period: Every | None, steps: int | None) -> None:
    """Refuse a period that is due between two meetings; by the clock, it waits for the next.

    Raises:
        ConfigError: With the period and one that fits.
    """
    due: Iterable[int] = ()
    if period is not None and period.steps is not None:
        due = [period.steps]
    elif period is not None and period.epochs is not None:
        last = math.inf if steps is None else steps
        due = itertools.takewhile(lambda step: step <= last, period.epochs.ends())
    wrong = next((step for step in due if not islands.meets(step)), None)
    if wrong is not None:
        raise ConfigError(
            f"{name}: it is due after step {wrong}, and the islands meet every "
            f"{plural(islands.every, 'step')}: use a multiple of {islands.every}"
        )


class IslandSteps:
    """The meetings of a session.

    Attributes:
        are_one: Whether there is one state now, and not one of each island.
    """

    def __init__(self, programs: Programs, store: Store, stepper: Stepper, first_step: int):
        self._meetings, self._local = programs.meetings, programs.reducer.local
        self._store, self._stepper, self._step = store, stepper, first_step
        self._counts: tuple[int, ...] = ()
        self.are_one = True
        self.use_counts(programs.plan.counts)
        self.begin()
        if self._meetings is not None:
            self._meetings.compile(store.outer, store.held)

    def use_counts(self, counts: tuple[int, ...]) -> None:
        """Tell the sums how many microbatches each replica runs in a step."""
        if self._meetings is not None:
            self._counts = self._meetings.islands.counts(counts)
            bounds = np.cumsum([0, *self._counts]).astype(np.int32)
            self._stepper.bounds = [(replica.put(bounds),) for replica in self._local]

    def begin(self, *, anew: bool = False) -> None:
        """Begin from a state that is equal everywhere.

        Args:
            anew: Whether without momentum.
        """
        if self._meetings is not None:
            if anew:
                self._store.outer.momenta = []
            self._meetings.begin(self._store.outer, self._store.held)

    def updated(self, step: int) -> None:
        """Meet, if it is time after a number of updates; every process calls this."""
        if self._meetings is None:
            return
        self._step, self.are_one = step, False
        if self._meetings.islands.meets(step):
            self._meetings.meet(self._store.outer, self._store.held, self._counts)
            self.are_one = True

    def check(self, what: str) -> None:
        """Refuse to use the state between two meetings.

        Raises:
            ConfigError: With the step of the next meeting.
        """
        if self.are_one or self._meetings is None:
            return
        every = self._meetings.islands.every
        raise ConfigError(
            f"{what} after step {self._step}: the islands have parameters of their own until they "
            f"meet after step {(self._step // every + 1) * every}: do it then, when step % {every} "
            "is 0"
        )

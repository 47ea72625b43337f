"""A session as a part of `hxla run --elastic`: it begins, stops and leaves as told."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._core._errors import CheckpointError
from .._core._format import num_bytes
from .._jax._lost_peers import is_lost_peer
from .._launch._member import Member, Pinned, pin
from .._lower._store import Store
from .._plan._plan import Plan
from ._checkpoints import Checkpoints
from ._hand_over import leave_state
from ._signals import Termination

#: What a process may ask of all: to end the run; to leave it, once a checkpoint is written; or to
#: leave it with the state in memory.
STOP, LEAVE, MOVE = 1.0, 2.0, 3.0


class SessionMember:
    """What a session of an elastic job does besides training.

    Args:
        member: This process in its generation.
        store: Holds the state.
        termination: Whether SIGTERM arrived.
        state_of_data: The position of the data before a step.
    """

    def __init__(
        self,
        member: Member,
        store: Store,
        termination: Termination,
        state_of_data: Callable[[int], str | None],
    ):
        self._state_of_data = state_of_data
        self._member, self._store, self._termination = member, store, termination
        self._facts: dict[str, Any] = {}
        self._step = 0

    @property
    def asks(self) -> float:
        """What this process asks of all."""
        return MOVE * self._member.stops or LEAVE * self._member.ends

    def warning(self) -> str:
        """What the user should know of the memory for states; empty if all is well."""
        folder = self._member.folder.rsplit("/", 1)[0]
        needed, free = self._store.num_bytes(), shutil.disk_usage(folder).free
        if needed <= free:
            return ""
        return (
            f"the state has {num_bytes(needed)} and {folder} only {num_bytes(free)}: without a "
            "checkpoint it is lost when devices change; enlarge /dev/shm"
        )

    @contextlib.contextmanager
    def training(self, step: int, facts: dict[str, Any], plan: Plan) -> Iterator[None]:
        """While the store holds a state that may be left at any time.

        Args:
            step: That comes next.
            facts: Of the run, which are left with the state.
            plan: That runs: later generations keep what decides its bits.
        """
        self._step, self._facts = step, facts
        pin(_chosen(plan))
        leave = functools.partial(self._leave, None)
        with self._member.trains(leave, lambda: self._termination.arrived):
            self._member.tell(is_joined=True, step=step, num_microbatches=plan.num_microbatches)
            yield

    @contextlib.contextmanager
    def updating(self, checkpoints: Checkpoints | None) -> Iterator[None]:
        """While the state is between two steps; then tells the authority."""
        with self._member.changing:
            yield
            self._step += 1
        saved = None if checkpoints is None or jax.process_index() else checkpoints.complete_step
        self._member.tell(step=self._step, saved_step=-1 if saved is None else saved)

    def move(self) -> None:
        """Leave the state in memory, every member at the same step."""
        step, digest = self._leave(self._store.gather)
        self._member.tell(left_step=step, digest=digest)

    def finished(self) -> None:
        """Training is done and its results are written."""
        self._member.tell(is_finished=True)

    def left_by(self, error: BaseException | None) -> None:
        """If another member was lost, wait for the order to leave the state."""
        if error is not None and jax.process_count() > 1 and is_lost_peer(error):
            self._member.stay_to_leave()

    def _leave(self, gather: Any) -> tuple[int, str]:
        if gather is None and self._store.is_shared and jax.process_count() > 1:
            raise CheckpointError("the state is shared out over the members, and one is gone")
        facts = self._facts | {"step": self._step, "data": self._state_of_data(self._step)}
        digest = leave_state(self._store.saved(), facts, self._member.folder, gather)
        return self._step, digest


def _chosen(plan: Plan) -> Pinned:
    size = plan.microbatch_size
    if plan.pipeline is not None:
        return Pinned(microbatch_size=size, cut=plan.pipeline.cut)
    if len(plan.axes) == 1:
        [axis] = plan.axes
        return Pinned(microbatch_size=size, shares=axis.shares or (1,) * axis.size)
    return Pinned(microbatch_size=size)

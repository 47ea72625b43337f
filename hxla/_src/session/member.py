"""A session in `hxla run --elastic`: it begins, stops and leaves by the authority's orders."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from ..checkpoint.hand_over import leave_state, state_part
from ..core.errors import CheckpointError, ConfigError
from ..core.format import num_bytes
from ..core.types import PyTree
from ..jax.coordination import is_lost_peer
from ..job.context import JobContext
from ..launch.channel import Member, pin
from ..launch.membership import copy_folder
from ..lower.store import Store
from ..model.functional import tree_bytes
from ..plan.plan import Plan
from .ending import LEAVE, MOVE, Termination
from .saved_state import RestoreSource, chosen

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints


_MOST_COPIES = 2  # of one process; a third waits until the first is removed
# States at one time: copies, the last state and the next generation's first copy; of a neighbour
# three of these.
_MOST_STATES, _MOST_OF_NEIGHBOURS = _MOST_COPIES + 2, _MOST_COPIES + 1
_WAIT_SECONDS = 0.01
_NOTE_CHARACTERS = 300


def rehearse(member: Member, store: Store, job: JobContext) -> None:
    """Compile the transfer of a state ahead, unless other members wait; all processes call this."""
    if not any(job.gather("who waits", "x" * member.is_waited_for)):
        store.load(store.saved())


class SessionMember:
    """The elastic part of a session: reports to the authority, copies and leaves the state.

    Raises:
        ConfigError: If copies are configured and memory has no room for them.
    """

    def __init__(
        self,
        member: Member,
        store: Store,
        termination: Termination,
        job: JobContext,
        source: RestoreSource,
    ):
        self._state_of_data, self._metadata = job.source.state, source.saved_metadata
        self._member, self._store, self._termination = member, store, termination
        self._facts: dict[str, Any] = {}
        self._step = 0
        self._every = job.settings.checkpoint.in_memory_every
        self._is_from_memory = source.is_in_memory
        self._copied: dict[int, str] = {}
        wanted = store.wanted()
        self._part = state_part(wanted, jax.process_index(), jax.process_count())
        self._needed = self._part.num_bytes(wanted) * member.num_neighbours
        if self._every is not None:
            if member.num_neighbours == jax.process_count():
                self._needed *= _MOST_STATES
            else:  # the first state comes from other hosts
                self._needed *= _MOST_STATES + _MOST_OF_NEIGHBOURS
                self._needed += tree_bytes(wanted)
            if words := self._shortage():
                raise ConfigError(
                    f"checkpoint.in_memory_every: {words}: enlarge it (mount -o remount,size=... "
                    "/dev/shm), or make no copies"
                )

    def request(self) -> float:
        """The request of this process to all."""
        return MOVE * self._member.stops or LEAVE * self._member.ends

    def notes(self) -> Iterator[str]:
        """Lines for the user about memory for states, and about the steps that a kill loses."""
        if words := self._shortage():
            yield f"{words}: without a checkpoint it is lost when devices change; enlarge /dev/shm"
        if self._every is not None:
            steps = "step" if self._every == 1 else f"{self._every} steps"
            yield (
                f"every {steps} the state is copied into memory, in {self._part.count} parts: no "
                "more is run again after a process is killed"
            )
        elif self._part.count > 1:
            yield (
                f"the state is in {self._part.count} parts: if a process is killed, the steps "
                "since the last checkpoint run again; see checkpoint.in_memory_every"
            )

    def _shortage(self) -> str:
        folder = os.path.dirname(self._member.folder)
        room = _bytes_in(folder) + shutil.disk_usage(folder).free
        if self._needed <= room:
            return ""
        return f"states need {num_bytes(self._needed)} and {folder} has only {num_bytes(room)}"

    @contextlib.contextmanager
    def training(self, step: int, facts: dict[str, Any], plan: Plan) -> Iterator[None]:
        """Within it the state may be left at any time.

        Args:
            facts: Facts of the run, saved with the state.
            plan: Later generations keep its choices that decide bits.
        """
        self._step, self._facts = step, facts | {"numerics": plan.numerics}
        pin(chosen(plan))
        with self._member.trains(self._leave_alone, lambda: bool(self._termination.arrived)):
            self._member.tell(part=self._part.number, num_parts=self._part.count)
            if self._is_from_memory and self._every is not None:
                self._write_copy()
            self._member.tell(is_joined=True, step=step, num_microbatches=plan.num_microbatches)
            yield

    @contextlib.contextmanager
    def updating(
        self, checkpoints: "Checkpoints | None", plan: Plan, seconds: float
    ) -> Iterator[None]:
        """Change the state by a step within it, then report the step to the authority.

        Args:
            checkpoints: Their newest step is reported too; None if there are none.
            plan: The plan of the step.
            seconds: Seconds of the microbatches of this process's replica in the step.
        """
        with self.changing:
            yield
            self._step += 1
        saved = None if checkpoints is None or jax.process_index() else checkpoints.complete_step
        saved_step = -1 if saved is None else saved
        self._member.tell(step=self._step, saved_step=saved_step, ran=_ran(plan, seconds))

    @property
    def changing(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock under which the state changes."""
        return self._member.changing

    def move(self) -> None:
        """Leave the state in memory, every member at the same step."""
        step, digest = self._leave()
        self._member.tell(left_step=step, digest=digest)

    def copy(self) -> None:
        """Copy the state into memory if it is due, every member at the same step."""
        if self._every is not None and not self._step % self._every:
            self._write_copy()

    def _write_copy(self) -> None:
        """Write this process's part, if it is the writer among processes with equal parts."""
        folder = functools.partial(copy_folder, self._member.folder)
        has_room = self._has_room(folder)
        while not has_room and not self._member.ends:  # no copies are removed at the run's end
            time.sleep(_WAIT_SECONDS)
            has_room = self._has_room(folder)
        saved = self._store.saved()  # a collective of all members
        if self._part.writer != jax.process_index() or not has_room:
            return
        try:
            self._copied[self._step] = self._write(saved, folder(self._step))
        except CheckpointError as error:  # memory is full, and older copies remain
            self._member.tell(note=str(error)[:_NOTE_CHARACTERS])
            return
        digests = {str(step): digest for step, digest in self._copied.items()}
        self._member.tell(copies=digests)

    def _has_room(self, folder: Callable[[int], str]) -> bool:
        """Whether there is room for another copy; the authority removes older ones."""
        present = {s: digest for s, digest in self._copied.items() if os.path.exists(folder(s))}
        self._copied = present
        return len(present) < _MOST_COPIES

    def finished(self) -> None:
        """Training is done and its results are written."""
        self._member.tell(is_finished=True)

    def left_by(self, error: BaseException | None) -> None:
        """If another member was lost, wait for the order to leave the state."""
        if error is not None and jax.process_count() > 1 and is_lost_peer(error):
            self._member.stay_to_leave()

    def _leave_alone(self) -> tuple[int, str] | None:
        """Leave the state without collectives, as other members may be gone; None if impossible."""
        if self._store.is_shared and jax.process_count() > 1:
            return None  # gathering uneven shards takes every member
        return self._leave()

    def _leave(self) -> tuple[int, str]:
        return self._step, self._write(self._store.saved(), self._member.folder)

    def _write(self, saved: PyTree, folder: str) -> str:
        facts = self._facts | {"step": self._step, "data": self._state_of_data(self._step)}
        facts["metadata"] = self._metadata()
        return leave_state(saved, facts, folder, self._part)


def _ran(plan: Plan, seconds: float) -> list[float]:
    """The work of this process in a step, for `Report`.

    Args:
        seconds: Seconds of the microbatches of its replica.
    """
    [replica] = [r for r in plan.replicas if jax.process_index() in r.devices]
    executed = (
        (replica.num_microbatches, replica.executors) if len(replica.devices) == 1 else (0, 1)
    )
    return [*executed, seconds]


def _bytes_in(folder: str) -> int:
    """Bytes of a folder's files, some of which may vanish meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total

"""The end of a session, by a signal or an error: save the state and write the report.

In each step a process may ask all others to save, to end the run, or to leave it.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from ..core.errors import CheckpointError, LaunchError
from ..core.types import EXIT_PREEMPTED
from ..jax.coordination import gather, is_lost_peer
from ..plan.plan import Plan
from ..report.history import History, RunState
from .recorder import Recorder
from .values import SessionOptions
from .watch import PipelineWatch

#: Requests of a process to all, of which the largest counts: save; end the run; leave it after a
#: checkpoint; leave it with the state in memory. All but the first keep the state anyway.
SAVE, STOP, LEAVE, MOVE = 0.5, 1.0, 2.0, 3.0


class Requests:
    """The requests of this process, and the one that all processes obey.

    Attributes:
        agreed: The last request that ended the run, on every process; 0 if there was none.

    Args:
        sources: Functions that return a present request of this process, or 0.
        is_member: Whether the process is a member of an elastic run.
    """

    def __init__(self, *sources: Callable[[], float], is_member: bool):
        self._sources, self._stop, self.agreed = sources, 0.0, 0.0
        self._is_alone = jax.process_count() == 1 and not is_member

    def stop(self) -> None:
        """Ask to end the run; does nothing once it ends."""
        self._stop = STOP * (not self.agreed)

    @property
    def present(self) -> float:
        """The request that this process sends with a step's sums."""
        return max(self._stop, *(source() for source in self._sources))

    def settle(self) -> None:
        """After a step, obey a signal at once where there is nobody to agree with.

        A stop by the script waits for the sums of one more step even then, so that the number of
        updates does not depend on the number of processes.
        """
        if self._is_alone:
            self.agree(max(source() for source in self._sources))

    def agree(self, request: float) -> None:
        """Obey the largest request of all processes in a step."""
        if request > SAVE:
            self._stop, self.agreed = 0.0, request


_INTERRUPT_NOTE = (
    b"\nhxla: Ctrl-C: the running step is finished, then training ends; once more ends it at once\n"
)
_MEETING_NOTE = (
    b"\nhxla: Ctrl-C: training ends when the islands meet next; once more ends it at once\n"
)


class Preempted(SystemExit):
    """Raised after SIGTERM or Ctrl-C, once the present step is finished and saved.

    It is a `SystemExit`. A script that does not catch it ends with exit code 75, and resumes when
    it is run again. Without a checkpoint folder nothing is saved, and the exit code is that of the
    signal, 143 or 130.

    Attributes:
        step: The number of updates done.
    """

    def __init__(self, step: int, signal_name: str = "SIGTERM", *, is_kept: bool = True):
        number = signal.SIGINT if signal_name == "Ctrl-C" else signal.SIGTERM
        super().__init__(EXIT_PREEMPTED if is_kept else 128 + number)
        self.step, self._signal, self._is_kept = step, signal_name, is_kept

    def __str__(self) -> str:
        lost = "" if self._is_kept else ", which are lost: there is no checkpoint_dir"
        return f"{self._signal} arrived; training ended after {self.step} steps{lost}"


class Termination:
    """Whether SIGTERM or SIGINT arrived, from the constructor until `close`.

    Attributes:
        arrived: The name of the first signal; empty without one.
        hurries: Whether a second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.arrived, self.hurries = "", False
        self._num_interrupts, self._note = 0, _INTERRUPT_NOTE
        self._before: dict[int, Any] = {}
        # Only the main thread may handle signals; in other threads the caller handles them.
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)

    def heed_interrupts(self, *, meets: bool = False) -> None:
        """Treat the first Ctrl-C like SIGTERM from now on, unless the script has a handler.

        Args:
            meets: Whether islands meet before training ends.
        """
        self._note = _MEETING_NOTE if meets else _INTERRUPT_NOTE
        if self._before and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def _terminate(self, _number: int, _frame: Any) -> None:
        self.arrived = self.arrived or "SIGTERM"

    def _interrupt(self, _number: int, _frame: Any) -> None:
        self._num_interrupts += 1
        self.arrived = self.arrived or "Ctrl-C"
        if self._num_interrupts > 1:
            self.hurries = True
            raise KeyboardInterrupt
        os.write(2, self._note)  # a handler may not print: it may have interrupted a print

    def request(self) -> float:
        """The request of this process to all."""
        return LEAVE * bool(self.arrived)

    def left(self, step: int, *, is_kept: bool) -> Preempted:
        """The exception that ends this process after a step; its code says if the state is kept."""
        return Preempted(step, self.arrived or "SIGTERM", is_kept=is_kept)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


_MEET_SECONDS = 5.0  # for processes that end by the same error at the same step


class Ending:
    """Saves and reports a session when it ends."""

    def __init__(
        self,
        recorder: Recorder,
        watch: PipelineWatch,
        termination: Termination,
        options: SessionOptions,
    ):
        self._recorder, self._watch = recorder, watch
        self._termination, self._options = termination, options
        self._is_halfway = False
        self._reported: int | None = None

    @contextlib.contextmanager
    def halfway(self) -> Iterator[None]:
        """Mark an update: an error within it leaves no complete state."""
        self._is_halfway = True
        yield
        self._is_halfway = False

    @staticmethod
    @contextlib.contextmanager
    def noting(error: BaseException | None) -> Iterator[None]:
        """Add failures of closing a session as notes to the error that ended it."""
        try:
            yield
        except CheckpointError as failure:
            if error is None:
                raise
            if error is not failure:
                error.add_note(f"besides, {failure}")

    def left_by(
        self,
        error: BaseException,
        history: History,
        plan: Plan,
        step: int,
        save: Callable[[], None] | None,
    ) -> None:
        """Save the state after an error and write the report, as far as possible.

        Args:
            error: The error that ends the session, and that the user sees.
            save: Writes a checkpoint and waits for it; None if nothing is new.
        """
        if save is not None and not self._termination.hurries:
            self._save(error, step, save)
        with contextlib.suppress(Exception):
            kind: Literal["failed", "stopped"] = "failed"
            if isinstance(error, SystemExit | KeyboardInterrupt):  # a `Preempted` among them
                kind = "stopped"
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.report(history, plan, step, RunState(kind=kind, why=why))

    def _save(self, error: BaseException, step: int, save: Callable[[], None]) -> None:
        """Save if the state is complete, and all processes ended by an error at this step."""
        if self._is_halfway or isinstance(error, LaunchError | CheckpointError | Preempted):
            return
        if jax.process_count() > 1 and (is_lost_peer(error) or not _all_at_step(step)):
            return
        try:
            save()
        except Exception as failure:
            self._recorder.warn(f"the state after {step} steps could not be saved: {failure}")
        else:
            self._recorder.warn(f"an error ends the session: its state is saved as step {step}")

    def show(self, history: History, plan: Plan) -> None:
        """Write the report of a run that goes on; training does not end if that fails."""
        state = RunState(kind="running")
        try:
            self._recorder.write_page(history, plan, state, self._watch.lanes(plan))
        except Exception as error:
            self._recorder.warn(f"report.html is not up to date: {error}")

    def report(
        self, history: History, plan: Plan, step: int, state: RunState | None = None
    ) -> None:
        """Print a summary and write the report, once for a step.

        Args:
            state: How the run ended; None: without an error.
        """
        if self._reported == step:
            return
        self._reported, run_dir, last = step, self._options.run_dir, self._options.steps
        if run_dir is not None and jax.process_index() == 0:
            self._watch.write_traces(run_dir, plan)
        is_whole = last is None or step == last
        state = state or RunState(kind="finished" if is_whole else "stopped")
        self._recorder.report(history, plan, state, self._watch.lanes(plan))


def _all_at_step(step: int) -> bool:
    """Whether an error ended every process at this step.

    Asked twice, so that a late process learns that the others did not wait.
    """
    try:
        steps = [
            gather(what, str(step), timeout_seconds=_MEET_SECONDS)
            for what in ("left by an error", "about to save")
        ]
    except Exception:  # any error of the service after the timeout
        return False
    return len({text for texts in steps for text in texts}) == 1

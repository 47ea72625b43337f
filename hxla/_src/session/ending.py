"""How a session ends, by a signal or an error: state saved, report written."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..core.errors import CheckpointError, LaunchError
from ..core.types import EXIT_PREEMPTED
from ..jax.coordination import gather, is_lost_peer
from ..plan.plan import Plan
from ..report.history import History
from .recorder import Recorder
from .values import SessionOptions
from .watch import PipelineWatch

_SAID = b"\nhxla: Ctrl-C: training ends after this step; once more ends it at once\n"


class Preempted(SystemExit):
    """SIGTERM or Ctrl-C: the step at hand was finished and, with a checkpoint folder, saved.

    It is a `SystemExit`: a script that does not catch it ends with exit code 75, and run again it
    resumes. Without a checkpoint folder the code is that of the signal, 143 or 130.

    Attributes:
        step: The updates done.
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
        arrived: The name of the signal that arrived first; empty: none has.
        hurries: Whether a second Ctrl-C ends all at once.
    """

    def __init__(self) -> None:
        self.arrived, self.hurries = "", False
        self._num_interrupts = 0
        self._before: dict[int, Any] = {}
        # Only the main thread may handle signals; elsewhere the caller keeps its own handling.
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)

    def heed_interrupts(self) -> None:
        """Take the first Ctrl-C as a SIGTERM from now on, unless the script handles it itself."""
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
        os.write(2, _SAID)  # a handler may not print: it may have interrupted a print

    def left(self, step: int, *, is_kept: bool) -> Preempted:
        """The exit of this process after a step, with the code for a state kept or lost."""
        return Preempted(step, self.arrived or "SIGTERM", is_kept=is_kept)

    def close(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


_MEET_SECONDS = 5.0  # for processes that the same error left at the same step


class Ending:
    """The end of a session.

    Args:
        termination: Whether signals arrived.
    """

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
        """While an update changes the state: what ends here leaves no whole one."""
        self._is_halfway = True
        yield
        self._is_halfway = False

    @staticmethod
    @contextlib.contextmanager
    def noting(error: BaseException | None) -> Iterator[None]:
        """While a session closes that an error ended: what else fails is a note on that error."""
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
        """Save the state that an error leaves behind and write the report, as far as possible.

        Args:
            error: Ends the session, and is the one to be seen.
            plan: That ran last.
            save: Writes a checkpoint, and waits for it; None: there is nothing new to write.
        """
        if save is not None and not self._termination.hurries:
            self._save(error, step, save)
        with contextlib.suppress(Exception):
            self.report(history, plan, step)

    def _save(self, error: BaseException, step: int, save: Callable[[], None]) -> None:
        """If the state is whole, and the same error left all processes at this step."""
        if self._is_halfway or isinstance(error, LaunchError | CheckpointError | Preempted):
            return
        if jax.process_count() > 1 and (is_lost_peer(error) or not _all_are_left(step)):
            return
        try:
            save()
        except Exception as failure:
            self._recorder.log(f"the state after {step} steps could not be saved: {failure}")
        else:
            self._recorder.log(f"an error ends the session: its state is saved as step {step}")

    def report(self, history: History, plan: Plan, step: int) -> None:
        """Print a summary and write the report, unless they tell of this step already."""
        if self._reported == step:
            return
        self._reported, pictures, run_dir = step, {}, self._options.run_dir
        if run_dir is not None and jax.process_index() == 0:
            pictures = self._watch.draw(run_dir, plan)
        self._recorder.report(history, plan, pictures)


def _all_are_left(step: int) -> bool:
    """Whether an error left every process at this step; one that has left alone saves nothing.

    Twice, so that one which comes late learns that the others did not wait.
    """
    try:
        told = [
            gather(what, str(step), timeout_seconds=_MEET_SECONDS)
            for what in ("left by an error", "about to save")
        ]
    except Exception:  # whatever the service raises when the time is over
        return False
    return len({text for texts in told for text in texts}) == 1

"""How a session ends, whatever ends it: the last whole state is saved and the report written."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from .._core._errors import CheckpointError, LaunchError
from .._jax import _coordination
from .._jax._lost_peers import is_lost_peer
from .._plan._plan import Plan
from .._report._history import History
from ._pipeline_watch import PipelineWatch
from ._recorder import Recorder
from ._session_values import SessionOptions
from ._signals import Preempted, Termination

_MEET_SECONDS = 5.0  # for processes that the same error left at the same step


class Ending:
    """The end of a session.

    Args:
        recorder: Tells of it.
        watch: Draws the session's pipelines.
        termination: Whether signals arrived.
        options: Of the session.
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
            history: Of the session.
            plan: That ran last.
            step: Updates done.
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
            _coordination.gather(what, str(step), timeout_seconds=_MEET_SECONDS)
            for what in ("left by an error", "about to save")
        ]
    except Exception:  # whatever the service raises when the time is over
        return False
    return len({text for texts in told for text in texts}) == 1

"""Signals of the user's, while a command carries out an elastic run."""

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator, Sequence

from ..core.types import EXIT_PREEMPTED

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def handing_on_signals(
    receive: Callable[[int], None], numbers: Sequence[signal.Signals] = _ALL
) -> Iterator[None]:
    """Hand signals to a run instead of ending by them; only a main thread can.

    Args:
        receive: Called with the number of each.
    """
    before = {n: signal.signal(n, lambda n, _: receive(n)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended_by(
    number: int, codes: Collection[int], num_steps: int, saved_step: int
) -> tuple[int, str]:
    """The exit code and the words of a run that a signal ended: 75 where all is in a checkpoint.

    Args:
        codes: Of the processes that ended by it; none: nobody trained.
        saved_step: The newest that was in a checkpoint before.
    """
    is_saved = all(code == EXIT_PREEMPTED for code in codes)
    if not codes:
        is_saved = 0 < num_steps <= saved_step
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    resume = "; run again to resume from a checkpoint" if is_saved else ""
    code = EXIT_PREEMPTED if is_saved else 128 + number
    done = codes and not any(codes)  # when it came
    return 0 if done else code, f"{name}: ended after {num_steps} steps{resume}"

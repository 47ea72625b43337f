"""Signals of the user's, while a command carries out an elastic run."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def handing_on_signals(
    receive: Callable[[int], None], numbers: Sequence[signal.Signals] = _ALL
) -> Iterator[None]:
    """Hand signals to a run instead of ending by them; only a main thread can.

    Args:
        receive: Called with the number of each.
        numbers: Which.
    """
    before = {n: signal.signal(n, lambda n, _: receive(n)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Which errors say only that another process of the job is gone."""

import re

from .._core._errors import DataError

# What Gloo, NCCL and the coordination service say where a peer does not answer any more.
_SAID = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|socket closed|coordination ?service"
    r"|deadline_exceeded|unavailable:|barrier (timed out|failed)|task .* (died|is unhealthy)"
    r"|preempted.*task",
    re.IGNORECASE,
)


_STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED|UNAVAILABLE|INTERNAL|FAILED_PRECONDITION): "
)


class LostReaderError(DataError):
    """The process that reads the data for this host is gone."""


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, comes of the end of another process."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, LostReaderError) or (
            _is_of_a_runtime(error) and _SAID.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_of_a_runtime(error: BaseException) -> bool:
    """XLA's errors arrive as `JaxRuntimeError`, or as plain ones that begin with a status."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or bool(
        _STATUS.match(str(error))
    )

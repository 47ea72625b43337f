"""The one wrapper of jax's distributed key-value client, which has no public form."""

import base64
import collections
import functools
import hashlib
import itertools
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed as _distributed
from jaxlib import _jax as _jaxlib

from ..core.errors import DataError

# Messages of Gloo, NCCL and the coordination service about a lost peer.
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|socket closed|coordination ?service"
    r"|deadline_exceeded|unavailable:|barrier (timed out|failed)|task .* (died|is unhealthy)"
    r"|preempted.*task",
    re.IGNORECASE,
)


_STATUS = re.compile(
    r"(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|ABORTED|UNAVAILABLE|INTERNAL|FAILED_PRECONDITION): "
)


class LostReaderError(DataError):
    """The process that reads the data for this host has ended."""


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is the end of another process."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, LostReaderError) or (
            _is_runtime_error(error) and _LOST_PEER.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_runtime_error(error: BaseException) -> bool:
    """XLA's errors are `JaxRuntimeError`s, or plain ones that begin with a status."""
    return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or bool(
        _STATUS.match(str(error))
    )


_HEARTBEAT_SECONDS = 100  # the watchdog and the authority of hxla act first
_JOIN_SECONDS = 300
_PATIENCE_SECONDS = 1.0  # between checks of whether a rank is alive
_CLAIM_SECONDS = 10  # to read a key that exists
_MOST_BYTES = 1 << 21  # of one compressed value: the service limits messages
_rounds: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def client() -> Any:
    """The client of this process, or None before `jax.distributed.initialize`."""
    return _distributed.global_state.client


def leave_sigterm_alone() -> None:
    """Keep jax from handling SIGTERM, before `jax.distributed.initialize`.

    Its preemption service only records the signal, so SIGTERM could not end a process outside a
    session; inside one hxla handles the signal.
    """
    jax.config.update("jax_enable_preemption_service", False)


def serve(address: str, num_processes: int) -> Any:
    """Start the coordination service in this process, which is not one of those it coordinates.

    Returns:
        The service, which runs until its `shutdown`.
    """
    return _jaxlib.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_timeout=_HEARTBEAT_SECONDS,
    )


def connect(address: str, num_processes: int, process_id: int) -> None:
    """Join through a service that `serve` started in another process.

    This process waits for no barrier at its end.
    """
    state = _distributed.global_state
    state.coordinator_address = address
    state.process_id, state.num_processes = process_id, num_processes
    state.client = _jaxlib.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=_JOIN_SECONDS,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    state.client.connect()


def put(key: str, value: str) -> None:
    """Set a key, overwriting its value."""
    client().key_value_set(key, value, allow_overwrite=True)


def get(key: str, timeout_seconds: float) -> str:
    """Wait for a key and return its value."""
    return str(client().blocking_key_value_get(key, int(timeout_seconds * 1000)))


def num_processes() -> int:
    """The number of processes of the job, without initialising a device; 1 without a job."""
    return 1 if client() is None else int(_distributed.global_state.num_processes or 1)


def claim(what: str, value: str) -> str:
    """Set a key unless another process has, and return its value.

    Args:
        what: The name of the claim; each process must claim it equally often.
    """
    key = f"hxla/claim/{what}/{next(_rounds[what])}"
    try:
        client().key_value_set(key, value)
    except jax.errors.JaxRuntimeError:
        return get(key, _CLAIM_SECONDS)
    return value


def entries(prefix: str) -> dict[str, str]:
    """All keys below a prefix, with their values."""
    return dict(client().key_value_dir_get(prefix))


def gather(
    what: str,
    text: str,
    *,
    timeout_seconds: float,
    check: Callable[[int], None] = lambda _rank: None,
) -> tuple[str, ...]:
    """The texts of all processes, in the order of ranks; each must call this equally often.

    Args:
        what: The name of the gather.
        timeout_seconds: How long to wait for the slowest process.
        check: Called every second with the awaited rank; raises to end the wait.
    """
    if jax.process_count() == 1:
        return (text,)
    number = next(_rounds[what])
    put(f"hxla/gather/{what}/{number}/{jax.process_index()}", text)
    keys = [f"hxla/gather/{what}/{number}/{r}" for r in range(jax.process_count())]
    until = time.monotonic() + timeout_seconds
    return tuple(_wait_for_text(key, rank, until, check) for rank, key in enumerate(keys))


def _wait_for_text(key: str, rank: int, until: float, check: Callable[[int], None]) -> str:
    """The text of a rank, also if it wrote the text and then ended."""
    while True:
        try:
            return get(key, min(_PATIENCE_SECONDS, max(until - time.monotonic(), 0.001)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > until:
                raise
        try:
            check(rank)
        except Exception:
            written = entries(key.rpartition("/")[0])
            if key not in written:
                raise
            return written[key]


def differing(
    what: str, text: str, *, timeout_seconds: float, check: Callable[[int], None]
) -> tuple[str, ...]:
    """The texts of all processes if they differ, else nothing.

    Only a hash of equal texts is sent. All processes get the same result, so all can refuse.

    Args:
        what: The name of the comparison; each process must make it equally often.
        text: The text of this process.
        timeout_seconds: How long to wait for the slowest process.
        check: See `gather`.
    """
    if jax.process_count() == 1:
        return ()
    data = text.encode()
    exchange = functools.partial(gather, what, timeout_seconds=timeout_seconds, check=check)
    digests = exchange(hashlib.sha256(data).hexdigest())
    if len(set(digests)) == 1:
        return ()
    packed = base64.b85encode(zlib.compress(data)[:_MOST_BYTES]).decode()
    return tuple(map(_unpacked, exchange(packed)))


def _unpacked(packed: str) -> str:
    """A text, or the beginning of a very long text."""
    data = zlib.decompressobj().decompress(base64.b85decode(packed))
    return data.decode(errors="ignore")

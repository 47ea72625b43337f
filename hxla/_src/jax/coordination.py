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


_HEARTBEAT_SECONDS = 100  # our own watchdog and authority speak first
_JOIN_SECONDS = 300
_PATIENCE_SECONDS = 1.0  # between looks at whether a rank is still there
_CLAIM_SECONDS = 10  # for a key that is there
_MOST_BYTES = 1 << 21  # of one value, compressed: a message of the service has a limit
_rounds: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def client() -> Any:
    """The client of this process, or None before `jax.distributed.initialize`."""
    return _distributed.global_state.client


def leave_sigterm_alone() -> None:
    """Keep jax from handling SIGTERM, before `jax.distributed.initialize`.

    Its preemption service only takes note of the signal, so that a process outside of a session
    could not be ended by it; inside one hxla handles the signal itself.
    """
    jax.config.update("jax_enable_preemption_service", False)


def serve(address: str, num_processes: int) -> Any:
    """The service through which processes find each other, in this one, which is none of them.

    Returns:
        The service, which lives until its `shutdown`.
    """
    return _jaxlib.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_timeout=_HEARTBEAT_SECONDS,
    )


def connect(address: str, num_processes: int, process_id: int) -> None:
    """Join by a service that `serve` made in another process.

    No barrier is waited for when this process ends.
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
    """Set a key, overwriting what it held."""
    client().key_value_set(key, value, allow_overwrite=True)


def get(key: str, timeout_seconds: float) -> str:
    """Wait for a key."""
    return str(client().blocking_key_value_get(key, int(timeout_seconds * 1000)))


def num_processes() -> int:
    """Of the job that was joined, without initialising a device; 1 without one."""
    return 1 if client() is None else int(_distributed.global_state.num_processes or 1)


def claim(what: str, value: str) -> str:
    """Set a key unless another process has; returns what it holds.

    Args:
        what: Name of what is claimed; each process claims it equally often.
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
    """What every process says, in the order of ranks; each must call this equally often.

    Args:
        what: Name of what is gathered.
        timeout_seconds: How long to wait for the slowest.
        check: Called now and then with the rank that is waited for; raises to end the wait.
    """
    if jax.process_count() == 1:
        return (text,)
    number = next(_rounds[what])
    put(f"hxla/gather/{what}/{number}/{jax.process_index()}", text)
    keys = [f"hxla/gather/{what}/{number}/{r}" for r in range(jax.process_count())]
    until = time.monotonic() + timeout_seconds
    return tuple(_awaited(key, rank, until, check) for rank, key in enumerate(keys))


def _awaited(key: str, rank: int, until: float, check: Callable[[int], None]) -> str:
    """The part of a rank, which writes it before it ends."""
    while True:
        try:
            return get(key, min(_PATIENCE_SECONDS, max(until - time.monotonic(), 0.001)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > until:
                raise
        try:
            check(rank)
        except Exception:
            found = entries(key.rpartition("/")[0])
            if key not in found:
                raise
            return found[key]


def differing(
    what: str, text: str, *, timeout_seconds: float, check: Callable[[int], None]
) -> tuple[str, ...]:
    """What every process says, if they do not all say the same; else nothing.

    Of equal texts only a hash travels. Every process learns the same, so all of them can refuse.

    Args:
        what: Name of what is compared.
        text: This process's version; each must call this equally often.
        timeout_seconds: How long to wait for the slowest.
        check: As of `gather`.
    """
    if jax.process_count() == 1:
        return ()
    data = text.encode()
    told = functools.partial(gather, what, timeout_seconds=timeout_seconds, check=check)
    digests = told(hashlib.sha256(data).hexdigest())
    if len(set(digests)) == 1:
        return ()
    sent = base64.b85encode(zlib.compress(data)[:_MOST_BYTES]).decode()
    return tuple(map(_unpacked, told(sent)))


def _unpacked(sent: str) -> str:
    """A text, or the beginning of a very long one."""
    data = zlib.decompressobj().decompress(base64.b85decode(sent))
    return data.decode(errors="ignore")

"""The one wrapper of jax's distributed key-value client, which has no public form."""

import collections
import difflib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed as _distributed

from .._core._errors import LaunchError

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


def put(key: str, value: str) -> None:
    """Set a key, overwriting what it held."""
    client().key_value_set(key, value, allow_overwrite=True)


def get(key: str, timeout_seconds: float) -> str:
    """Wait for a key."""
    return str(client().blocking_key_value_get(key, int(timeout_seconds * 1000)))


def entries(prefix: str) -> dict[str, str]:
    """All keys below a prefix, with their values."""
    return dict(client().key_value_dir_get(prefix))


def gather(what: str, text: str, *, timeout_seconds: float) -> tuple[str, ...]:
    """What every process says, in the order of ranks; each must call this equally often.

    Args:
        what: Name of what is gathered.
        text: This process's part.
        timeout_seconds: How long to wait for the slowest.
    """
    if jax.process_count() == 1:
        return (text,)
    number = next(_rounds[what])
    put(f"hxla/gather/{what}/{number}/{jax.process_index()}", text)
    keys = [f"hxla/gather/{what}/{number}/{r}" for r in range(jax.process_count())]
    return tuple(get(key, timeout_seconds) for key in keys)


def same_everywhere(what: str, text: str, *, timeout_seconds: float) -> None:
    """Refuse to go on where processes disagree.

    Args:
        what: Name of what is compared.
        text: This process's version; each must call this equally often.
        timeout_seconds: How long to wait for the slowest.

    Raises:
        LaunchError: With a short diff against process 0.
    """
    rank = jax.process_index()
    number = next(_rounds[what])
    key = f"hxla/same/{what}/{number}"
    if rank == 0:
        put(key, text)
        return
    first = get(key, timeout_seconds)
    if first != text:
        names = "process 0", f"process {rank}"
        diff = difflib.unified_diff(first.splitlines(), text.splitlines(), *names, lineterm="")
        raise LaunchError(
            f"processes disagree on the {what}; they must run the same script with the same "
            "arguments, files and library versions:\n" + "\n".join(itertools.islice(diff, 20))
        )

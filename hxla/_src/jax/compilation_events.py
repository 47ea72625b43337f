"""Counts XLA compilations through jax's monitoring events."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_seconds: list[float] = []


def _listen(event: str, duration_secs: float, **_kwargs: str | int) -> None:
    if event == _EVENT:
        _seconds.append(duration_secs)


# jax has no public way to remove a listener, so it stays for the life of the process.
jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Compilations of this process since hxla was imported."""
    return len(_seconds)

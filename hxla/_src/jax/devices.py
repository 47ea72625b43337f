"""Devices as jax's back ends describe them, those that know only their own process included.

JAX makes the client of an accelerator one for all processes of a job, and so waits for each of
them to have such devices. Where some have none, or others, every client but the CPU's is made as if
there were no job. Its devices then take part in no collective and call their process number 0, so
`process_of` is to be asked in place of `process_index`; the CPU's is the backend that counts
processes, for it is named first.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _bridge

_GPUS = ("gpu", "cuda", "rocm")


def multiprocessors(device: jax.Device) -> int | None:
    """Streaming multiprocessors of a GPU; None elsewhere, or where the backend does not tell."""
    # An attribute that backends of GPUs set; on a TPU it counts something else.
    return getattr(device, "core_count", None) if device.platform in _GPUS else None


#: Names of the backends whose clients are.
_kept: set[str] = set()


def keep_local() -> None:
    """Have the clients of accelerators know their own process only.

    To be called when the job is joined, before anything uses a device. `JAX_PLATFORMS` is to name
    `cpu` first.
    """
    _bridge._discover_and_register_pjrt_plugins()
    for name, made in list(_bridge._backend_factories.items()):
        if name != "cpu" and name not in _kept:
            alone = functools.partial(_alone, made.factory)
            _bridge._backend_factories[name] = dataclasses.replace(made, factory=alone)
            _kept.add(name)


def is_local() -> bool:
    """Whether there are such backends."""
    return bool(_kept)


def own_devices() -> list[jax.Device]:
    """The accelerators of this process; its processors, if it is to have none.

    Raises:
        RuntimeError: If `JAX_PLATFORMS` names accelerators, and there are none.
    """
    names = [name for name in _bridge.backends() if name in _kept]
    platforms = os.environ.get("JAX_PLATFORMS", "cpu")
    if not names and platforms != "cpu":
        raise RuntimeError(f"JAX_PLATFORMS={platforms} names an accelerator, and none is here")
    return jax.local_devices(backend=names[0] if names else "cpu")


def process_of(device: jax.Device) -> int:
    """The number of the process that has a device."""
    if _kept and device.client is not jax.local_devices(backend="cpu")[0].client:
        return jax.process_index()
    return int(device.process_index)


def is_here(device: jax.Device) -> bool:
    """Whether this process has a device."""
    return process_of(device) == jax.process_index()


def _alone(make: Callable[[], Any]) -> Any:
    """A client that is made as if no job had been joined."""
    state = _distributed.global_state
    before = state.client, state.process_id, state.num_processes
    state.client, state.process_id, state.num_processes = None, 0, 1
    try:
        return make()
    finally:
        state.client, state.process_id, state.num_processes = before


def share_cores(devices: Any) -> bool:
    """Whether a process has several CPU devices: what one takes then says nothing of another."""
    local = [d for d in devices if is_here(d)]
    return len(local) > 1 and local[0].platform == "cpu"

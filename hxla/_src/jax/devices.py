"""Devices of jax's backends, local clients included.

JAX makes one client of an accelerator for all processes of a job, and waits until each process has
such devices. If some have none, or others, every client but the CPU's is made as if there were no
job. The devices of such a local client join no collective and report process 0, so use `process_of`
instead of `process_index`. The CPU backend counts processes, for it is named first.

The growth of glibc's heap, for processes that compute in host memory. A CPU's arrays share the heap
with small blocks of the compiler and the file system. The heap keeps the gaps that freed blocks
leave, and large arrays are then allocated in them.
"""

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _bridge

_GPUS = ("gpu", "cuda", "rocm")


def multiprocessors(device: jax.Device) -> int | None:
    """Streaming multiprocessors of a GPU; None for other devices, or if unknown."""
    # An attribute that backends of GPUs set; on a TPU it counts something else.
    return getattr(device, "core_count", None) if device.platform in _GPUS else None


#: Names of the backends with local clients.
_local_backends: set[str] = set()


def keep_local() -> None:
    """Make the clients of accelerators local to this process.

    Call it when the job is joined, before any use of a device. `JAX_PLATFORMS` must name `cpu`
    first.
    """
    _bridge._discover_and_register_pjrt_plugins()
    for name, made in list(_bridge._backend_factories.items()):
        if name != "cpu" and name not in _local_backends:
            alone = functools.partial(_without_job, made.factory)
            _bridge._backend_factories[name] = dataclasses.replace(made, factory=alone)
            _local_backends.add(name)


def is_local() -> bool:
    """Whether accelerators have local clients."""
    return bool(_local_backends)


def own_devices() -> list[jax.Device]:
    """The accelerators of this process, or its CPU devices if `JAX_PLATFORMS` names none.

    Raises:
        RuntimeError: If `JAX_PLATFORMS` names accelerators, and there are none.
    """
    names = [name for name in _bridge.backends() if name in _local_backends]
    platforms = os.environ.get("JAX_PLATFORMS", "cpu")
    if not names and platforms != "cpu":
        raise RuntimeError(f"JAX_PLATFORMS={platforms} names an accelerator, and none is here")
    return jax.local_devices(backend=names[0] if names else "cpu")


def process_of(device: jax.Device) -> int:
    """The index of the process of a device."""
    if _local_backends and device.client is not jax.local_devices(backend="cpu")[0].client:
        return jax.process_index()
    return int(device.process_index)


def is_here(device: jax.Device) -> bool:
    """Whether a device belongs to this process."""
    return process_of(device) == jax.process_index()


def _without_job(make: Callable[[], Any]) -> Any:
    """Make a client as if no job had been joined."""
    state = _distributed.global_state
    before = state.client, state.process_id, state.num_processes
    state.client, state.process_id, state.num_processes = None, 0, 1
    try:
        return make()
    finally:
        state.client, state.process_id, state.num_processes = before


def share_cores(devices: Any) -> bool:
    """Whether a process has several CPU devices, whose times then depend on each other."""
    local = [d for d in devices if is_here(d)]
    return len(local) > 1 and local[0].platform == "cpu"


_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18


def trim_heap() -> None:
    """Return unused pages to the operating system: hundreds of MiB after compiling.

    With a C library other than glibc this does nothing.
    """
    _call("malloc_trim", 0)


def keep_heap_small() -> None:
    """Allocate blocks above 256 KiB in separate pages, returned once they are freed.

    New pages take time, so this is for processes with little memory.
    """
    _call("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def _call(name: str, *arguments: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)

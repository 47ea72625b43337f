"""Versions and the CPU's instruction set, which decide bits besides the program."""

import functools
import importlib.metadata
import os
import pathlib
import platform
import re

import jax

# From the newest to the oldest, with the names of XLA's `--xla_cpu_max_isa`.
_INSTRUCTIONS = ("amx", "avx512f", "avx2", "avx", "sse4_2")


def jax_versions() -> tuple[str, str]:
    """The versions of jax and jaxlib."""
    return jax.__version__, importlib.metadata.version("jaxlib")


@functools.cache
def processor() -> str:
    """The instruction set for which XLA compiles on this machine's CPU, `x86_64 avx2`."""
    machine = platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    most = _largest_allowed()
    for name in _INSTRUCTIONS:
        known = any(flag.startswith(name) for flag in flags)
        if known and (most is None or _INSTRUCTIONS.index(name) >= most):
            return f"{machine} {name}"
    return machine


def _largest_allowed() -> int | None:
    """The index in `_INSTRUCTIONS` of the value of `--xla_cpu_max_isa`, or None."""
    match = re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))
    asked = match[1].lower().replace("avx512", "avx512f") if match else ""
    return next((i for i, name in enumerate(_INSTRUCTIONS) if asked.startswith(name)), None)

"""Growth of glibc's heap, for processes that compute in host memory.

A CPU's arrays share the heap with small blocks of the compiler and the file system. The heap keeps
the gaps that freed blocks leave, and large arrays are then allocated in them.
"""

import ctypes
import sys
from typing import Any

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

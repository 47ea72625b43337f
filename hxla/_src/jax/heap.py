"""How glibc's heap grows and shrinks, where a process computes in its own memory.

A CPU's arrays lie beside what the compiler and the file system need in small pieces. What those
leave behind stays with the process, and large arrays are then put into its gaps.
"""

import ctypes
import sys
from typing import Any

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18


def trim_heap() -> None:
    """Give pages that nobody uses back to the operating system, of hundreds of MiB after compiling.

    Where the C library is another one, this does nothing.
    """
    _call("malloc_trim", 0)


def keep_heap_small() -> None:
    """From now on, whatever is larger than 256 KiB has pages of its own, given back once freed.

    New pages take time, so this is for processes whose memory is tight.
    """
    _call("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def _call(name: str, *arguments: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)

"""The error of a process, as its user needs it: the own lines on screen, all of them in a log."""

import os
import pathlib
import runpy
import sys
import sysconfig
import traceback

from .._core._errors import HxlaError
from ._output import append_log

_PACKAGE = str(pathlib.Path(__file__).parent.parent) + os.sep
_HIDDEN = ("<frozen runpy>", runpy.__file__)
_LIBRARIES = tuple(sysconfig.get_paths().values())


def last_words(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    first, _, rest = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}{' ...' if rest else ''}" if first else repr(error)


def show(error: BaseException, rank: int, logs: str | None, *, is_victim: bool) -> None:
    """Print an error that ends a process.

    Args:
        error: What was raised.
        rank: Of this process.
        logs: Folder for the whole of it; None: everything is printed.
        is_victim: Whether it only says that another process has ended: then nothing is printed.
    """
    whole = "".join(traceback.format_exception(error))
    if logs is None:
        sys.stderr.write(whole)
        return
    append_log(pathlib.Path(logs), rank, whole.encode())
    if not is_victim:
        told = traceback.TracebackException.from_exception(error)
        is_told = isinstance(error, HxlaError)
        if is_told and not _has_own_frames(told.__cause__):  # its message says all that matters
            told.__cause__ = told.__context__ = None
        _leave_out_our_own(told, is_ours=not is_told)
        sys.stderr.write("".join(told.format()))


def _has_own_frames(told: traceback.TracebackException | None) -> bool:
    """Whether the user's own code takes part in an error."""
    if told is None:
        return False
    hidden = (_PACKAGE, *_HIDDEN, *_LIBRARIES)
    return any(not frame.filename.startswith(hidden) for frame in told.stack)


def _leave_out_our_own(told: traceback.TracebackException, *, is_ours: bool) -> None:
    """Keep frames of the script and of other libraries, and where hxla itself failed."""
    frames = list(told.stack)
    kept = [f for f in frames if not f.filename.startswith((_PACKAGE, *_HIDDEN))]
    if is_ours and frames and frames[-1].filename.startswith(_PACKAGE):
        kept.append(frames[-1])
    told.stack[:] = kept or frames
    for other in (told.__cause__, told.__context__):
        if other is not None:
            _leave_out_our_own(other, is_ours=is_ours)

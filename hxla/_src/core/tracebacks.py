"""Tracebacks of hxla's errors without hxla's frames, as jax shortens the tracebacks of its errors.

The message of an `HxlaError` names what is wrong and where; frames of hxla would only hide the line
of the user's script. `JAX_TRACEBACK_FILTERING=off` keeps them, for hxla's errors too.
"""

import types

import jax

from .errors import HxlaError

_PACKAGE = __name__.partition(".")[0]
_is_kept_whole = False


def keep_whole() -> None:
    """Leave all frames from now on, to a launcher that logs them and shows fewer."""
    global _is_kept_whole
    _is_kept_whole = True


def hide_frames(error: HxlaError) -> None:
    """Remove the frames of hxla from an error; a bare `raise` then adds none."""
    if not _is_kept_whole and jax.config.values["jax_traceback_filtering"] != "off":
        error.__traceback__ = _without_hxla(error.__traceback__)


def _without_hxla(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while trace is not None:
        # Not the file's name: the constructor of a dataclass has none.
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            kept.append(trace)
        trace = trace.tb_next
    for own in reversed(kept):
        trace = types.TracebackType(trace, own.tb_frame, own.tb_lasti, own.tb_lineno)
    return trace

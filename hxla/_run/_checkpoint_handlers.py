"""Orbax's handlers, which seal what they wrote and tell of a failure before anything waits for it.

Orbax raises the error of a background write only after all processes have met at a barrier; if one
of them failed they never do.
"""

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from ._checkpoint_seal import seal

_ORBAX = str(pathlib.Path(ocp.__file__).parent)

Tell = Callable[[BaseException], None]


class _WatchedWrite:
    """A write in the background, as Orbax's own futures are."""

    def __init__(self, write: Any, tell: Tell):
        self._write, self._tell = write, tell

    def result(self, timeout: int | None = None) -> Any:
        """Wait for the write."""
        try:
            return self._write.result(timeout)
        except BaseException as error:
            self._tell(error)
            raise


class _Telling:
    """What both handlers add to Orbax's own."""

    def __init__(self, tell: Tell, **options: Any):
        super().__init__(**options)
        self._tell = tell

    async def async_save(self, *args: Any, **kwargs: Any) -> list[_WatchedWrite]:
        """Begin to write; the returned futures are waited for in the background."""
        writes = await super().async_save(*args, **kwargs)  # type: ignore[misc]
        return [_WatchedWrite(write, self._tell) for write in writes or ()]

    def finalize(self, directory: Any) -> None:
        """Finish what all processes have written, before the checkpoint gets its name."""
        try:
            super().finalize(directory)  # type: ignore[misc]
            self._seal(directory)
        except BaseException as error:
            self._tell(error)
            raise

    def _seal(self, directory: Any) -> None:
        """Nothing by default."""


class TreeHandler(_Telling, ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Writes and reads arrays."""

    def _seal(self, directory: Any) -> None:
        seal(directory)


class MetaHandler(_Telling, ocp.JsonCheckpointHandler):  # type: ignore[misc]
    """Writes and reads small facts."""


# Orbax finds a handler by the class of the arguments.
@ocp.args.register_with_handler(TreeHandler, for_save=True)  # type: ignore[untyped-decorator]
class TreeSave(ocp.args.PyTreeSave):  # type: ignore[misc]
    """Arrays to save."""


@ocp.args.register_with_handler(TreeHandler, for_restore=True)  # type: ignore[untyped-decorator]
class TreeRestore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """Arrays to restore."""


@ocp.args.register_with_handler(MetaHandler, for_save=True)  # type: ignore[untyped-decorator]
class MetaSave(ocp.args.JsonSave):  # type: ignore[misc]
    """Facts to save."""


@ocp.args.register_with_handler(MetaHandler, for_restore=True)  # type: ignore[untyped-decorator]
class MetaRestore(ocp.args.JsonRestore):  # type: ignore[misc]
    """Facts to restore."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Orbax tells of every file, and at length of errors that are raised anyway."""
    own = record.pathname.startswith(_ORBAX)
    return not own or (record.levelno >= logging.ERROR and not record.exc_info)


def quieten_orbax() -> None:
    """Leave out what Orbax says besides; everybody else who logs through absl is heard."""
    logging.getLogger("absl").addFilter(_is_worth_a_line)

"""What happened to an elastic job, one line of JSON each."""

import contextlib
import dataclasses
import json
import time
from typing import Any

from .._core._errors import LaunchError
from .._elastic._commits import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """The processes of a generation were started.

    Attributes:
        generation: Its number.
        pids: By device.
        hosts: Likewise the names of the hosts that they run on.
    """

    generation: int
    pids: dict[str, int]
    hosts: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A device was met for the first time.

    Attributes:
        device: What this run calls it.
        label: Its kind, and what share of a core it is.
        host: Where it is.
    """

    device: str
    label: str
    host: str


class EventLog:
    """A file of events and decisions, with the seconds since the start.

    Args:
        path: Of it; None: nothing is written.

    Raises:
        LaunchError: If it cannot be written.
    """

    def __init__(self, path: str | None):
        self._began = time.monotonic()
        try:
            self._file = open(path, "w", buffering=1) if path is not None else None  # noqa: SIM115
        except OSError as error:
            raise LaunchError(f"--events {path}: {error.strerror}") from error

    def write(self, what: Any) -> None:
        """Write an event of the authority, or what it decided."""
        fields = dataclasses.asdict(what)
        fields.pop("at_seconds", None)
        self._line(type(what).__name__, fields)

    def close(self, ledger: Ledger) -> None:
        """Write which generation committed which steps, and let go of the file."""
        self._line("Ledger", dataclasses.asdict(ledger))
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _line(self, name: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        row = {"seconds": round(time.monotonic() - self._began, 4), "what": name, **fields}
        with contextlib.suppress(OSError):  # a full disk ends no job
            self._file.write(json.dumps(row, default=sorted) + "\n")

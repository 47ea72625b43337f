"""A job that starts again on some of its devices.

A process cannot leave a running job, because every collective waits for it. So all processes end
before the first session, and `hxla run` starts the script anew on the devices that are left.
"""

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

#: The file in which process 0 asks for it; only `hxla run` on this machine sets it.
_FILE_VARIABLE = "HXLA_AGAIN"
#: In a job that has started again, the places of its devices in the mesh file.
_PLACES_VARIABLE = "HXLA_CHOSEN_DEVICES"
#: A launcher that a process of a job starts must not take these from its own job.
AGAIN_VARIABLES = (_FILE_VARIABLE, _PLACES_VARIABLE)


def can_start_again() -> bool:
    """Whether the launcher of this process can start its job again."""
    return _FILE_VARIABLE in os.environ


def start_again_on(ranks: Sequence[int], why: str) -> NoReturn:
    """End this process, after which its job starts again on some of its devices.

    Every process calls this, with the same arguments.

    Args:
        why: One line for the user.
    """
    if os.environ.get("HXLA_PROCESS_ID", "0") == "0":
        pathlib.Path(os.environ[_FILE_VARIABLE]).write_text(json.dumps([list(ranks), why]))
    sys.exit(0)


def chosen_places() -> list[int] | None:
    """The places in the mesh file of the devices that this job has; None: it has all of them."""
    text = os.environ.get(_PLACES_VARIABLE)
    return None if text is None else list(map(int, text.split(",")))


class Again:
    """The launcher's side: variables for the processes, and their request.

    Args:
        folder: An empty folder for the request.
    """

    def __init__(self, folder: str):
        self._file = pathlib.Path(folder, "again.json")

    def environment(self, places: Sequence[int], num_devices: int) -> dict[str, str]:
        """Variables of the processes of a job.

        Args:
            places: The places of its devices among those that are described.
            num_devices: How many are described.
        """
        found = {_FILE_VARIABLE: str(self._file)}
        if len(places) < num_devices:
            found[_PLACES_VARIABLE] = ",".join(map(str, places))
        return found

    def asked(self, places: Sequence[int]) -> tuple[list[int], str] | None:
        """The places of the devices on which the job starts again, and why; None: it is over."""
        if not self._file.exists():
            return None
        ranks, why = json.loads(self._file.read_text())
        self._file.unlink()
        return [places[rank] for rank in ranks], why

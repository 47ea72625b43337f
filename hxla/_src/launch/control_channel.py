"""What the authority and a generation's processes tell each other: a page of memory.

Each side of each pair has a slot that it alone writes, and the other reads it as often as it likes.
A writer that is killed or frozen disturbs nobody, and a text half written is known by its checksum.
"""

import dataclasses
import glob
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .status_page import StatusPage, new_board, open_board

#: Path of the mailbox, the number of the generation, and the folder for what is kept in memory.
MAILBOX_VARIABLE, GENERATION_VARIABLE = "HXLA_MAILBOX", "HXLA_GENERATION"
MEMORY_VARIABLE = "HXLA_MEMORY"
#: A name of the job that no other one has: that of all its generations.
JOB_VARIABLE = "HXLA_JOB"
#: How many processes of a generation are on this host.
NEIGHBOURS_VARIABLE = "HXLA_NEIGHBOURS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a process says of itself.

    Attributes:
        count: It grows while the process lives.
        is_prepared: Whether it only waits for its generation to be formed.
        is_joined: Whether it has the state of the first step.
        step: How many steps are behind it.
        saved_step: The step of the newest checkpoint that is complete.
        part: Which part of a state it writes.
        num_parts: The parts that make a whole state.
        left_step: The step of the state that it left in memory.
        digest: The SHA-256 of its part of that state.
        copies: By step the SHA-256 of its parts of copies that it made in memory.
        asked_back: Whether it got a SIGTERM.
        is_finished: Whether training is done and its results are written.
        num_microbatches: Of a step; 0: not known yet.
        ran: In the last step: its microbatches, how many it ran at once, and the seconds that it
            was busy with them; no microbatches where a copy of the model has several devices.
        note: Why it could not leave its state.
    """

    count: int = 0
    is_prepared: bool = False
    is_joined: bool = False
    step: int = -1
    saved_step: int = -1
    part: int = 0
    num_parts: int = 1
    left_step: int = -1
    digest: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asked_back: bool = False
    is_finished: bool = False
    num_microbatches: int = 0
    ran: Sequence[float] = dataclasses.field(default_factory=lambda: [0, 1, 0.0])
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is to do.

    Attributes:
        begins: Whether its generation is formed: it may begin.
        state: The folders of all parts of the state to begin with; none: the newest checkpoint, or
            a new state.
        stops: Whether to ask all for a last step, after which each leaves its state in memory.
        ends: Whether to ask all for a last step, after which a checkpoint is written.
        leaves: Whether to leave its last complete state in memory at once, and end.
    """

    begins: bool = False
    state: Sequence[str] = ()
    stops: bool = False
    ends: bool = False
    leaves: bool = False


_Said = TypeVar("_Said", Report, Order)


class ControlChannel:
    """The slots of all processes of a generation.

    Args:
        board: Of twice as many slots as there are processes.
    """

    def __init__(self, board: StatusPage, num_ranks: int):
        self._board, self._num = board, num_ranks
        self._read_before: dict[int, tuple[str, Any]] = {}  # by slot: text, what it says

    def report(self, rank: int) -> Report:
        """What a process said last."""
        return self._read(rank, Report)

    def order(self, rank: int) -> Order:
        """What a process was told last."""
        return self._read(self._num + rank, Order)

    def tell(self, rank: int, report: Report) -> None:
        """Say something of a process, its own."""
        self._write(rank, report)

    def give(self, rank: int, order: Order) -> None:
        """Tell a process what to do."""
        self._write(self._num + rank, order)

    def _write(self, slot: int, what: Report | Order) -> None:
        text = json.dumps(dataclasses.asdict(what))
        self._board.put(slot, f"{zlib.crc32(text.encode()):08x}{text}")

    def _read(self, slot: int, kind: type[_Said]) -> _Said:
        text, said = self._read_before.get(slot, ("", kind()))
        for _ in range(100):  # what is just being written is whole a moment later
            line = self._board.text(slot)
            if line is None:
                return kind()
            if line == text:
                break
            if line[:8] == f"{zlib.crc32(line[8:].encode()):08x}":
                said = kind(**json.loads(line[8:]))
                self._read_before[slot] = line, said
                break
        return said  # what was said before, if it was killed while it wrote


def new_mailbox(num_ranks: int) -> tuple[ControlChannel, str]:
    """A mailbox and the path by which the processes open it."""
    board, path = new_board(2 * num_ranks)
    return ControlChannel(board, num_ranks), path


def open_mailbox(path: str, num_ranks: int) -> ControlChannel | None:
    """That of a path; None if its owner is gone."""
    board = open_board(path, 2 * num_ranks)
    return None if board is None else ControlChannel(board, num_ranks)


def left_folder(memory: str, generation: int, rank: int) -> str:
    """Where a process leaves its state.

    Args:
        memory: The folder of the job.
        generation: Number of the process's generation.
    """
    return f"{memory}/{generation}-{rank}"


def copy_folder(left: str, step: int) -> str:
    """Where a process copies its state after a step, of where it leaves its last one."""
    return f"{left}-{step}"


def folders_of(memory: str, generation: int) -> list[str]:
    """All that processes of a generation wrote, whole or not."""
    return glob.glob(f"{glob.escape(memory)}/{generation}-*")

"""Where each process of a job is: a page of memory that outlives all of them.

Each rank writes a line into its own slot, and everybody reads all. A process killed at any moment
leaves what it said last, and nothing travels through another process that may be stuck.
"""

import dataclasses
import json
import mmap
import os
import time
from typing import Literal

BOARD_VARIABLE = "HXLA_BOARD"  # path of the board
LOGS_VARIABLE = "HXLA_LOGS"  # folder for what would bury the one line that matters
_SLOT_BYTES = 4096
_NOTE_BYTES = 1500  # written as JSON they may be twice as many

#: Said of a rank whose script ended while another rank waits for it.
ENDED = (
    "ended its script, and another rank waits for it: every rank has to make the same calls of hxla"
)

State = Literal[
    "starting", "running", "finished", "left", "failed", "victim", "judged", "preempted"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Post:
    """What a rank says of itself.

    Attributes:
        step: The step at hand; -1 before the first.
        phase: What it does in that step.
        state: `starting` before a session, `running` in one, `finished` after it; `left` a session
            by `sys.exit`, `failed` by an error of its own, a `victim` of another rank's end,
            `judged` another rank dead or stuck, `preempted` by SIGTERM.
        note: The error, or what was judged.
        blamed: The rank that was judged.
        exit_code: With which it is about to end.
        moved_at: When step, phase or state last changed, by `time.monotonic` of its machine.
        step_seconds: How long the last step took.
        session: How many sessions this process has opened.
        left_session: The last of them that an error ended; 0: none.
        has_ended: Whether its script is over.
    """

    step: int = -1
    phase: str = "starting"
    state: State = "starting"
    note: str = ""
    blamed: int | None = None
    exit_code: int = 0
    count: int = 0
    moved_at: float = 0.0
    step_seconds: float = 0.0
    session: int = 0
    left_session: int = 0
    has_ended: bool = False

    @property
    def where(self) -> str:
        """Step and phase in words."""
        if self.step < 0:
            return f"before its first step, in phase {self.phase!r}"
        return f"at step {self.step} in phase {self.phase!r}"

    def text(self) -> str:
        """As JSON."""
        note = self.note.encode()[:_NOTE_BYTES].decode(errors="ignore")
        return json.dumps(
            dataclasses.asdict(dataclasses.replace(self, note=note)), ensure_ascii=False
        )


def post_of(text: str) -> Post:
    """What `Post.text` wrote."""
    return Post(**json.loads(text))


class StatusPage:
    """The slots of all ranks in shared memory.

    Args:
        file: Of the memory, open for reading and writing.
    """

    def __init__(self, file: int, num_ranks: int):
        self._num = num_ranks
        self._memory = mmap.mmap(file, num_ranks * _SLOT_BYTES)

    def put(self, rank: int, text: str) -> None:
        """Write a rank's slot."""
        begin = rank * _SLOT_BYTES
        line = text.encode()[: _SLOT_BYTES - 1] + b"\n"
        self._memory[begin : begin + len(line)] = line

    def text(self, rank: int) -> str | None:
        """What is in a slot; None if it was never written."""
        slot = self._memory[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES]
        line, end, _ = slot.partition(b"\n")
        return line.decode(errors="replace") if end and line else None

    def entries(self) -> dict[int, str]:
        """The slots that were written."""
        texts = {rank: self.text(rank) for rank in range(self._num)}
        return {rank: text for rank, text in texts.items() if text is not None}

    def posts(self) -> dict[int, Post]:
        """What each rank says; one that was killed while it wrote says nothing."""
        found = {}
        for rank, text in self.entries().items():
            try:
                found[rank] = post_of(text)
            except (ValueError, TypeError):
                continue
        return found


def new_board(num_ranks: int) -> tuple[StatusPage, str]:
    """A board and the path by which the processes of a job open it."""
    file = os.memfd_create("hxla-board")
    os.posix_fallocate(file, 0, num_ranks * _SLOT_BYTES)
    return StatusPage(file, num_ranks), f"/proc/{os.getpid()}/fd/{file}"


def own_board() -> StatusPage | None:
    """The board of the job that this process was started for; None without a launcher."""
    path = os.environ.get(BOARD_VARIABLE)
    return open_board(path, int(os.environ["HXLA_NUM_PROCESSES"])) if path else None


def open_board(path: str, num_ranks: int) -> StatusPage | None:
    """The board of a path; None if its owner is gone, as this process will be soon."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return StatusPage(file, num_ranks)
    finally:
        os.close(file)


def say(board: StatusPage | None, rank: int, **changes: object) -> Post:
    """Change a rank's own post and return it.

    Args:
        board: None: there is nobody to tell.
        **changes: Fields of `Post`.
    """
    old = board.posts().get(rank, Post()) if board is not None else Post()
    new = dataclasses.replace(old, moved_at=time.monotonic(), **changes)  # type: ignore[arg-type]
    if board is not None:
        board.put(rank, new.text())
    return new

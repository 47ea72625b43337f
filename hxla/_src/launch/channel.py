"""Messages between the launcher and the ranks of a job, in shared memory.

Each slot has one writer and any number of readers, so a killed or frozen rank blocks no other one,
and no message goes through a third process. A checksum detects partly written messages.

A rank is a member of a generation: it sends heartbeats and follows orders. A separate thread does
both, as the main one may be stuck in a collective with a lost process.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import mmap
import os
import pathlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from ..core.errors import LaunchError
from ..core.types import EXIT_PREEMPTED
from .membership import left_folder

CHANNEL_VARIABLE = "HXLA_CHANNEL"  # path of the page
LOGS_VARIABLE = "HXLA_LOGS"  # folder for noise in the output
#: Of members only: number of the generation, folder for states in memory, name of the job for all
#: generations, and number of the generation's processes on this host.
GENERATION_VARIABLE, MEMORY_VARIABLE = "HXLA_GENERATION", "HXLA_MEMORY"
JOB_VARIABLE, NEIGHBOURS_VARIABLE = "HXLA_JOB", "HXLA_NEIGHBOURS"
#: Set while another process still uses the device.
WAITS_VARIABLE = "HXLA_WAITS"

_SLOT_BYTES = 4096
_NOTE_BYTES = 1500  # up to twice as many as JSON
_TRIES = 100

#: Message about a rank whose script ended while another rank waits for it.
ENDED = (
    "ended its script, and another rank waits for it: every rank has to make the same calls of hxla"
)

State = Literal[
    "starting", "running", "finished", "left", "failed", "victim", "judged", "preempted"
]


#: Phases within a step; other phases are between two steps.
STEP_PHASES = frozenset({"data", "microbatches", "reduce", "update", "callback"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The position and state of a rank.

    Attributes:
        step: The number of updates before the present step; -1 before the first.
        phase: The phase of that step.
        state: `starting` before a session, `running` in one, `finished` after it; `left` a session
            by `sys.exit`, `failed` by an error, `victim` of another rank's end, `judged` another
            rank dead or stuck, `preempted` by SIGTERM.
        note: The error, or the reason of the judgement.
        blamed: The rank that was judged.
        exit_code: The exit code of the process, which is about to end.
        moved_at: When step, phase or state last changed, by `time.monotonic` of its machine.
        step_seconds: Seconds of the last step.
        session: Number of sessions that this process has opened.
        left_session: Number of the last session that an error ended; 0 without one.
        has_ended: Whether its script has ended.
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
        """The step and phase in words."""
        if self.step < 0:
            return f"before its first step, in phase {self.phase!r}"
        step = self.step + (self.phase in STEP_PHASES)  # updates, the present one included
        return f"at step {step} in phase {self.phase!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The progress of a member of a generation.

    Attributes:
        is_prepared: Whether it is ready and waits for its generation to be formed.
        is_joined: Whether it has the state of the first step.
        saved_step: The step of the newest complete checkpoint.
        part: Index of the part of a state that it writes.
        num_parts: Number of parts of a whole state.
        left_step: The step of the state that it left in memory.
        digest: The SHA-256 of its part of that state.
        copies: The SHA-256 of its parts of copies in memory, by step.
        asked_back: Whether it got a SIGTERM.
        is_finished: Whether training is done and its results are written.
        num_microbatches: Microbatches of a step; 0 if not yet known.
        ran: Work in the last step: microbatches, concurrent microbatches, and their seconds; 0
            microbatches if a replica has several devices.
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
    """The order to a member of a generation.

    Attributes:
        begins: Whether its generation is formed, so that it may begin.
        state: The folders of all parts of its first state; empty for the newest checkpoint or a new
            state.
        stops: Whether to request a last step, after which each member leaves its state in memory.
        ends: Whether to request a last step, after which a checkpoint is written.
        leaves: Whether to leave its last complete state in memory at once, and end.
    """

    begins: bool = False
    state: Sequence[str] = ()
    stops: bool = False
    ends: bool = False
    leaves: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """The status, report and exit code of a rank.

    Attributes:
        code: Its exit code, negative for a signal; None while it lives.
        ended_at: When its end was first seen, by `time.monotonic`.
    """

    rank: int
    status: Status
    report: Report = dataclasses.field(default_factory=Report)
    code: int | None = None
    ended_at: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether its script has ended."""
        return self.status.has_ended or self.code == 0


_Message = TypeVar("_Message", Status, Report, Order)
_KINDS: tuple[type, ...] = (Status, Report, Order)


class RankStatuses(Protocol):
    """A store of the statuses of ranks."""

    def tell(self, rank: int, status: Status, /) -> None:
        """Write the status of this process's rank."""

    def statuses(self) -> Mapping[int, Status]:
        """The written statuses, by rank."""


class Channel:
    """A page of memory with three slots for each rank: its status, its report and its order.

    Args:
        file: Descriptor of the memory, open for reading and writing.
    """

    def __init__(self, file: int, num_ranks: int):
        self._file, self._num = file, num_ranks
        self._page = mmap.mmap(file, num_ranks * len(_KINDS) * _SLOT_BYTES)
        self._last: dict[int, tuple[bytes, Any]] = {}  # last line and message, by slot

    def tell(self, rank: int, message: Status | Report | Order) -> None:
        """Write a message from or to a rank."""
        text = text_of(message).encode()
        line = b"%08x%b" % (zlib.crc32(text), text)
        begin = self._begin(type(message), rank)
        self._page[begin : begin + min(len(line) + 1, _SLOT_BYTES)] = (
            line[: _SLOT_BYTES - 1] + b"\n"
        )

    def read(self, kind: type[_Message], rank: int) -> _Message:
        """The last complete message of a kind, or its default."""
        return self._read(kind, rank) or kind()

    def statuses(self) -> dict[int, Status]:
        every = {rank: self._read(Status, rank) for rank in range(self._num)}
        return {rank: status for rank, status in every.items() if status is not None}

    def close(self) -> None:
        """Release the memory, in the process that made it."""
        self._page.close()
        os.close(self._file)

    def _begin(self, kind: type, rank: int) -> int:
        return (_KINDS.index(kind) * self._num + rank) * _SLOT_BYTES

    def _read(self, kind: type[_Message], rank: int) -> _Message | None:
        begin = self._begin(kind, rank)
        before, message = self._last.get(begin, (b"", None))
        for _ in range(_TRIES):  # a message that is being written is soon complete
            line, end, _ = self._page[begin : begin + _SLOT_BYTES].partition(b"\n")
            if not end or not line:
                return None
            if line == before:
                break
            if line[:8] == b"%08x" % zlib.crc32(line[8:]):
                message = kind(**json.loads(line[8:]))
                self._last[begin] = line, message
                break
        return message


def text_of(message: Status | Report | Order) -> str:
    """A message as JSON."""
    fields = dataclasses.asdict(message)
    if "note" in fields:
        fields["note"] = fields["note"].encode()[:_NOTE_BYTES].decode(errors="ignore")
    return json.dumps(fields, ensure_ascii=False)


def new_channel(num_ranks: int) -> tuple[Channel, str]:
    """A channel, and the path by which processes open it."""
    file = os.memfd_create("hxla-channel")
    os.posix_fallocate(file, 0, num_ranks * len(_KINDS) * _SLOT_BYTES)
    return Channel(file, num_ranks), f"/proc/{os.getpid()}/fd/{file}"


def open_channel(path: str, num_ranks: int) -> Channel | None:
    """Open the channel of a path; None if its launcher has ended."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return Channel(file, num_ranks)
    finally:
        os.close(file)


@functools.cache
def own_channel() -> Channel | None:
    """The channel of this process's job; None without a launcher."""
    path = os.environ.get(CHANNEL_VARIABLE)
    return open_channel(path, int(os.environ["HXLA_NUM_PROCESSES"])) if path else None


_POLL_SECONDS = 0.1
_POLLS_OF_A_BEAT = 2
PINNED = "pinned.json"
_PATIENCE_SECONDS = 60.0  # of the main thread for an order to leave, once a peer is lost


class Member:
    """This process in its generation."""

    def __init__(self, channel: Channel, rank: int, generation: int):
        self._channel, self._rank, self.generation = channel, rank, generation
        self._report, self._order = Report(), Order()
        self._change = threading.Condition()
        self._leave: Callable[[], tuple[int, str] | None] | None = None
        self._is_asked_back: Callable[[], bool] = lambda: False
        self._has_trained = False
        self.changing = threading.Lock()
        threading.Thread(target=self._run, daemon=True, name="hxla-member").start()

    @property
    def stops(self) -> bool:
        """Whether to request a last step, after which the state is left in memory."""
        return self._order.stops

    @property
    def ends(self) -> bool:
        """Whether to request a last step, after which a checkpoint is written."""
        return self._order.ends

    @property
    def is_waited_for(self) -> bool:
        """Whether no generation trains and a state in memory waits for this one."""
        return self._order.begins and bool(self._order.state)

    def tell(self, **changes: object) -> None:
        """Change fields of this process's `Report`."""
        with self._change:
            self._report = dataclasses.replace(self._report, **changes)  # type: ignore[arg-type]
            self._channel.tell(self._rank, self._report)

    def wait_for_the_others(self) -> Sequence[str]:
        """Wait until the generation is formed; returns the folders of its first state, if any.

        Raises:
            LaunchError: If this process has trained before.
        """
        if self._has_trained:
            raise LaunchError(
                "hxla run --elastic takes scripts that train once: a second session would begin "
                "with the state of the first; start another job for it"
            )
        self._has_trained = True
        self.wait_before_devices()
        return self._order.state

    def wait_before_devices(self) -> None:
        """Wait until the generation is formed."""
        self.tell(is_prepared=True)
        with self._change:
            self._change.wait_for(lambda: self._order.begins)

    @property
    def folder(self) -> str:
        """The folder for its last state."""
        return left_folder(os.environ[MEMORY_VARIABLE], self.generation, self._rank)

    @property
    def num_neighbours(self) -> int:
        """The number of processes of its generation on this host."""
        return int(os.environ[NEIGHBOURS_VARIABLE])

    @contextlib.contextmanager
    def trains(
        self, leave: Callable[[], tuple[int, str] | None], is_asked_back: Callable[[], bool]
    ) -> Iterator[None]:
        """Within it the process has a state that can be left.

        Args:
            leave: Leaves the state in memory, in another thread and under the lock `changing`.
                Returns its step and digest, or None if it cannot be left.
        """
        self._leave, self._is_asked_back = leave, is_asked_back
        try:
            yield
        finally:
            self._leave = None

    def stay_to_leave(self) -> None:
        """Wait for the order to leave, which ends this process, after another member was lost."""
        time.sleep(_PATIENCE_SECONDS)

    def _run(self) -> None:
        for k in itertools.count():
            order = self._channel.read(Order, self._rank)
            asked = self._report.asked_back or self._is_asked_back()
            if not k % _POLLS_OF_A_BEAT or asked != self._report.asked_back:
                self.tell(count=self._report.count + 1, asked_back=asked)
            if order != self._order:
                with self._change:
                    self._order = order
                    self._change.notify_all()
            if order.leaves:
                self._leave_now()
            time.sleep(_POLL_SECONDS)

    def _leave_now(self) -> None:
        leave = self._leave
        if leave is not None:
            try:
                with self.changing:
                    left = leave()
                if left is not None:
                    self.tell(left_step=left[0], digest=left[1], step=left[0])
            except Exception as error:
                self.tell(note=f"{type(error).__name__}: {error}"[:300])
        os._exit(EXIT_PREEMPTED)


@functools.cache
def own_member() -> Member | None:
    """This process in its generation; None outside of `hxla run --elastic`."""
    generation, channel = os.environ.get(GENERATION_VARIABLE), own_channel()
    if generation is None or channel is None:
        return None
    return Member(channel, int(os.environ["HXLA_PROCESS_ID"]), int(generation))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned:
    """Earlier choices that decide bits, and that a resumed run or later generation keeps.

    Attributes:
        microbatch_size: Examples of a microbatch; None if nothing is pinned.
        shares: The ratio of shard sizes on the devices of a replica.
        is_chain: Whether a microbatch is a chain of segments or one program; None if not pinned.
        recomputes: Whether stages of a pipeline, or segments on shards of unlike sizes, run their
            forwards again; None if not pinned.
    """

    microbatch_size: int | None = None
    cut: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    is_chain: bool | None = None
    recomputes: bool | None = None

    @classmethod
    def read(cls, text: str) -> "Pinned":
        """Read the JSON of the fields."""
        fields = json.loads(text)
        return cls(**fields | {name: tuple(fields[name]) for name in ("cut", "shares")})


def pin(choices: Pinned) -> None:
    """Store choices for later generations."""
    path = pathlib.Path(os.environ[MEMORY_VARIABLE], PINNED)
    part = path.with_name(f"{PINNED}-{os.getpid()}")
    part.write_text(json.dumps(dataclasses.asdict(choices)))
    part.rename(path)


def pinned() -> Pinned:
    """The choices of earlier generations."""
    folder = os.environ.get(MEMORY_VARIABLE)
    if not folder:
        return Pinned()
    try:
        return Pinned.read(pathlib.Path(folder, PINNED).read_text())
    except FileNotFoundError:
        return Pinned()

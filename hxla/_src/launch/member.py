"""A process as a member of a generation: it sends heartbeats and follows orders.

A separate thread does both, as the main one may be stuck in a collective with a lost process.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..core.errors import LaunchError
from ..core.types import EXIT_PREEMPTED
from .channel import (
    GENERATION_VARIABLE,
    MEMORY_VARIABLE,
    NEIGHBOURS_VARIABLE,
    Channel,
    Order,
    Report,
    own_channel,
)
from .membership import left_folder

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

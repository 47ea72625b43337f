"""What is asked of an elastic run, wherever its authority runs."""

import dataclasses
import socket
import sys
from collections.abc import Sequence

from .._core._errors import LaunchError
from .._elastic._membership import MembershipRules

_MOST_PROCESSES = 65536
_HAND_OVER_SECONDS = 30.0  # members end the step at hand and write their state
_PREPARE_SECONDS = 600.0  # members trace and compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticWishes:
    """What is asked of an elastic run, but for where its devices come from.

    Attributes:
        command: A Python script and its arguments.
        nodes: File of the IDs of the nodes of a Ray cluster that may be used; None: all.
        least: The fewest devices to train on (minP).
        most: The most (maxP); None: one for each microbatch.
        heartbeat_seconds: How long a process may be silent.
        grace_seconds: The notice that a SIGTERM gives.
        events: File for what happens, one line of JSON each.

    Raises:
        LaunchError: If the numbers contradict each other.
    """

    command: Sequence[str]
    nodes: str | None = None
    least: int = 1
    most: int | None = None
    heartbeat_seconds: float = 10.0
    grace_seconds: float = 5.0
    events: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self._most:
            raise LaunchError(f"--min {self.least} --max {self._most}: use 1 <= min <= max")

    @property
    def _most(self) -> int:
        return _MOST_PROCESSES if self.most is None else self.most

    def rules(self) -> MembershipRules:
        """What the run keeps to; its ports are free ones of this machine."""
        return MembershipRules(
            min_devices=self.least,
            max_devices=self._most,
            num_steps=sys.maxsize,
            num_microbatches=1,
            heartbeat_seconds=self.heartbeat_seconds,
            hand_over_seconds=_HAND_OVER_SECONDS,
            prepare_seconds=_PREPARE_SECONDS,
            form_seconds=_PREPARE_SECONDS,
            ports=tuple(free_port() for _ in range(4)),
        )


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

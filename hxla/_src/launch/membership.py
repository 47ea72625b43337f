"""The values of membership: generations, what is known of a run, what happens, what is to be done.

A member is a device with its process. A generation is replaced as a whole, and its number grows: a
message that carries an older number is about processes that are no members any more.
"""

import dataclasses
import time
from typing import Literal, TypeGuard

from .kept_state import KeptState, newest

#: What a run is doing. In `running` and `preparing` it trains; `collecting` gathers what survivors
#: left after something that was not planned; `failed` and `finished` are its ends.
RunPhase = Literal[
    "running",
    "preparing",
    "handing over",
    "collecting",
    "forming",
    "waiting",
    "failed",
    "finished",
]
ENDED: tuple[RunPhase, ...] = ("failed", "finished")  #: Nothing follows them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Who trains together.

    Attributes:
        number: Its number; later ones have larger numbers.
        members: The devices, in the order of their ranks.
        port: The port of its coordinator, another than that of the generation before.
        first_step: The step that it starts from: how many are behind it.
        shares: The microbatches of each member, if they were asked for.
    """

    number: int
    members: tuple[str, ...]
    port: int
    first_step: int
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """What a run keeps to.

    Attributes:
        max_devices: The most members, maxP.
        num_steps: The steps of the whole run.
        num_microbatches: The microbatches of a step.
        heartbeat_seconds: How long a member may be silent.
        prepare_seconds: How long new processes may take to be ready beside the old ones.
        hand_over_seconds: How long members may take to stop and leave their state.
        collect_seconds: How long survivors may take to leave theirs, and a killed process to end.
        form_seconds: How long a new generation may take to join.
        most_failures: How many generations in a row may end without a step.
        ports: The ports for coordinators, used in turns; at least two.
    """

    min_devices: int
    max_devices: int
    num_steps: int
    num_microbatches: int
    heartbeat_seconds: float = 5.0
    prepare_seconds: float = 60.0
    hand_over_seconds: float = 5.0
    collect_seconds: float = 3.0
    form_seconds: float = 60.0
    most_failures: int = 3
    ports: tuple[int, ...] = (5300, 5301, 5302, 5303)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommittedRun:
    """Consecutive steps that one generation committed.

    Attributes:
        first: The first of them.
        end: The step after the last.
    """

    generation: int
    first: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """What is committed: every microbatch of every step up to `end`, once each.

    A step is one exact sum over all its microbatches, so they are committed together. What a run
    lost with the last holder of its state is taken back, and counted.

    Attributes:
        num_microbatches: The microbatches of a step.
        runs: Who committed what, without gaps.
        num_lost: Steps that were taken back.
    """

    num_microbatches: int
    runs: tuple[CommittedRun, ...] = ()
    num_lost: int = 0

    @property
    def end(self) -> int:
        """How many steps are committed."""
        return self.runs[-1].end if self.runs else 0

    def committed(self, generation: int, end: int) -> "Ledger":
        """After a generation completed all steps before `end`; some may be known already."""
        if end <= self.end:
            return self
        last = self.runs[-1] if self.runs else None
        if last is not None and last.generation == generation:
            runs = (*self.runs[:-1], dataclasses.replace(last, end=end))
        else:
            run = CommittedRun(generation=generation, first=self.end, end=end)
            runs = (*self.runs, run)
        return dataclasses.replace(self, runs=runs)

    def back_to(self, end: int) -> "Ledger":
        """After the steps from `end` on were lost; it never goes forward."""
        if end >= self.end:
            return self
        kept = (r for r in self.runs if r.first < end)
        runs = tuple(dataclasses.replace(r, end=min(r.end, end)) for r in kept)
        return dataclasses.replace(self, runs=runs, num_lost=self.num_lost + self.end - end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """All that the authority knows.

    Attributes:
        generation: The generation that trains or is formed; the last one while there is none.
        coming: The generation that is prepared beside it.
        devices: The devices that may be used, in the order in which they were offered.
        leaving: Those that were asked back, and until when.
        shares: The microbatches for each member that were asked for last.
        alive: The members of `generation` whose process has not ended.
        ready: The members that are prepared, or have joined.
        heard: When each member was heard last.
        kept: The states that members left or copied.
        left: The members of `generation` that left their last state.
        sources: What the generation that is formed starts from: all parts of a state.
        saved_step: The step of the newest checkpoint.
        until_seconds: When what it is doing takes too long.
        is_killing: Whether the members that are alive have been killed.
        num_generations: How many numbers were given out.
        num_failures: How many generations in a row ended without a step.
    """

    rules: MembershipRules
    phase: RunPhase
    generation: Generation
    ledger: Ledger
    coming: Generation | None = None
    devices: tuple[str, ...] = ()
    leaving: tuple[tuple[str, float], ...] = ()
    shares: tuple[int, ...] = ()
    alive: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    heard: tuple[tuple[str, float], ...] = ()
    kept: tuple[KeptState, ...] = ()
    left: frozenset[str] = frozenset()
    sources: tuple[KeptState, ...] = ()
    saved_step: int = 0
    until_seconds: float = float("inf")
    is_killing: bool = False
    num_generations: int = 0
    num_failures: int = 0

    @property
    def have_left(self) -> bool:
        """Whether all members that are alive have left their last state."""
        return self.alive <= self.left

    @property
    def needed(self) -> tuple[KeptState, ...]:
        """The newest state that is kept, of devices that stay if they have it; empty if saved."""
        leaving = {device for device, _ in self.leaving}
        best = newest(self.kept, leaving)
        if not best or best[0].step < self.saved_step:
            return ()
        leaves = any(one.device in leaving for one in best)
        return () if leaves and best[0].step == self.saved_step else best

    def waiting_less(self, at_seconds: float) -> "Membership":
        """While states are handed over: whoever left its own is to end soon after another did.

        It may wait for one that was killed meanwhile, which nobody else notices.
        """
        has_ended = self.alive < set(self.generation.members)
        if self.phase != "handing over" or not has_ended or not self.have_left:
            return self
        until = min(self.until_seconds, at_seconds + self.rules.collect_seconds)
        return dataclasses.replace(self, until_seconds=until)

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.phase in ENDED

    def can_note(self, event: "Happened") -> TypeGuard["Offered | AskedBack"]:
        """Whether an event may wait for the next one before anything is decided."""
        is_known = isinstance(event, AskedBack) and event.device in self.devices
        return not self.is_over and (is_known or isinstance(event, Offered))

    def noted(self, event: "Offered | AskedBack") -> "Membership":
        """What is known of devices with an event of one, before anything is decided."""
        leaving = tuple(pair for pair in self.leaving if pair[0] != event.device)
        if isinstance(event, AskedBack):
            until = event.at_seconds + event.notice_seconds
            return dataclasses.replace(self, leaving=(*leaving, (event.device, until)))
        new = () if event.device in self.devices else (event.device,)
        return dataclasses.replace(self, devices=(*self.devices, *new), leaving=leaving)

    def without(self, device: str) -> "Membership":
        """A device is gone, and with it the state that its member left."""
        return dataclasses.replace(
            self,
            devices=tuple(d for d in self.devices if d != device),
            leaving=tuple(pair for pair in self.leaving if pair[0] != device),
            kept=tuple(one for one in self.kept if one.device != device),
        )

    def silent(self, at_seconds: float) -> tuple[str, ...]:
        """Members of which nothing was heard for too long."""
        longest = self.rules.heartbeat_seconds
        return tuple(
            device
            for device, last in self.heard
            if device in self.alive and at_seconds - last > longest
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Happened:
    """Something happened, now if it is not said when."""

    at_seconds: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offered(Happened):
    """A device may be used."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedBack(Happened):
    """A device will be taken, by a scheduler or by a SIGTERM with notice."""

    device: str
    notice_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vanished(Happened):
    """A device is gone, with its processes and all that was kept there."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharesAsked(Happened):
    """The members of a generation shall run these numbers of microbatches."""

    generation: int
    shares: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(Happened):
    """A process of a generation said that it lives.

    What one process says is heard in its order, its end last.
    """

    generation: int
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared(Told):
    """It is ready: imported, compiled, and has joined nobody yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined(Told):
    """It has joined, and has the state of the generation's first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed(Told):
    """It has the state after so many steps.

    Attributes:
        num_microbatches: Those of the last step that its device ran; 0: not known.
        num_executors: How many it ran at once.
        busy_seconds: The seconds that it was busy with them.
    """

    step: int
    num_microbatches: int = 0
    num_executors: int = 1
    busy_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrote(Told):
    """Its state, or its part of it, is in a host's memory.

    Attributes:
        step: How many steps are behind it.
        digest: The SHA-256 of what was written.
        num_parts: The parts that make a whole state.
        spread: On how many hosts each part should be before older states are let go.
    """

    step: int
    digest: str
    part: int = 0
    num_parts: int = 1
    host: str = ""
    spread: int = 1

    @property
    def kept(self) -> KeptState:
        """What is there now."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(KeptState)}
        return KeptState(**own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftState(Wrote):
    """It left its state, and ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied(Wrote):
    """It copied its state and goes on, or its host got a copy of a neighbour's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exited(Told):
    """It ended, however."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Happened):
    """A checkpoint of a step is complete."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed(Happened):
    """Time passed, and nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Start processes for a generation, beside the one that trains."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discard:
    """End the processes that were prepared for a generation."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """Raise the stop flag: the members fix their last step together, leave their state and end."""

    generation: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leave:
    """Wake members if they sleep; each leaves its last complete state and ends."""

    generation: Generation
    devices: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """End members at once."""

    generation: Generation
    devices: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Let a generation join and train; where none was prepared for its number one is started.

    The end of one that was prepared is told, and no second one of that number is started.

    Attributes:
        sources: What it starts from: all parts of a state; empty: the checkpoint of its first step.
    """

    generation: Generation
    sources: tuple[KeptState, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """No checkpoint has a state that waits in memory until there are devices again."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """A device that was asked back is not needed any more."""

    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tell:
    """Say it to the user."""

    words: str


ToDo = Prepare | Discard | Stop | Leave | Kill | Form | Save | Release | Tell

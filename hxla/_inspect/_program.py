"""What a compiled program does, as values: collectives, memory, work, warnings."""

import dataclasses
from collections import Counter

from . import _shapes

OWNERS = (
    *("parameter", "optimizer state", "gradient", "activation", "batch"),
    *("padding", "output", "temporary"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an operation comes from.

    Attributes:
        task_graph: `split(2) #0`, numbered in the order the scopes were entered; empty outside all.
        module: The user's scopes around it, Flax modules among them: `Block_0/Dense_1`.
        function: The user's function that wrote it, `Block.__call__`; empty if not recorded.
        phase: `forward`, `backward`, `recomputation`, or empty where nothing is differentiated.
        primitive: What jax calls the operation.
        source: File and line of the user's code, `model.py:12`; empty if not recorded.
        missing: Why it belongs to no TaskGraph, module or function; empty if it does.
    """

    task_graph: str = ""
    module: str = ""
    function: str = ""
    phase: str = ""
    primitive: str = ""
    source: str = ""
    missing: str = ""

    @property
    def where(self) -> str:
        """TaskGraph and module, or function if it is in none; else why there is nothing."""
        found = " ".join(filter(None, (self.task_graph, self.module or self.function)))
        return found or f"? {self.missing}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop around an operation.

    Attributes:
        name: Of the `while` in the HLO.
        where: The user's scopes around it.
        trips: How often its body runs; None if the program does not say.
    """

    name: str
    where: str = ""
    trips: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program; an asynchronous pair is one.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `ragged-all-to-all`,
            `collective-permute` or `collective-broadcast`.
        name: In the HLO.
        arrays: What it works on, `f32[8,16]`: the whole of what a group gathers or scatters.
        num_bytes: Of these arrays.
        group_size: Devices that run it together.
        groups: These devices, by place in the mesh; of a permute, sources and targets.
        axes: Mesh axes that the groups run over; None if `axes_missing` says why.
        axes_missing: Why the axes are not known.
        is_async: Whether it is a start and a done that other work may run between.
        loops: Around it, outermost first.
        runs: How often it runs in one call of the program; None if some loop's trips are not known.
        is_conditional: Whether it runs only in some branch.
        operands: Arguments of the program that it works on as they are, by path.
        origin: Where it comes from.
        seconds: Predicted time of one run on the cluster's links; None without a cluster.
    """

    kind: str
    name: str
    arrays: tuple[str, ...]
    num_bytes: int
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...] | None
    axes_missing: str = ""
    is_async: bool = False
    loops: tuple[Loop, ...] = ()
    runs: int | None = 1
    is_conditional: bool = False
    operands: tuple[str, ...] = ()
    origin: Origin
    seconds: float | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in one run, over a ring."""
        n = self.group_size
        if self.kind == "all-reduce":
            return 2 * self.num_bytes * (n - 1) / n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.num_bytes)
        return self.num_bytes * (n - 1) / n

    @property
    def over(self) -> str:
        """The axes in words: `data+tensor`, or what is known of the groups."""
        if self.axes is not None:
            return "+".join(self.axes) or "no axis"
        return f"{self.group_size} devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory held when the program's use of it is highest.

    Attributes:
        name: Path of an argument, or an instruction of the HLO.
        owner: One of `parameter`, `optimizer state`, `gradient`, `activation`, `batch`, `padding`,
            `output`, `temporary`.
        num_bytes: On one device.
        array: `f32[8,16]`.
        origin: Of what is computed.
    """

    name: str
    owner: str
    num_bytes: int
    array: str = ""
    origin: Origin = dataclasses.field(default_factory=Origin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device at the program's peak.

    Attributes:
        argument_bytes: Of arguments.
        output_bytes: Of results, those that take over an argument's memory included.
        alias_bytes: Of results that take over an argument's memory.
        temp_bytes: Of everything between.
        buffers: What is held at the peak, largest first; they add up to `total_bytes`.
        source: What the buffers were read from.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    buffers: tuple[Buffer, ...]
    source: str

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporaries, less what is aliased: the compiler's own figure."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def by_owner(self) -> dict[str, int]:
        """Bytes of each owner that has any."""
        sums: Counter[str] = Counter()
        for buffer in self.buffers:
            sums[buffer.owner] += buffer.num_bytes
        return {owner: sums[owner] for owner in OWNERS if sums[owner]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramArray:
    """An argument of the program, and how it lies on the mesh.

    Attributes:
        path: `params['Dense_0']['kernel']`, as jax names it; empty if the text has no names.
        owner: As of a `Buffer`.
        dtype: `f32`.
        shape: Of the whole array; of one device's part where the whole is not known.
        local_shape: Of one device's part.
        spec: For each dimension the mesh axes that cut it; None if not known.
        is_donated: Whether a result takes over its memory.
    """

    path: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] | None = None
    is_donated: bool = False

    @property
    def local(self) -> str:
        """One device's part in words: `f32[8,16]`."""
        return _shapes.array_text(self.dtype, self.local_shape)

    @property
    def num_bytes(self) -> int:
        """Of one device's part."""
        return _shapes.shape_bytes(self.local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskGraphWork:
    """What one TaskGraph does in one call of the program, on one device.

    Attributes:
        task_graph: As in `Origin`; empty for what is outside all of them.
        flops: Of matrix products and convolutions, a multiply-add being two.
        num_bytes: Read and written by what is not fused into another operation.
        num_collectives: Runs of collectives.
        collective_bytes: Sent by one device over rings.
        collective_seconds: Predicted; None without a cluster.
        is_exact: False where a loop's trips are not known and count once.
    """

    task_graph: str
    flops: float
    num_bytes: float
    num_collectives: int
    collective_bytes: float
    collective_seconds: float | None = None
    is_exact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion:
    """A fused operation.

    Attributes:
        name: In the HLO.
        array: Its result.
        flops: Of one run.
        num_bytes: Read and written in one run.
        runs: In one call of the program; None if not known.
        origin: Of its result.
    """

    name: str
    array: str
    flops: float
    num_bytes: int
    runs: int | None
    origin: Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A transfer between host and device, or a call back into Python.

    Attributes:
        kind: `to host`, `to device`, `callback`, `infeed`, `outfeed`.
        name: In the HLO.
        num_bytes: Of one run.
        runs: In one call of the program; None if not known.
        origin: Where it comes from.
    """

    kind: str
    name: str
    num_bytes: int
    runs: int | None
    origin: Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned:
    """Something that costs time or memory and that nobody asked for.

    Attributes:
        kind: `replicated`, `hoistable`, `reshard`, `padding`, `unused axis` or `donation`.
        text: What it is, where, how much, and what to do.
        num_bytes: What is at stake on one device.
    """

    kind: str
    text: str
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program.

    Attributes:
        name: Of the HLO module.
        role: What hxla uses it for; empty for programs that are not hxla's.
        source: File it was read from, or `live`.
        num_devices: That run it together.
        mesh: Axes and their sizes; empty if not known.
        arrays: Its arguments.
        collectives: In the order of the text.
        memory: At its peak; None if `memory_missing` says why.
        memory_missing: Why memory is not known.
        work: Per TaskGraph, what is outside all of them last.
        fusions: The biggest, by bytes.
        transfers: Between host and device.
        warnings: Largest stake first.
        problems: What could not be read.
    """

    name: str
    role: str = ""
    source: str = ""
    num_devices: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    arrays: tuple[ProgramArray, ...] = ()
    collectives: tuple[Collective, ...] = ()
    memory: Memory | None = None
    memory_missing: str = ""
    work: tuple[TaskGraphWork, ...] = ()
    fusions: tuple[Fusion, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    warnings: tuple[Warned, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name, and its role where it has one."""
        return f"{self.name} ({self.role})" if self.role else self.name

    def select(
        self,
        kind: str | None = None,
        *,
        axis: str | None = None,
        task_graph: str | None = None,
        module: str | None = None,
    ) -> tuple[Collective, ...]:
        """Collectives of a kind, over an axis, of a TaskGraph (by its start), in a module path."""
        return tuple(
            c
            for c in self.collectives
            if (kind is None or c.kind == kind)
            and (axis is None or (c.axes is not None and axis in c.axes))
            and (task_graph is None or c.origin.task_graph.startswith(task_graph))
            and (module is None or module in c.origin.module)
        )

    @property
    def total(self) -> TaskGraphWork:
        """The sum over TaskGraphs."""
        times = [w.collective_seconds for w in self.work if w.num_collectives]
        known = [t for t in times if t is not None]
        return TaskGraphWork(
            task_graph="all",
            flops=sum(w.flops for w in self.work),
            num_bytes=sum(w.num_bytes for w in self.work),
            num_collectives=sum(w.num_collectives for w in self.work),
            collective_bytes=sum(w.collective_bytes for w in self.work),
            collective_seconds=sum(known) if times and len(known) == len(times) else None,
            is_exact=all(w.is_exact for w in self.work),
        )

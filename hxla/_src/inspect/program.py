"""The values of an inspection: collectives, memory, work, warnings."""

import dataclasses
from collections import Counter

from .hlo_text import array_text, shape_bytes

OWNERS = (
    *("parameter", "optimizer state", "gradient", "activation", "batch"),
    *("padding", "output", "temporary"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of an operation.

    Attributes:
        task_graph: The TaskGraph, `split(2) #0`, numbered in the order the scopes were entered;
            empty outside all.
        module: The user's scopes around it, Flax modules among them: `Block_0/Dense_1`.
        function: The user's function that wrote it, `Block.__call__`; empty if not recorded.
        phase: The phase: `forward`, `backward`, `recomputation`, or empty where nothing is
            differentiated.
        primitive: The name that jax has for the operation.
        source: The file and line of the user's code, `model.py:12`; empty if not recorded.
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
        """The TaskGraph and the module, or else the function; if none is known, the reason."""
        names = " ".join(filter(None, (self.task_graph, self.module or self.function)))
        return names or f"? {self.missing}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop around an operation.

    Attributes:
        name: The name of the `while` in the HLO.
        where: The user's scopes around it.
        trips: How often its body runs; None if the program does not say.
    """

    name: str
    where: str = ""
    trips: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program; an asynchronous pair counts as one.

    Attributes:
        kind: The kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`,
            `ragged-all-to-all`, `collective-permute` or `collective-broadcast`.
        name: The name in the HLO.
        arrays: Its arrays, `f32[8,16]`; if a group gathers or scatters them, the whole arrays.
        num_bytes: The bytes of these arrays.
        group_size: The number of devices that run it together.
        groups: These devices, by place in the mesh; for a permute, sources and targets.
        axes: The mesh axes that the groups run over; None if `axes_missing` says why.
        axes_missing: Why the axes are not known.
        is_async: Whether it is a start and a done that other work may run between.
        loops: The loops around it, outermost first.
        runs: How often it runs in one call of the program; None if a loop's trips are not known.
        is_conditional: Whether it runs only within a branch.
        operands: Its operands that are arguments of the program, by path.
        origin: The origin of the operation.
        seconds: The predicted seconds of one run on the cluster's links; None without a cluster.
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
        """The bytes that one device sends in one run, over a ring."""
        n = self.group_size
        if self.kind == "all-reduce":
            return 2 * self.num_bytes * (n - 1) / n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.num_bytes)
        return self.num_bytes * (n - 1) / n

    @property
    def over(self) -> str:
        """The axes in words, `data+tensor`, or else the size of the groups."""
        if self.axes is not None:
            return "+".join(self.axes) or "no axis"
        return f"{self.group_size} devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer at the peak of a program's memory.

    Attributes:
        name: The path of an argument, or an instruction of the HLO.
        owner: The owner: `parameter`, `optimizer state`, `gradient`, `activation`, `batch`,
            `padding`, `output` or `temporary`.
        num_bytes: The bytes on one device.
        array: The dtype and shape, `f32[8,16]`.
        origin: The origin of its value.
    """

    name: str
    owner: str
    num_bytes: int
    array: str = ""
    origin: Origin = dataclasses.field(default_factory=Origin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device at a program's peak.

    Attributes:
        argument_bytes: The bytes of arguments.
        output_bytes: The bytes of results, those that take over an argument's memory included.
        alias_bytes: The bytes of results that take over an argument's memory.
        temp_bytes: The bytes of temporaries.
        buffers: The buffers at the peak, largest first; they add up to `total_bytes`.
        source: The source of these figures.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    buffers: tuple[Buffer, ...]
    source: str

    @property
    def total_bytes(self) -> int:
        """The bytes of arguments, outputs and temporaries less aliased ones, as XLA counts."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def by_owner(self) -> dict[str, int]:
        """The bytes of each owner that has any."""
        sums: Counter[str] = Counter()
        for buffer in self.buffers:
            sums[buffer.owner] += buffer.num_bytes
        return {owner: sums[owner] for owner in OWNERS if sums[owner]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramArray:
    """An argument of a program and its sharding.

    Attributes:
        path: The path as jax names it, `params['Dense_0']['kernel']`; empty if the text has no
            names.
        owner: The owner, as of a `Buffer`.
        dtype: The dtype as XLA names it, `f32`.
        shape: The shape of the whole array, or of one device's shard if the whole is not known.
        local_shape: The shape of one device's shard.
        spec: The mesh axes that shard each dimension; None if not known.
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
        """One device's shard in words: `f32[8,16]`."""
        return array_text(self.dtype, self.local_shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of one device's shard."""
        return shape_bytes(self.local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskGraphWork:
    """The work of one TaskGraph in one call of the program, on one device.

    Attributes:
        task_graph: The TaskGraph, as in `Origin`; empty for the work outside all of them.
        flops: The operations of matrix products and convolutions; a multiply-add counts as two.
        num_bytes: The bytes read and written by operations that are not fused into others.
        num_collectives: The runs of collectives.
        collective_bytes: The bytes sent by one device over rings.
        collective_seconds: The predicted seconds; None without a cluster.
        is_exact: Whether the trips of every loop are known; a loop of unknown trips counts once.
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
        name: The name in the HLO.
        array: The dtype and shape of its result.
        flops: The floating-point operations of one run.
        num_bytes: The bytes read and written in one run.
        runs: How often it runs in one call of the program; None if not known.
        origin: The origin of its result.
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
        kind: The kind: `to host`, `to device`, `callback`, `infeed`, `outfeed`.
        name: The name in the HLO.
        num_bytes: The bytes of one run.
        runs: How often it runs in one call of the program; None if not known.
        origin: The origin of the operation.
    """

    kind: str
    name: str
    num_bytes: int
    runs: int | None
    origin: Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned:
    """A warning of something unasked that costs time or memory.

    Attributes:
        kind: The kind: `replicated`, `hoistable`, `reshard`, `padding`, `unused axis` or
            `donation`.
        text: The cause, the place, the cost and the remedy.
        num_bytes: The bytes at stake on one device.
    """

    kind: str
    text: str
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program.

    Attributes:
        name: The name of the HLO module.
        role: The role in hxla's step; empty for programs that are not hxla's.
        source: The file it was read from, or `live`.
        num_devices: The number of devices that run it together.
        mesh: The axes and their sizes; empty if not known.
        arrays: The arguments.
        collectives: The collectives in the order of the text.
        memory: The memory at its peak; None if `memory_missing` says why.
        memory_missing: Why memory is not known.
        work: The work of each TaskGraph, and last the work outside all of them.
        fusions: The biggest fused operations, by bytes.
        transfers: The transfers between host and device.
        warnings: The warnings, the one with most bytes at stake first.
        problems: The parts that could not be read, and why.
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
    def mesh_text(self) -> str:
        """The mesh in words, `data=2 x tensor=4`; empty if not known."""
        return " x ".join(f"{name}={n}" for name, n in self.mesh)

    @property
    def title(self) -> str:
        """The name, and the role where it has one."""
        return f"{self.name} ({self.role})" if self.role else self.name

    def select(
        self,
        kind: str | None = None,
        *,
        axis: str | None = None,
        task_graph: str | None = None,
        module: str | None = None,
    ) -> tuple[Collective, ...]:
        """Find collectives.

        Args:
            kind: Only those of this kind, `all-gather`.
            axis: Only those over this mesh axis.
            task_graph: Only those of TaskGraphs whose name starts so: `split(4)`.
            module: Only those whose module path contains this.

        Returns:
            The collectives in the order of the text.
        """
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

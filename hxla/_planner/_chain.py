"""Cutting a chain of layers into stages: the problem and its solution, as numbers."""

import dataclasses

UNBOUNDED = 2.0**60  # bytes of memory: no limit that a plan could meet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Like devices, each "device" of which may be a whole tensor-parallel group.

    Attributes:
        kind: Name, for messages.
        num_devices: How many there are.
        memory_bytes: That each may use.
        forward_seconds: Of one microbatch, per layer of the chain.
        backward_seconds: The same for backward.
        update_seconds: Optimizer update per layer, once a step.
        parameter_bytes: Per layer, on one device.
        stash_bytes: Per layer, what one microbatch keeps on one device from its forward to its
            backward.
    """

    kind: str
    num_devices: int
    memory_bytes: float
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rings:
    """What sums over copies of a stage take as rings over the links that they pass.

    A ring's reduce-scatter and all-gather send `2 (n - 1) / n` of the bytes of a stage of n copies,
    so that rates are those of very many copies and n of them take `(n - 1) / n` of it.

    Attributes:
        inside_seconds: Per group, seconds per byte of gradient where all copies of a stage are in
            one node.
        copies_inside: Per group, the most copies of a stage that one node holds.
        num_nodes: Per group, how many nodes it has.
        card_seconds: `card_seconds[a][b]`: seconds per byte that a copy sends from a node of group
            a to another of group b, where no node is of two groups; else none.
        card_sum_seconds: There, seconds per byte of gradient that a card is busy with the ring of a
            stage of very many copies in several nodes.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3.
    """

    inside_seconds: tuple[float, ...]
    copies_inside: tuple[int, ...]
    num_nodes: tuple[int, ...] = ()
    card_seconds: tuple[tuple[float, ...], ...] = ()
    card_sum_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of layers and the devices that may hold its stages.

    Attributes:
        groups: One per kind of device; all have the same number of layers.
        num_microbatches: Of a global batch, over all replicas.
        state_factor: Bytes of a device per byte of parameters: 1 for the parameters, 1 for the
            gradient's sum and what the optimizer keeps (Adam: 2).
        workspace_bytes: That every device needs besides.
        keeps_inputs: Whether a microbatch in flight keeps its stage's input only, of which the
            backward makes the stash of the whole stage again, one microbatch at a time. The
            first stage's input is the batch, which counts elsewhere.
        output_bytes: Per layer, what one microbatch sends to the next layer.
        send_seconds: `send_seconds[a][b]`: seconds per byte from a device of group a to one of b.
        send_latency_seconds: The same for the latency of one message.
        reduce_seconds: Per group, seconds per byte of gradient of the reduction over replicas
            (0: not counted).
        rings: What of that falls to few copies, or to those in one node; None: it is the same for
            all, as where it was measured.
    """

    groups: tuple[Group, ...]
    num_microbatches: int
    output_bytes: tuple[float, ...]
    state_factor: float = 4.0
    workspace_bytes: float = 0.0
    keeps_inputs: bool = False
    send_seconds: tuple[tuple[float, ...], ...] = ()
    send_latency_seconds: tuple[tuple[float, ...], ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    rings: Rings | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSort:
    """Replicas of one sort: the kind of each stage's device.

    Attributes:
        groups: Index of the group of each stage's device.
        count: How many such replicas there are.
        num_microbatches: That each of them runs in a step.
    """

    groups: tuple[int, ...]
    count: int
    num_microbatches: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staging:
    """A cut of the chain and a placement of its stages.

    Attributes:
        cuts: First layer of each stage; begins with 0. All replicas share it.
        replicas: Sorts of replicas; their microbatches sum to the chain's.
        step_seconds: Predicted time of a step.
    """

    cuts: tuple[int, ...]
    replicas: tuple[ReplicaSort, ...]
    step_seconds: float

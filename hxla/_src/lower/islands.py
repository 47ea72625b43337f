"""The meetings of islands: averages of their parameters and of the optimizer's state.

Between two meetings islands update apart, and their replicas differ. At a meeting each island sends
the change of its parameters since the last meeting, and its optimizer's state. Islands are added in
their order, weighted by their microbatches, so the mean does not depend on the number of replicas.
Over a link between two islands each element is sent twice, as in a float all-reduce.

References:
    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    algorithm 1 (outer step with Nesterov momentum).
    Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers", 2025 (averages of the
    optimizer's state).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import DATA_AXIS
from ..jax.jaxpr import needed_for
from ..jax.rounded import divided, rounded
from ..plan.parts import Islands
from ..plan.plan import Plan
from .chunks import concatenated, cut
from .contribution import at_least_1d, buckets
from .inputs import Training
from .replica import ReplicaArrays
from .state_layout import StateLayout

_FLOATS = ("float32", "bfloat16", "float16")


def _check(layout: StateLayout, training: Training, trained: Sequence[int]) -> None:
    """Refuse what islands cannot average.

    Raises:
        PlanError: With the variable or the array, and the remedy.
    """
    names, num, first = layout.names(), len(layout.specs.params), layout.first_state
    merges = layout.reducer.layout.tensors.merges
    for name, rule in zip(names[num:], merges, strict=False):
        if rule != "same":
            raise PlanError(
                f"islands: variable {name!r} changes in a step (merge rule {rule!r}), and islands "
                "average parameters and the optimizer's state only: use layers without running "
                "statistics, such as LayerNorm, or leave islands out"
            )
    if training.over_batch is not None:
        raise PlanError(
            "islands: a loss over the whole batch (hxla.over_batch) reads the parameters of all "
            "islands, which differ between meetings: leave islands out"
        )
    if not training.mean:
        raise PlanError(
            "communication.gradient: islands sum their own microbatches only, so 'sum' would be a "
            "part of the gradient: use 'mean'"
        )
    for k in (*trained, *range(first, len(names))):
        dtype = layout.shapes[k].dtype
        if jnp.issubdtype(dtype, jnp.inexact) and str(dtype) not in _FLOATS:
            raise PlanError(
                f"islands: {names[k]} is {dtype}, and what islands send is float32: use "
                f"{', '.join(_FLOATS)}, or leave islands out"
            )
    if unlike := _unlike_integers(layout, training, len(trained)):
        k = first + unlike[0]
        raise PlanError(
            f"islands: {names[k]} is {layout.shapes[k].dtype} and depends on "
            "gradients, which differ between islands, and integers have no average: use another "
            "optimizer, or leave islands out"
        )


def _unlike_integers(layout: StateLayout, training: Training, num_params: int) -> list[int]:
    """Integer leaves of the optimizer's state, by number, that may differ between islands."""
    closed, shapes = training.written_update, layout.shapes[layout.first_state :]
    loss = len(closed.jaxpr.invars) - 1  # that of all islands

    def is_alike(k: int) -> bool:
        """Whether a leaf follows from leaves of the state and the loss alone."""
        todo, seen = [num_params + k], {loss}
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            if not num_params <= place < num_params + len(shapes):
                return False
            seen.add(place)
            todo += needed_for(closed, place).arguments
        return True

    integers = [k for k, x in enumerate(shapes) if not jnp.issubdtype(x.dtype, jnp.inexact)]
    return [k for k in integers if not is_alike(k)]


@dataclasses.dataclass
class OuterState:
    """What a session keeps from one meeting to the next, equal on all replicas.

    Attributes:
        anchors: For each local replica its trained parameters after the last meeting.
        momenta: For each local replica their momentum; empty without momentum.
    """

    anchors: list[list[jax.Array]] = dataclasses.field(default_factory=list)
    momenta: list[list[jax.Array]] = dataclasses.field(default_factory=list)

    def num_bytes(self) -> int:
        """Bytes on a device."""
        arrays = [x for each in (self.anchors, self.momenta) for x in (each[0] if each else ())]
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Arrays of one program.

    Attributes:
        places: In `ReplicaArrays.leaves`.
        numbers: Of trained parameters their numbers; empty: they are of the optimizer's state.
    """

    places: tuple[int, ...]
    numbers: tuple[int, ...]


class Meetings:
    """The programs of the meetings of a plan's islands.

    Args:
        trained: Places of the trained parameters.
        bucket_bytes: The most bytes that one program averages, but for a larger array.

    Attributes:
        islands: When they meet, and how.
    """

    def __init__(
        self, layout: StateLayout, trained: Sequence[int], islands: Islands, bucket_bytes: int
    ):
        self.islands, self._layout, self._arrays = islands, layout, layout.reducer.arrays
        self._trained, self._specs = tuple(trained), layout.specs.leaves()
        first, shapes = layout.first_state, layout.shapes
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in shapes]
        of_state = [k for k in range(first, len(shapes)) if is_float[k]]
        self._buckets = [
            _Bucket(tuple(places[i] for i in bucket), tuple(bucket) if are_params else ())
            for places, are_params in ((self._trained, True), (of_state, False))
            for bucket in buckets([shapes[k].size for k in places], bucket_bytes >> 2)
        ]
        self._programs: list[Any] = []

    def begin(self, outer: OuterState, held: Sequence[ReplicaArrays]) -> None:
        """Remember the parameters, which are equal on all replicas now."""
        outer.anchors = [[jnp.copy(r.params[k]) for k in self._trained] for r in held]
        if self.islands.momentum and not outer.momenta:
            outer.momenta = [
                [jnp.zeros_like(x, jnp.float32) for x in anchors] for anchors in outer.anchors
            ]

    # -- a meeting -------------------------------------------------------------------------------

    def compile(self, outer: OuterState, held: Sequence[ReplicaArrays]) -> None:
        """Compile the programs, so that no meeting waits for a compiler."""
        if self._programs:
            return
        counts = np.ones(len(self.islands.replicas), np.int32)
        leaves = [arrays.leaves() for arrays in held]
        self._programs = [
            self._program(bucket).lower(*self._arguments(bucket, leaves, outer, counts)).compile()
            for bucket in self._buckets
        ]

    def meet(self, outer: OuterState, held: Sequence[ReplicaArrays], counts: Sequence[int]) -> None:
        """Average the parameters and the optimizer's state of the islands, on all replicas.

        Every process calls this after the same update.

        Args:
            counts: Microbatches of each island in a step.
        """
        leaves = [arrays.leaves() for arrays in held]
        for bucket, program in zip(self._buckets, self._programs, strict=True):
            results = program(*self._arguments(bucket, leaves, outer, np.array(counts, np.int32)))
            if self._arrays.is_ring:
                # Gloo mixes up collectives that do not depend on each other.
                jax.block_until_ready(results)
            new = [list(map(self._own, bucket.places, each)) for each in results if each]
            _put(leaves, bucket.places, new[0])
            for kept, each in zip((outer.anchors, outer.momenta), new[1:], strict=False):
                _put(kept, bucket.numbers, each)
        for arrays, mine in zip(held, leaves, strict=True):
            after = self._layout.replica_arrays(mine)
            arrays.params, arrays.opt_state = after.params, after.opt_state

    def _own(self, k: int, x: jax.Array) -> list[jax.Array]:
        """The local replicas' arrays of a result."""
        shape = self._like(k).shape
        parts = self._arrays.local_parts(x, self._specs[k])
        return [part if part.shape == shape else part.reshape(shape) for part in parts]

    def _like(self, k: int) -> Any:
        """The shape of an array on a replica, with its padding."""
        return self._layout.paddings[k].like(self._layout.shapes[k])

    def _arguments(
        self,
        bucket: _Bucket,
        leaves: Sequence[Sequence[jax.Array]],
        outer: OuterState,
        counts: np.ndarray,
    ) -> tuple[Any, ...]:
        """Global arrays that a bucket's program reads: those of all places, concatenated."""
        specs, local = self._specs_of(bucket), self._layout.reducer.local
        nothing: list[list[jax.Array]] = [[] for _ in local]
        trees = [[[each[k] for k in bucket.places] for each in leaves]]
        for kept in (outer.anchors, outer.momenta):
            trees.append([[each[n] for n in bucket.numbers] for each in kept] or nothing)
        stacked = [
            self._arrays.stack(
                specs[: len(tree[0])],
                [[x.reshape(at_least_1d(x.shape)) for x in each] for each in tree],
            )
            for tree in trees
        ]
        given = [[r.put(np.append(counts, np.int32(0)))] for r in local]
        return (*stacked, *self._arrays.stack([P(None)], given))

    def _specs_of(self, bucket: _Bucket) -> list[P]:
        """PartitionSpecs of a bucket's arrays, which have one dimension or more."""
        specs = [self._specs[k] for k in bucket.places]
        return [spec if len(spec) else P(None) for spec in specs]

    def _program(self, bucket: _Bucket) -> Any:
        """`(leaves, anchors, momenta, counts and a zero) -> (leaves, anchors, momenta)`."""
        arrays, islands = self._arrays, self.islands
        dtypes = [self._like(k).dtype for k in bucket.places]

        def means(values: list[jax.Array], given: jax.Array) -> list[jax.Array]:
            """float32: means over islands, the weights being their microbatches."""
            counts, zero = given[:-1].astype(jnp.float32), given[-1]
            flat = concatenated([x.astype(jnp.float32) for x in values])

            def mean(each: list[jax.Array]) -> jax.Array:
                terms = [rounded(x * counts[i], zero) for i, x in enumerate(each)]
                mean = divided(functools.reduce(jnp.add, terms), counts.sum(), zero)
                # Else a learning rate in the state would be rounded.
                is_equal = functools.reduce(jnp.logical_and, [x == each[0] for x in each])
                return jnp.where(is_equal, each[0], mean)

            return cut(_of_all_islands(mean, flat, islands, zero), values)

        def hxla_meet(
            leaves: list[jax.Array],
            anchors: list[jax.Array],
            momenta: list[jax.Array],
            given: jax.Array,
        ) -> Any:
            zero = given[-1]
            if not bucket.numbers:
                new = means(leaves, given)
                return [x.astype(d) for x, d in zip(new, dtypes, strict=True)], [], []
            moved = [a.astype(jnp.float32) - x for a, x in zip(anchors, leaves, strict=True)]
            steps = means(moved, given)
            if islands.momentum:
                mu = np.float32(islands.momentum)
                momenta = [rounded(mu * v, zero) + g for v, g in zip(momenta, steps, strict=True)]
                steps = [g + rounded(mu * v, zero) for v, g in zip(momenta, steps, strict=True)]
            if islands.learning_rate != 1:
                rate = np.float32(islands.learning_rate)
                steps = [rounded(rate * g, zero) for g in steps]
            new = [
                (a.astype(jnp.float32) - g).astype(d)
                for a, g, d in zip(anchors, steps, dtypes, strict=True)
            ]
            # Two arrays of the same values: the next update donates one.
            return new, [jax.lax.optimization_barrier(x) for x in new], momenta

        specs = self._specs_of(bucket)
        of_params = specs if bucket.numbers else []
        of_momenta = of_params if islands.momentum else []
        trees = specs, of_params, of_momenta
        return jax.jit(
            jax.shard_map(
                hxla_meet,
                mesh=arrays.mesh,
                in_specs=(
                    *([arrays.stacked(s) for s in tree] for tree in trees),
                    arrays.stacked(P(None)),
                ),
                out_specs=trees,
                check_vma=False,
            ),
            donate_argnums=(0, 1, 2),
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def saved(self, outer: OuterState) -> list[jax.Array]:
        """The momentum as global arrays; every process calls this."""
        columns = zip(*outer.momenta, strict=True)
        return [
            self._arrays.over_all(list(x), self._specs[k])
            for x, k in zip(columns, self._trained if outer.momenta else (), strict=True)
        ]

    def wanted(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the argument of `load`."""
        places = self._trained if self.islands.momentum else ()
        shardings = [self._arrays.sharding(self._specs[k]) for k in places]
        return [
            jax.ShapeDtypeStruct(self._like(k).shape, jnp.float32, sharding=sharding)
            for k, sharding in zip(places, shardings, strict=True)
        ]

    def load(self, outer: OuterState, momenta: Sequence[jax.Array]) -> None:
        """Take over the momentum of a checkpoint."""
        each = [
            self._arrays.local_parts(x, self._specs[k])
            for x, k in zip(momenta, self._trained if momenta else (), strict=True)
        ]
        outer.momenta = [list(parts) for parts in zip(*each, strict=True)]


def _of_all_islands(
    function: Callable[[list[jax.Array]], jax.Array],
    flat: jax.Array,
    islands: Islands,
    zero: jax.Array,
) -> jax.Array:
    """A function of all islands' vectors, element by element, on all replicas.

    It is a reduce-scatter and an all-gather between islands. n replicas of each island take part, n
    being the size of the smallest island, each with 1/n of the vector. The result is then spread
    inside each island. Permutes depend on each other, for Gloo mixes up independent ones.

    Args:
        function: From equal parts of the islands' vectors, in order, to an array of that size.
        flat: The vector of this place's island.
        zero: See `rounded`.
    """
    members, num, senders = islands.members(), len(islands.replicas), min(islands.replicas)
    places = [(i, j) for i, size in enumerate(islands.replicas) for j in range(size)]
    island, member = jnp.asarray(np.array(places, np.int32))[jax.lax.axis_index(DATA_AXIS)]
    size = -(-flat.size // (num * senders))
    room = jnp.pad(flat, (0, num * senders * size - flat.size))
    own = room.reshape(senders, num, size)[jnp.minimum(member, senders - 1)]
    last = zero

    def exchanged(sent: Callable[[jax.Array], jax.Array], mine: jax.Array) -> list[jax.Array]:
        """The parts that each island sends to this place, with `mine` for its own island.

        Args:
            sent: From an island to the part for it.
        """
        nonlocal last
        got = jax.lax.dynamic_update_index_in_dim(jnp.zeros_like(own), mine, island, 0)
        for d in range(1, num):
            to = [members[(i + d) % num] for i in range(num)]
            pairs = [(members[i][j], to[i][j]) for i in range(num) for j in range(senders)]
            bits = jax.lax.bitcast_convert_type(sent((island + d) % num), jnp.int32)
            moved = jax.lax.ppermute(bits ^ (last & zero), DATA_AXIS, pairs)
            last = moved[0]
            part = jax.lax.bitcast_convert_type(moved, jnp.float32)
            got = jax.lax.dynamic_update_index_in_dim(got, part, (island - d) % num, 0)
        return list(got)

    result = function(exchanged(lambda i: own[i], own[island]))
    piece = jnp.stack(exchanged(lambda _: result, result))
    if max(islands.replicas) == 1:
        return piece.reshape(-1)[: flat.size]
    bits = jax.lax.bitcast_convert_type(piece, jnp.int32) ^ (last & zero)
    every = jnp.zeros((senders, num, size), jnp.int32)
    every = jax.lax.dynamic_update_index_in_dim(every, bits, member, 0)
    every = jnp.where(member < senders, every, 0)
    every = jax.lax.psum(every, DATA_AXIS, axis_index_groups=[[*each] for each in members])
    return jax.lax.bitcast_convert_type(every, jnp.float32).reshape(-1)[: flat.size]


def _put(arrays: Sequence[list[jax.Array]], places: Sequence[int], new: Sequence[Any]) -> None:
    """Replace arrays of each local replica by others."""
    for k, parts in zip(places, new, strict=True):
        for mine, x in zip(arrays, parts, strict=True):
            mine[k] = x


def meetings_of(
    plan: Plan, layout: StateLayout, training: Training, trained: Sequence[int]
) -> Meetings | None:
    """The meetings of a plan's islands; None: there are none.

    Args:
        trained: Places of the trained parameters.

    Raises:
        PlanError: If islands cannot average what is trained.
    """
    if plan.islands is None:
        return None
    _check(layout, training, trained)
    return Meetings(layout, trained, plan.islands, plan.sums.bucket_mib << 20)

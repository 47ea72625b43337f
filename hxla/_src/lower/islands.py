"""The meetings of islands: averages of what each has made of its parameters and state.

Islands update apart, so between two meetings the replicas of a run differ. At a meeting every
island sends the change of its parameters since the last one, and its optimizer's state. One
replica speaks for an island, and islands are added in their order, weighted by their microbatches:
the result depends on nothing else. A device sends and receives each element twice at most, as in a
float all-reduce.

References:
    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    algorithm 1 (outer step with Nesterov momentum).
    Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers", 2025 (averages of the
    optimizer's state).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..core.types import DATA_AXIS
from ..jax.rounded import divided, rounded
from ..plan.parts import Islands
from ..plan.plan import Plan
from .chunks import concatenated, cut
from .contribution import at_least_1d, buckets
from .inputs import Training
from .replica import ReplicaArrays
from .state_layout import StateLayout

_FLOATS = ("float32", "bfloat16", "float16")


def _check(layout: StateLayout, merges: Sequence[str], *, reads_batch: bool) -> None:
    """Refuse what islands cannot average.

    Raises:
        PlanError: With the variable or the array, and the remedy.
    """
    names, num = layout.names(), len(layout.specs.params)
    for name, rule in zip(names[num:], merges, strict=False):
        if rule != "same":
            raise PlanError(
                f"islands: variable {name!r} changes in a step (merge rule {rule!r}), and islands "
                "average parameters and the optimizer's state only: use layers without running "
                "statistics, such as LayerNorm, or leave islands out"
            )
    if reads_batch:
        raise PlanError(
            "islands: a loss over the whole batch (hxla.over_batch) reads the parameters of all "
            "islands, which differ between meetings: leave islands out"
        )
    for name, x in zip(names, layout.shapes, strict=True):
        if jnp.issubdtype(x.dtype, jnp.inexact) and str(x.dtype) not in _FLOATS:
            raise PlanError(
                f"islands: {name} is {x.dtype}, and what islands send is float32: use "
                f"{', '.join(_FLOATS)}, or leave islands out"
            )


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Arrays of one program.

    Attributes:
        places: In `ReplicaArrays.leaves`.
        are_params: Whether they are parameters; else they are arrays of the optimizer's state.
    """

    places: tuple[int, ...]
    are_params: bool


class Meetings:
    """The meetings of a run's islands.

    Args:
        trained: Places of the trained parameters.
        bucket_bytes: The most bytes that one program averages, but for a larger array.

    Attributes:
        islands: When they meet, and how.
        momenta: For each local replica the momentum of its trained parameters; empty without
            momentum. Equal on all replicas.
    """

    def __init__(
        self, layout: StateLayout, trained: Sequence[int], islands: Islands, bucket_bytes: int
    ):
        self.islands, self._layout, self._arrays = islands, layout, layout.reducer.arrays
        self._trained = tuple(trained)
        self._specs = layout.specs.leaves()
        self.momenta: list[list[jax.Array]] = [[] for _ in layout.reducer.local]
        self._anchors: list[list[jax.Array]] = []
        first, shapes = layout.first_state, layout.shapes
        floats = [k for k, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
        of_state = [k for k in floats if k >= first]
        self._buckets = [
            _Bucket(tuple(places[i] for i in bucket), are_params)
            for places, are_params in ((self._trained, True), (of_state, False))
            for bucket in buckets([shapes[k].size for k in places], bucket_bytes >> 2)
        ]
        self._programs: list[Any] = []

    # -- between meetings ------------------------------------------------------------------------

    def begin(self, held: Sequence[ReplicaArrays]) -> None:
        """Remember the parameters, which are equal on all replicas now."""
        self._anchors = [[jnp.copy(r.params[k]) for k in self._trained] for r in held]
        if self.islands.momentum and not self.momenta[0]:
            self.momenta = [
                [jnp.zeros_like(x, jnp.float32) for x in anchors] for anchors in self._anchors
            ]

    def num_bytes(self) -> int:
        """Bytes of a device for the parameters of the last meeting, and the momentum."""
        arrays = [*self._anchors[0], *self.momenta[0]] if self._anchors else []
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    # -- a meeting -------------------------------------------------------------------------------

    def compile(self, held: Sequence[ReplicaArrays]) -> None:
        """Compile the programs, so that no meeting waits for a compiler."""
        if not self._programs:
            counts = np.ones(len(self.islands.replicas), np.int32)
            self._programs = [
                self._program(bucket).lower(*self._arguments(bucket, held, counts)).compile()
                for bucket in self._buckets
            ]

    def meet(self, held: Sequence[ReplicaArrays], counts: Sequence[int]) -> None:
        """Put the islands' parameters and states together, on all replicas.

        Every process calls this after the same update.

        Args:
            counts: Microbatches of each island in a step.
        """
        self.compile(held)
        leaves = [arrays.leaves() for arrays in held]
        for bucket, program in zip(self._buckets, self._programs, strict=True):
            results = program(*self._arguments(bucket, held, np.array(counts, np.int32)))
            if self._arrays.is_ring:
                # Gloo mixes up collectives that do not depend on each other.
                jax.block_until_ready(results)
            of_leaves, anchors, momenta = results
            for n, k in enumerate(bucket.places):
                for i, x in enumerate(self._own(k, of_leaves[n])):
                    leaves[i][k] = x
                if bucket.are_params:
                    place = self._trained.index(k)
                    for i, x in enumerate(self._own(k, anchors[n])):
                        self._anchors[i][place] = x
                    for i, x in enumerate(self._own(k, momenta[n]) if momenta else ()):
                        self.momenta[i][place] = x
        for arrays, new in zip(held, leaves, strict=True):
            after = self._layout.replica_arrays(new)
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
        self, bucket: _Bucket, held: Sequence[ReplicaArrays], counts: np.ndarray
    ) -> tuple[Any, ...]:
        """Global arrays that a bucket's program reads: those of all places, concatenated."""
        specs = self._specs_of(bucket)
        leaves = [[arrays.leaves()[k] for k in bucket.places] for arrays in held]
        own: list[list[list[jax.Array]]] = [leaves, [[] for _ in held], [[] for _ in held]]
        if bucket.are_params:
            numbers = [self._trained.index(k) for k in bucket.places]
            own[1] = [[anchors[n] for n in numbers] for anchors in self._anchors]
            if self.islands.momentum:
                own[2] = [[momenta[n] for n in numbers] for momenta in self.momenta]
        stacked = [
            self._arrays.stack(
                specs[: len(each[0])],
                [[x.reshape(at_least_1d(x.shape)) for x in arrays] for arrays in each],
            )
            for each in own
        ]
        local = self._layout.reducer.local
        given = [[r.put(np.append(counts, np.int32(0)))] for r in local]
        return (*stacked, *self._arrays.stack([P(None)], given))

    def _specs_of(self, bucket: _Bucket) -> list[P]:
        """PartitionSpecs of a bucket's arrays, which have one dimension or more."""
        specs = [self._specs[k] for k in bucket.places]
        return [spec if len(spec) else P(None) for spec in specs]

    def _program(self, bucket: _Bucket) -> Any:
        """`(leaves, anchors, momenta, counts and a zero) -> (leaves, anchors, momenta)`."""
        arrays, islands, num = self._arrays, self.islands, len(self._arrays.places)
        dtypes = [self._like(k).dtype for k in bucket.places]

        def means(values: list[jax.Array], given: jax.Array) -> list[jax.Array]:
            """float32: means over islands, the weights being their microbatches."""
            counts, zero = given[:-1].astype(jnp.float32), given[-1]
            flat = concatenated([x.astype(jnp.float32) for x in values])
            size = -(-flat.size // num)
            pieces = jnp.pad(flat, (0, num * size - flat.size)).reshape(num, size)
            # Each place adds its piece of every island, and sends the mean to all.
            theirs = jax.lax.all_to_all(pieces, DATA_AXIS, 0, 0)
            each = [theirs[first] for first in islands.firsts()]
            terms = [rounded(x * counts[i], zero) for i, x in enumerate(each)]
            mean = divided(functools.reduce(jnp.add, terms), counts.sum(), zero)
            # Else a learning rate in the state would be rounded.
            is_equal = functools.reduce(jnp.logical_and, [x == each[0] for x in each])
            mean = jnp.where(is_equal, each[0], mean)
            return cut(jax.lax.all_gather(mean, DATA_AXIS, tiled=True)[: flat.size], values)

        def hxla_meet(
            leaves: list[jax.Array],
            anchors: list[jax.Array],
            momenta: list[jax.Array],
            given: jax.Array,
        ) -> Any:
            zero = given[-1]
            if not bucket.are_params:
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
        of_params = specs if bucket.are_params else []
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

    def saved(self) -> list[jax.Array]:
        """The momentum as global arrays; every process calls this."""
        columns = zip(*self.momenta, strict=True)
        specs = [self._specs[k] for k in self._trained]
        return [
            self._arrays.over_all(list(x), s)
            for x, s in zip(columns, specs if self.momenta[0] else [], strict=True)
        ]

    def wanted(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the argument of `load`."""
        if not self.islands.momentum:
            return []
        return [
            jax.ShapeDtypeStruct(
                self._like(k).shape, jnp.float32, sharding=self._arrays.sharding(self._specs[k])
            )
            for k in self._trained
        ]

    def load(self, momenta: Sequence[jax.Array]) -> None:
        """Take over the momentum of a checkpoint."""
        each = [
            self._arrays.local_parts(x, self._specs[k])
            for x, k in zip(momenta, self._trained if momenta else (), strict=True)
        ]
        self.momenta = [[parts[i] for parts in each] for i in range(len(self.momenta))]


def meetings_of(plan: Plan, layout: StateLayout, training: Training) -> Meetings | None:
    """The meetings of a plan's islands; None: there are none.

    Raises:
        PlanError: If islands cannot average what is trained.
    """
    if plan.islands is None:
        return None
    merges, reads_batch = layout.reducer.layout.tensors.merges, training.over_batch is not None
    _check(layout, merges, reads_batch=reads_batch)
    trained = [i for i, is_trained in enumerate(training.model.is_trained) if is_trained]
    return Meetings(layout, trained, plan.islands, plan.sums.bucket_mib << 20)

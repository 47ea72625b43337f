"""The one program with collectives between replicas: sums over all of them.

Everything else a step runs is compiled for a single replica, so a microbatch's arithmetic cannot
depend on how many there are. Here integers are added, which no compiler pass, collective
algorithm or device order can change; each device then turns its share of the sums into floats,
element by element, and the shares are gathered. Sending floats back makes an exact all-reduce 1.5
times the bytes of a float one, not twice.

References:
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    JPDC 2009, section 3 (reduce-scatter and all-gather on a ring).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._core._types import DATA_AXIS, PyTree
from ._contribution import Contribution, DeviceSums, at_least_1d, peaks_to_maxima
from ._replica import Replica

BUCKET_ELEMENTS = 1 << 26  # bounds the copies that a bucket makes
_MESSAGE_WORDS = 1 << 22


def buckets(
    sizes: Sequence[int], bucket_elements: int = BUCKET_ELEMENTS, alone: Collection[int] = ()
) -> list[list[int]]:
    """Group consecutive tensors: many small buffers cost a round trip each.

    Args:
        sizes: Elements of each tensor.
        bucket_elements: Most elements of a bucket of several tensors.
        alone: Tensors that share no bucket.

    Returns:
        Indices of `sizes`, each once and in order.
    """
    out: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not out or i in alone:
            out.append([])
            room = bucket_elements
        out[-1].append(i)
        room = 0 if i in alone else room - size
    return out


def _concatenate(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def _reduce_scatter(x_DC: jax.Array, ring: bool, sent: Any) -> jax.Array:
    """Chunk d of the sum on device d, sent in a dtype. Gloo has no ring of its own for this."""
    num = x_DC.shape[0]
    if not ring:
        scattered = jax.lax.psum_scatter(
            x_DC.astype(sent), DATA_AXIS, scatter_dimension=0, tiled=True
        )
        return scattered.reshape(-1).astype(x_DC.dtype)
    me = jax.lax.axis_index(DATA_AXIS)
    to_next = [(d, (d + 1) % num) for d in range(num)]
    total_C = x_DC[(me - 1) % num]
    for hop in range(2, num + 1):
        received_C = jax.lax.ppermute(total_C.astype(sent), DATA_AXIS, to_next)
        total_C = x_DC[(me - hop) % num] + received_C.astype(x_DC.dtype)
    return total_C


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all processes know after a sum.

    Attributes:
        numbers_DN: float32, what each replica told.
        rows_MS: float32, the sums of every microbatch.
        maxima_T: float32, the largest magnitude of each tensor in any microbatch.
        totals: For each local replica the sums of its tensors: combined, or their parts as they
            are where there is one replica.
        ints: For each local replica the integer leaves of other variables.
    """

    numbers_DN: np.ndarray
    rows_MS: np.ndarray
    maxima_T: np.ndarray
    totals: tuple[Any, ...]
    ints: tuple[Any, ...]


class Reducer:
    """Sums over all replicas of a run.

    Legend of shape suffixes: D replicas, C elements of a chunk, N numbers of a replica, M
    microbatches of a step, S sums per microbatch, T float tensors.

    Args:
        replicas: All of them, those of other processes included, in the order of `counts`.
        contribution: How tensors joined the sums.
        specs: How each tensor lies on the inner axes of a replica.
        num_ints: Integer leaves of other variables.
        rows: Tensors of which only rows that are not zero are sent, with the most that a replica
            has.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        contribution: Contribution,
        specs: Sequence[P],
        num_ints: int,
        rows: Mapping[int, int] | None = None,
    ):
        self._contribution = contribution
        self._dtype = jnp.dtype(contribution.form.dtype)
        self.bucket_elements = contribution.form.bucket_mib << 18
        self.rows = dict(rows or {})
        self.replicas = tuple(replicas)
        self.local = tuple(r for r in replicas if r.is_local)
        self.devices = tuple(d for r in replicas for d in r.devices)
        self._inner = replicas[0].axes
        shape = (len(replicas), *(size for _, size in self._inner))
        names = (DATA_AXIS, *(name for name, _ in self._inner))
        self.mesh = Mesh(
            np.array(self.devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
        )
        self._flat = Mesh(np.array(self.devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        self._exchange = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, DATA_AXIS),
                mesh=self._flat,
                in_specs=P(DATA_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )
        small = ([P()] * 2, [P()] * (1 + num_ints))
        self._arguments: Any = (
            *small,
            [(s,) * contribution.form.num_parts for s in specs],
        )
        # Of replicas of one device, totals are buckets.
        self._results: Any = (*small, list(specs) if self._inner else None)
        self._program = None if len(replicas) == 1 else self._build()

    @property
    def ring(self) -> bool:
        """Whether a reduce-scatter is a ring of permutes: Gloo has none of its own."""
        return self.devices[0].platform == "cpu"

    def _build(self) -> Any:
        """The program `(own, ints, values) -> (own, ints, totals)`.

        `own` are small integer arrays that are gathered, `ints` small ones that are summed,
        `values` the parts of each tensor's sum. Totals are combined: float32 vectors, one for each
        of `buckets`, or each tensor in its own shape where replicas have several devices.
        """
        rows, flat = self.rows, not self._inner

        def all_reduce(parts: list[jax.Array]) -> jax.Array:
            size, num = parts[0].size, len(self.replicas)
            chunk = math.ceil(size / num)
            padded = [jnp.pad(x, (0, chunk * num - size)).reshape(num, chunk) for x in parts]
            total = self._contribution.combine(
                *(_reduce_scatter(x, self.ring, self._travels_as(x)) for x in padded)
            )
            back = total.astype(self._dtype)
            return jax.lax.all_gather(back, DATA_AXIS, tiled=True)[:size].astype(total.dtype)

        def hxla_sum(
            own: list[jax.Array], ints: list[jax.Array], values: list[tuple[jax.Array, ...]]
        ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
            gathered = _flatly(lambda x: jax.lax.all_gather(x, DATA_AXIS), own)
            summed = _flatly(lambda x: jax.lax.psum(x, DATA_AXIS), ints)
            groups = buckets([parts[0].size for parts in values], self.bucket_elements, rows)
            totals = [
                self._contribution.combine(*self._sum_rows(values[b[0]], rows[b[0]])).reshape(-1)
                if b[0] in rows
                else all_reduce(
                    [_concatenate(p) for p in zip(*(values[i] for i in b), strict=True)]
                )
                for b in groups
            ]
            if flat:
                return gathered, summed, totals
            shapes = [[values[i][0] for i in b] for b in groups]
            cut = [x for t, like in zip(totals, shapes, strict=True) for x in _cut(t, like)]
            return gathered, summed, cut

        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        own, ints, totals = self._results
        mapped = jax.shard_map(
            hxla_sum,
            mesh=self.mesh,
            in_specs=jax.tree.map(_stacked, self._arguments, is_leaf=is_spec),
            out_specs=(own, ints, P() if flat else totals),
            check_vma=False,
        )
        return jax.jit(mapped)

    def _travels_as(self, x: jax.Array) -> Any:
        """Integers are never rounded."""
        return x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else self._dtype

    def _sum_rows(self, parts: Sequence[jax.Array], num_rows: int) -> list[jax.Array]:
        """Sums over replicas of arrays of which few rows are not zero."""
        used = [jnp.any(x != 0, axis=tuple(range(1, x.ndim))) for x in parts]
        [own_R] = jnp.nonzero(functools.reduce(jnp.logical_or, used), size=num_rows, fill_value=-1)
        all_R = jax.lax.all_gather(own_R, DATA_AXIS, tiled=True)
        all_R = jnp.where(all_R < 0, parts[0].shape[0], all_R)  # beyond the end: dropped
        out = []
        for x in parts:
            sent = x[own_R].astype(self._travels_as(x))  # the last row where there are too few
            rows = jax.lax.all_gather(sent, DATA_AXIS, tiled=True).astype(x.dtype)
            out.append(jnp.zeros_like(x).at[all_R].add(rows, mode="drop"))
        return out

    def hold(self, sums: Sequence[DeviceSums]) -> Any:
        """What the local replicas added up, as `reduce` takes it; waits for nothing.

        Some hundred arrays take milliseconds, which pass while the devices still compute.
        """
        held = [([s.peaks_T], [s.small_MS, *s.ints], s.values) for s in sums]
        own, ints, values = self._arguments
        return self._stack((own[1:], ints, values), held)

    def reduce(self, numbers: Sequence[np.ndarray], held: Any) -> "Reduced":
        """Add up what all replicas hold; the totals stay on the devices.

        Args:
            numbers: float32[N] of each local replica, for all others.
            held: From `hold`.
        """
        put = [
            replica.put(row.view(np.int32))
            for row, replica in zip(numbers, self.local, strict=True)
        ]
        rows_DN = self._stack(P(), put)
        own, ints, values = held
        arguments = [rows_DN, *own], ints, values
        if self._program is None:
            results = [([np.asarray(x)[None] for x in arguments[0]], ints, values)]
        else:
            results = self._unstack(self._program(*arguments))
        (rows, peaks_DT), (small_MS, *_), _ = results[0]
        return Reduced(
            numbers_DN=np.asarray(rows).view(np.float32),
            rows_MS=np.asarray(small_MS).view(np.float32),
            maxima_T=peaks_to_maxima(np.asarray(peaks_DT)),
            totals=tuple(totals for _, _, totals in results),
            ints=tuple(ints[1:] for _, ints, _ in results),
        )

    def _stack(self, specs: Any, per_replica: Sequence[PyTree]) -> PyTree:
        """One tree for all replicas; moves nothing.

        Args:
            specs: How each leaf lies on the inner axes of a replica.
            per_replica: For each local replica its tree, arrays at least 1-D.
        """
        if self._program is None:
            return per_replica[0]
        leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        flat = [jax.tree.flatten(tree) for tree in per_replica]
        stacked = []
        for i, spec in enumerate(leaves):
            arrays = [own[i] for own, _ in flat]
            shape = arrays[0].shape
            stacked.append(
                jax.make_array_from_single_device_arrays(
                    (len(self.replicas) * shape[0], *shape[1:]),
                    NamedSharding(self.mesh, _stacked(spec)),
                    [s.data for x in arrays for s in x.addressable_shards],
                )
            )
        return jax.tree.unflatten(flat[0][1], stacked)

    def _unstack(self, results: Any) -> list[Any]:
        """The results on each local replica."""
        leaves, treedef = jax.tree.flatten(results)
        specs = jax.tree.leaves(self._results, is_leaf=lambda x: isinstance(x, P))
        specs += [P()] * (len(leaves) - len(specs))
        pieces = [self.local_parts(x, spec) for x, spec in zip(leaves, specs, strict=True)]
        return [jax.tree.unflatten(treedef, [p[i] for p in pieces]) for i in range(len(self.local))]

    def local_parts(self, x: jax.Array, spec: P) -> list[jax.Array]:
        """An array that all replicas have alike, on each of the local ones; moves nothing.

        Args:
            x: Over `mesh`.
            spec: How it lies on the inner axes of a replica.
        """
        shards = {s.device: s.data for s in x.addressable_shards}
        if not self._inner:
            return [shards[r.devices[0]] for r in self.local]
        return [
            jax.make_array_from_single_device_arrays(
                x.shape, r.sharding(spec), [shards[d] for d in r.devices if d in shards]
            )
            for r in self.local
        ]

    def over_all(self, per_replica: Sequence[jax.Array], spec: P) -> jax.Array:
        """An array that all replicas have alike as one over `mesh`; moves nothing.

        Args:
            per_replica: On each local replica.
            spec: How it lies on the inner axes of a replica.
        """
        return jax.make_array_from_single_device_arrays(
            per_replica[0].shape,
            NamedSharding(self.mesh, spec),
            [s.data for x in per_replica for s in x.addressable_shards],
        )

    def result_shapes(
        self, i: int, floats: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
    ) -> tuple[list[Any], list[Any]]:
        """Shapes of the totals and integers of `reduce` on a local replica.

        Args:
            i: Of the local replica.
            floats: Shape of each tensor.
            others: Shape of each integer leaf.
        """
        replica = self.local[i]
        specs = [parts[0] for parts in self._arguments[2]]
        shapes = [at_least_1d(shape) for shape in floats]

        def like(shape: Sequence[int], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=replica.sharding(spec))

        if self._program is None:
            parts = self._contribution.form.num_parts
            totals: list[Any] = [
                (like(shape, self._contribution.dtype, s),) * parts
                for shape, s in zip(shapes, specs, strict=True)
            ]
        elif self._inner:
            totals = [like(x, jnp.float32, s) for x, s in zip(shapes, specs, strict=True)]
        else:
            sizes = [math.prod(shape) for shape in shapes]
            totals = [
                like((sum(sizes[k] for k in bucket),), jnp.float32, P())
                for bucket in buckets(sizes, self.bucket_elements, self.rows)
            ]
        return totals, [like(at_least_1d(x), jnp.int32, P()) for x in others]

    def exchange(self, rows: np.ndarray) -> np.ndarray:
        """Sum a host array over all processes, bit for bit where the others hold zeros.

        Args:
            rows: Any 32-bit dtype, any shape, of this process.

        Returns:
            The sum of the bit patterns, of the same dtype and shape.
        """
        if len(self.devices) == 1:
            return rows
        bits = np.ascontiguousarray(rows).view(np.int32).reshape(-1)
        here = [d for d in self.devices if d.process_index == jax.process_index()]
        shards = [jax.device_put(np.zeros_like(bits) if i else bits, d) for i, d in enumerate(here)]
        stacked = jax.make_array_from_single_device_arrays(
            (len(self.devices) * bits.size,), NamedSharding(self._flat, P(DATA_AXIS)), shards
        )
        total = self._exchange(stacked).addressable_shards[0].data
        return np.asarray(total).view(rows.dtype).reshape(rows.shape)

    def exchange_bits(self, host: np.ndarray) -> np.ndarray:
        """`exchange` of an array of any dtype and size, in messages of bounded size."""
        if jax.process_count() == 1:
            return host
        data = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        words = np.zeros(-(-data.size // 4), np.int32)
        words.view(np.uint8)[: data.size] = data
        for start in range(0, words.size, _MESSAGE_WORDS):
            end = min(start + _MESSAGE_WORDS, words.size)
            message = np.zeros(
                min(_MESSAGE_WORDS, words.size), np.int32
            )  # of one size: one program
            message[: end - start] = words[start:end]
            words[start:end] = self.exchange(message)[: end - start]
        return words.view(np.uint8)[: data.size].view(host.dtype).reshape(host.shape)

    def whole(self, x: Any) -> np.ndarray:
        """An array of the first local replica, whole in host memory; all processes call this.

        Args:
            x: As that replica holds it.
        """
        if not any(r.spans_processes for r in self.replicas):
            return np.array(x)
        host = np.zeros(x.shape, x.dtype)
        first = self.replicas[0]
        if first.is_local:
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
        return self.exchange_bits(host)


def _stacked(spec: P) -> P:
    """The spec of the arrays of all replicas, one after another in the first dimension."""
    first = spec[0] if len(spec) else None
    inner = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return P((DATA_AXIS, *inner), *spec[1:])


def _flatly(collective: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]) -> Any:
    """One collective over small arrays, as if it were one for each."""
    return _cut(collective(_concatenate(arrays)), arrays)


def _cut(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    ends = np.cumsum([x.size for x in like])
    parts = jnp.split(flat, ends[:-1], axis=-1)
    return [p.reshape(flat.shape[:-1] + x.shape) for p, x in zip(parts, like, strict=True)]

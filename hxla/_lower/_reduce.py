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
from ._replica import Replica

BUCKET_ELEMENTS = 1 << 26  # bounds the copies that a bucket makes

Combine = Callable[..., jax.Array]


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
class Summation:
    """A compiled sum and how its arguments lie on the inner axes of a replica.

    Attributes:
        program: The function.
        argument_specs: PartitionSpec of each leaf of the arguments.
        result_specs: PartitionSpec of each leaf of the results.
    """

    program: Any
    argument_specs: tuple[P, ...]
    result_specs: tuple[P, ...]


class Reducer:
    """Sums over all replicas of a run.

    Legend of shape suffixes: D replicas, C elements of a chunk.

    Args:
        replicas: All of them, those of other processes included, in the order of `counts`.
        bucket_elements: See `buckets`.
        dtype: In which floats travel: `float32` or `bfloat16`.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        bucket_elements: int = BUCKET_ELEMENTS,
        dtype: str = "float32",
    ):
        self.bucket_elements = bucket_elements
        self._dtype = jnp.dtype(dtype)
        self.replicas = tuple(replicas)
        self.local = tuple(r for r in replicas if r.is_local)
        self.devices = tuple(d for r in replicas for d in r.devices)
        self._inner = replicas[0].axes
        shape = (len(replicas), *(size for _, size in self._inner))
        names = (DATA_AXIS, *(name for name, _ in self._inner))
        self._mesh = Mesh(
            np.array(self.devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
        )
        self._flat = Mesh(np.array(self.devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))

        def hxla_exchange(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, DATA_AXIS)

        self._exchange = jax.jit(
            jax.shard_map(
                hxla_exchange,
                mesh=self._flat,
                in_specs=P(DATA_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )

    def sums(
        self,
        combine: Combine,
        num_own: int,
        num_ints: int,
        specs: Sequence[P],
        num_parts: int,
        rows: Mapping[int, int] | None = None,
    ) -> Summation:
        """The program `(own, ints, values) -> (own, ints, totals)`, for `run`.

        Args:
            combine: Element-wise function of the summed parts of a tensor to float32; must not
                round differently when it is fused with other operations.
            num_own: Small integer arrays that are gathered, each to one with a leading D.
            num_ints: Small integer arrays that are summed.
            specs: How each tensor lies on the inner axes of a replica.
            num_parts: Arrays of a tensor's shape that `combine` takes.
            rows: Tensors of which only rows that are not zero are sent, with the most that a
                replica has.

        Returns:
            A function of three lists: `own`, `ints`, and for each tensor a tuple of its parts. The
            third result holds combined sums: with one device per replica a float32 vector for each
            of `buckets`, its tensors one after another; otherwise each tensor in its own shape.
        """
        num = len(self.replicas)
        ring = self.devices[0].platform == "cpu"
        flat = not self._inner
        sparse = dict(rows or {})

        def all_reduce(parts: list[jax.Array]) -> jax.Array:
            size = parts[0].size
            if num == 1:
                return combine(*parts)
            chunk = math.ceil(size / num)
            padded = [jnp.pad(x, (0, chunk * num - size)).reshape(num, chunk) for x in parts]
            total = combine(*(_reduce_scatter(x, ring, self._travels_as(x)) for x in padded))
            back = total.astype(self._dtype)
            return jax.lax.all_gather(back, DATA_AXIS, tiled=True)[:size].astype(total.dtype)

        def hxla_sum(
            own: list[jax.Array], ints: list[jax.Array], values: list[tuple[jax.Array, ...]]
        ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
            if num == 1:
                gathered, summed = [x[None] for x in own], ints
            else:
                gathered = _flatly(lambda x: jax.lax.all_gather(x, DATA_AXIS), own)
                summed = _flatly(lambda x: jax.lax.psum(x, DATA_AXIS), ints)
            groups = buckets([parts[0].size for parts in values], self.bucket_elements, sparse)
            totals = [
                combine(*self._sum_rows(values[b[0]], sparse[b[0]])).reshape(-1)
                if num > 1 and b[0] in sparse
                else all_reduce(
                    [_concatenate(p) for p in zip(*(values[i] for i in b), strict=True)]
                )
                for b in groups
            ]
            if flat:
                return gathered, summed, totals
            shapes = [[values[i][0] for i in b] for b in groups]
            return (
                gathered,
                summed,
                [x for t, like in zip(totals, shapes, strict=True) for x in _cut(t, like)],
            )

        whole = [P()] * (num_own + num_ints)
        arguments = (*whole, *(s for s in specs for _ in range(num_parts)))
        results = tuple(whole) if flat else (*whole, *specs)  # buckets are whole
        # One device, no mesh: it would mark the outputs as sharded, and what uses them would be
        # compiled in another form.
        if flat and num == 1:
            return Summation(
                program=jax.jit(hxla_sum), argument_specs=arguments, result_specs=results
            )
        trees: Any = (
            whole[:num_own],
            whole[num_own:],
            [tuple([s] * num_parts) for s in specs],
        )
        mapped = jax.shard_map(
            hxla_sum,
            mesh=self._mesh,
            in_specs=jax.tree.map(_stacked, trees, is_leaf=lambda x: isinstance(x, P)),
            out_specs=(P(), P(), P() if flat else list(specs)),
            check_vma=False,
        )
        return Summation(program=jax.jit(mapped), argument_specs=arguments, result_specs=results)

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

    def stack(self, specs: Sequence[P], per_replica: Sequence[PyTree]) -> PyTree:
        """One tree for all replicas, as `run` takes it; moves nothing and waits for nothing.

        Args:
            specs: How each leaf lies on the inner axes of a replica.
            per_replica: For each local replica its tree, arrays at least 1-D.
        """
        if self._is_single:
            return per_replica[0]
        flat = [jax.tree.flatten(tree) for tree in per_replica]
        stacked = [self._stack(s, [leaves[i] for leaves, _ in flat]) for i, s in enumerate(specs)]
        return jax.tree.unflatten(flat[0][1], stacked)

    def run(self, summation: Summation, arguments: Any) -> list[Any]:
        """Call what `sums` made; waits for nothing.

        Args:
            summation: From `sums`.
            arguments: Its arguments (a tuple), from `stack`.

        Returns:
            The results on each local replica.
        """
        results = summation.program(*arguments)
        if self._is_single:
            return [results]
        leaves, treedef = jax.tree.flatten(results)
        specs = [*summation.result_specs, *[P()] * (len(leaves) - len(summation.result_specs))]
        pieces = [self._unstack(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        return [jax.tree.unflatten(treedef, [p[i] for p in pieces]) for i in range(len(self.local))]

    @property
    def _is_single(self) -> bool:
        return len(self.replicas) == 1 and not self._inner

    def _stack(self, spec: P, arrays: Sequence[jax.Array]) -> jax.Array:
        """The arrays of all replicas one after another, without moving anything."""
        shards = [s.data for x in arrays for s in x.addressable_shards]
        shape = arrays[0].shape
        return jax.make_array_from_single_device_arrays(
            (len(self.replicas) * shape[0], *shape[1:]),
            NamedSharding(self._mesh, _stacked(spec)),
            shards,
        )

    def _unstack(self, leaf: jax.Array, spec: P) -> list[jax.Array]:
        shards = {s.device: s.data for s in leaf.addressable_shards}
        if not self._inner:
            return [shards[r.devices[0]] for r in self.local]
        return [
            jax.make_array_from_single_device_arrays(
                leaf.shape, r.sharding(spec), [shards[d] for d in r.devices if d in shards]
            )
            for r in self.local
        ]

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

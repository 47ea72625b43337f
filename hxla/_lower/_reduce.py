"""The one program with collectives: sums over all devices.

Everything else a step runs is compiled for a single device, so a microbatch's arithmetic cannot
depend on how many devices there are. This program holds no float arithmetic when the sums are
exact: only integer additions, which no compiler pass, collective algorithm or device order can
change.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._types import DATA_AXIS

_BUCKET_ELEMENTS = 1 << 26  # bounds the copy that a bucket makes


def _sum(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sum over devices in buckets: many small buffers cost a round trip each."""
    buckets: list[list[int]] = []
    room = 0
    for i, x in sorted(enumerate(arrays), key=lambda pair: str(pair[1].dtype)):
        same = bool(buckets) and arrays[buckets[-1][-1]].dtype == x.dtype
        if not same or x.size > room:
            buckets.append([])
            room = _BUCKET_ELEMENTS
        buckets[-1].append(i)
        room -= x.size
    flat = [jnp.concatenate([arrays[i].reshape(-1) for i in bucket]) for bucket in buckets]
    out: dict[int, jax.Array] = {}
    for bucket, total in zip(buckets, jax.lax.psum(flat, DATA_AXIS), strict=True):
        start = 0
        for i in bucket:
            out[i] = total[start : start + arrays[i].size].reshape(arrays[i].shape)
            start += arrays[i].size
    return [out[i] for i in range(len(arrays))]


class Reducer:
    """Element-wise sums of lists of arrays over all devices of a mesh.

    Args:
        devices: All devices, those of other processes included, in the order of `counts`.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local = tuple(d for d in devices if d.process_index == jax.process_index())
        mesh = Mesh(np.array(self.devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, P(DATA_AXIS))
        self.program = jax.jit(
            jax.shard_map(
                _sum,
                mesh=mesh,
                in_specs=P(DATA_AXIS),
                out_specs=P(),
                check_vma=False,
            ),
            donate_argnums=0,
        )

    def stack(self, per_device: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Global arrays whose shards are the given arrays; moves no data and waits for none.

        Args:
            per_device: For each local device a list of arrays of equal shapes, at least 1-D.
        """
        num = len(self.devices)
        if num == 1:  # a mesh of one would mark its arrays as sharded: another compiled form
            return list(per_device[0])
        return [
            jax.make_array_from_single_device_arrays(
                (num * shards[0].shape[0], *shards[0].shape[1:]), self._sharding, list(shards)
            )
            for shards in zip(*per_device, strict=True)
        ]

    def sum(self, stacked: list[jax.Array]) -> list[list[jax.Array]]:
        """Sum over devices; donates its input.

        Args:
            stacked: What `stack` returned.

        Returns:
            For each local device the list of sums, each of one shard's shape.
        """
        if len(self.devices) == 1:
            return [stacked]
        totals = self.program(stacked)
        shards = [{s.device: s.data for s in total.addressable_shards} for total in totals]
        return [[shard[device] for shard in shards] for device in self.local]

    def exchange(self, rows: np.ndarray) -> np.ndarray:
        """Sum a small host array over all processes, bit for bit where the others hold zeros.

        Args:
            rows: Any 32-bit dtype, any shape, of this process.

        Returns:
            The sum of the bit patterns, of the same dtype and shape.
        """
        bits = np.ascontiguousarray(rows).view(np.int32).reshape(-1)
        first = [jax.device_put(bits, self.local[0])]
        rest = [[jax.device_put(np.zeros_like(bits), d)] for d in self.local[1:]]
        total = self.sum(self.stack([first, *rest]))[0][0]
        return np.asarray(total).view(rows.dtype).reshape(rows.shape)

"""Small host arrays of all processes, added up bit for bit."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._core._types import DATA_AXIS
from ._replica import Replica

_MESSAGE_BYTES = 1 << 24


class HostSums:
    """Sums over all processes.

    Args:
        devices: Of all processes.
        replicas: All copies of the model.
    """

    def __init__(self, devices: Sequence[jax.Device], replicas: Sequence[Replica]):
        self._devices, self._replicas = tuple(devices), tuple(replicas)
        self._mesh = Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        self._sum = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, DATA_AXIS),
                mesh=self._mesh,
                in_specs=P(DATA_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )

    def exchange(self, rows: np.ndarray) -> np.ndarray:
        """Sum a host array over all processes, bit for bit where the others hold zeros.

        Args:
            rows: Any 32-bit dtype, any shape, of this process.

        Returns:
            The sum of the bit patterns, of the same dtype and shape.
        """
        if len(self._devices) == 1:
            return rows
        bits = np.ascontiguousarray(rows).view(np.int32).reshape(-1)
        here = [d for d in self._devices if d.process_index == jax.process_index()]
        shards = [jax.device_put(np.zeros_like(bits) if i else bits, d) for i, d in enumerate(here)]
        stacked = jax.make_array_from_single_device_arrays(
            (len(self._devices) * bits.size,), NamedSharding(self._mesh, P(DATA_AXIS)), shards
        )
        total = self._sum(stacked).addressable_shards[0].data
        return np.asarray(total).view(rows.dtype).reshape(rows.shape)

    def exchange_bits(self, host: np.ndarray) -> np.ndarray:
        """`exchange` of an array of any dtype and size, in place, in messages of bounded size.

        Args:
            host: Contiguous.
        """
        if jax.process_count() == 1 or not host.size:
            return host
        data = host.reshape(-1).view(np.uint8)
        size = min(_MESSAGE_BYTES, -(-data.size // 4) * 4)
        for start in range(0, data.size, size):
            piece = data[start : start + size]
            message = np.zeros(size, np.uint8)  # of one size: one program
            message[: piece.size] = piece
            piece[:] = self.exchange(message.view(np.int32)).view(np.uint8)[: piece.size]
        return host

    def whole(self, x: Any) -> np.ndarray:
        """An array of the first local replica, whole in host memory; all processes call this.

        Args:
            x: As that replica holds it, or over all replicas.
        """
        is_over_all = isinstance(x, jax.Array) and not x.is_fully_addressable
        if not is_over_all and not any(r.spans_processes for r in self._replicas):
            return np.array(x)
        return self.of_first(x)

    def of_first(self, x: Any) -> np.ndarray:
        """An array of the first replica of all, whole in host memory; all processes call this.

        Args:
            x: As the first local replica holds it, or over all replicas.
        """
        host = np.zeros(x.shape, x.dtype)
        if self._replicas[0].is_local or x.sharding.device_set == set(self._devices):
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
        return self.exchange_bits(host)


def told_bits(
    numbers: Sequence[np.ndarray], replicas: Sequence[Replica], num: int
) -> list[list[jax.Array]]:
    """The bits of what each local replica tells, in its row; zeros in those of others.

    Args:
        numbers: float32 of each.
        replicas: The local ones.
        num: Of all replicas.
    """
    told = []
    for row, replica in zip(numbers, replicas, strict=True):
        bits_DN = np.zeros((num, row.size), np.int32)
        bits_DN[replica.index] = row.view(np.int32)
        told.append([replica.put(bits_DN)])
    return told

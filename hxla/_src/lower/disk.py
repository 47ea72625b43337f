"""State in a file, read and written past the page cache, a group ahead of and behind the update.

The file has no name, so it is gone when the process ends, however it ends. Only checkpoints outlive
a process.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 6.3 (asynchronous, aligned reads and writes of NVMe).
"""

import concurrent.futures
import errno
import functools
import math
import mmap
import os
import queue
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..core.errors import ConfigError
from ..jax.devices import is_here
from ..plan.parts import Tier
from .bitcast_packing import array_bytes
from .offload import DEVICE, GroupState, HostBuffer, OffloadBuffer, check_host_memory, in_memory
from .replica import Replica
from .units import Group, UpdateGroups

_BLOCK = 4096  # bytes: the alignment of direct I/O
_AHEAD = 3  # groups that are read ahead, and groups that are queued for writing
_IO_BYTES = 1 << 23  # of one read or write call
_THREADS = 4  # for reads, and for writes


class DirectFile:
    """An unnamed file of a fixed size, read and written with direct I/O.

    Raises:
        ConfigError: If the folder cannot be used, has too little room, or is on a file system
            without direct I/O.
    """

    def __init__(self, directory: str, num_bytes: int):
        self.directory = directory
        try:
            free = _free_bytes(directory)
        except OSError as error:
            raise self._error(f"cannot be used: {error.strerror}", num_bytes) from None
        if free < num_bytes:
            raise self._error("has too little room", num_bytes)
        try:
            self._descriptor = _opened(directory)
        except OSError as error:
            what = f"takes no file for direct I/O: {error.strerror}"
            raise self._error(what, num_bytes) from None
        try:
            os.posix_fallocate(self._descriptor, 0, max(num_bytes, _BLOCK))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                os.close(self._descriptor)
                what = f"has too little room: {error.strerror}"
                raise self._error(what, num_bytes) from None

        self._pools = {
            way: concurrent.futures.ThreadPoolExecutor(_THREADS) for way in (os.preadv, os.pwritev)
        }

    def _error(self, what: str, num_bytes: int) -> ConfigError:
        try:
            room = f"{_free_bytes(self.directory):,} are free"
        except OSError:
            room = "it does not exist"
        return ConfigError(
            f"memory.offload.directory {self.directory} {what}; the optimizer's state of a process "
            f"needs {num_bytes:,} bytes there, {room}: name a folder on a larger disk of this "
            "machine, or set memory.offload.optimizer to 'host'"
        )

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer."""
        self._all(os.preadv, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write a buffer."""
        self._all(os.pwritev, buffer, offset)

    def _all(self, run: Any, buffer: memoryview, offset: int) -> None:
        """Run several calls at a time, which a disk needs to be fast."""
        starts = range(0, len(buffer), _IO_BYTES)
        calls = [
            self._pools[run].submit(self._block, run, buffer[k : k + _IO_BYTES], offset + k)
            for k in starts
        ]
        concurrent.futures.wait(calls)  # if one fails, no call uses the buffer any more
        for call in calls:
            call.result()

    def _block(self, run: Any, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                moved = run(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._error(f"failed: {error.strerror}", len(buffer)) from None
            if not moved:
                raise self._error("failed: the file ends early", len(buffer))
            done += moved

    def close(self) -> None:
        """Close the file, which deletes it."""
        for pool in self._pools.values():
            pool.shutdown()
        os.close(self._descriptor)


def _free_bytes(directory: str) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _opened(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # The file system has no unnamed files.
    made, path = tempfile.mkstemp(dir=directory, prefix="hxla-offload-")
    os.close(made)
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    finally:
        os.unlink(path)


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


class _Layout:
    """Offsets of the arrays of each group in the file, aligned to blocks.

    Args:
        num_devices: Devices of the replica in this process, whose shards follow each other.
    """

    def __init__(self, groups: Sequence[Group], num_devices: int):
        self._num_devices = num_devices
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self._offsets: list[list[list[int]]] = []
        start = 0
        for group in groups:
            at = 0
            offsets: list[list[int]] = []
            for unit in group:
                offsets.append([])
                for shape, dtype in zip(unit.shapes, unit.dtypes, strict=True):
                    offsets[-1].append(at)
                    at += _rounded_up(num_devices * math.prod(shape) * dtype.itemsize)
            self._offsets.append(offsets)
            self.starts.append(start)
            self.sizes.append(at)
            start += at
        self.groups, self.num_bytes = groups, start

    def place(self, g: int, unit: int, k: int) -> tuple[int, int]:
        """Offset of an array in its group, and its bytes."""
        arrays = self.groups[g][unit]
        size = self._num_devices * math.prod(arrays.shapes[k]) * arrays.dtypes[k].itemsize
        return self._offsets[g][unit][k], size

    def view(self, buffer: memoryview, g: int, unit: int, k: int) -> np.ndarray:
        """The shards of an array, as a view of a buffer with the whole group."""
        start, size = self.place(g, unit, k)
        return self.shards(buffer[start : start + size], g, unit, k)

    def shards(self, buffer: memoryview, g: int, unit: int, k: int) -> np.ndarray:
        """The shards of an array, as a view of a buffer with them alone."""
        arrays = self.groups[g][unit]
        flat = np.frombuffer(buffer, arrays.dtypes[k])
        return flat.reshape(self._num_devices, *arrays.shapes[k])


class DiskBuffer(OffloadBuffer):
    """State in an unnamed file.

    Args:
        directory: Folder of the file; None: the system's folder for temporary files.

    Raises:
        ConfigError: See `DirectFile`.
    """

    def __init__(self, directory: str | None, replica: Replica, groups: UpdateGroups):
        self.groups, self.spec = groups.groups, groups.spec
        self._devices = [device for device in replica.devices if is_here(device)]
        self._layout = _Layout(groups.groups, len(self._devices))
        self._file = DirectFile(directory or tempfile.gettempdir(), self._layout.num_bytes)
        self._sharding = in_memory(replica.sharding(groups.spec), DEVICE)
        self._num_inner = len(replica.devices)
        self._is_cpu = replica.devices[0].platform == "cpu"
        largest = max(self._layout.sizes, default=_BLOCK)
        self._reader = concurrent.futures.ThreadPoolExecutor(_AHEAD)
        self._lifter = concurrent.futures.ThreadPoolExecutor(1)
        self._writer = concurrent.futures.ThreadPoolExecutor(_AHEAD)
        self._to_read, self._to_write = (_buffers(_AHEAD + 1, largest) for _ in range(2))
        self._reads: dict[int, concurrent.futures.Future[memoryview]] = {}
        #: The transfer of the next group to the device.
        self._lifts: queue.SimpleQueue[concurrent.futures.Future[GroupState]] = queue.SimpleQueue()
        self._writes: list[concurrent.futures.Future[None]] = []

    # -- one array -------------------------------------------------------------------------------

    def put(self, g: int, unit: int, k: int, x: jax.Array) -> None:
        """See `OffloadBuffer`."""
        start, size = self._layout.place(g, unit, k)
        buffer = self._to_write.get()
        try:
            self._fill_array(buffer[:size], x)
            self._file.write(buffer[: _rounded_up(size)], self._layout.starts[g] + start)
        finally:
            self._to_write.put(buffer)

    def get(self, g: int, unit: int, k: int) -> jax.Array:
        """See `OffloadBuffer`."""
        start, size = self._layout.place(g, unit, k)
        buffer = self._to_read.get()
        try:
            self._file.read(buffer[: _rounded_up(size)], self._layout.starts[g] + start)
            shards = self._layout.shards(buffer[:size], g, unit, k)
            return jax.block_until_ready(self._on_devices(shards))
        finally:
            self._to_read.put(buffer)

    # -- an update -------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `OffloadBuffer`."""
        for g in range(min(_AHEAD, len(self.groups))):
            self._reads[g] = self._reader.submit(self._read, g)
        self._lifts.put(self._lifter.submit(self._lifted, 0))

    def _read(self, g: int) -> memoryview:
        buffer = self._to_read.get()
        self._file.read(buffer[: self._layout.sizes[g]], self._layout.starts[g])
        return buffer

    def _lifted(self, g: int) -> GroupState:
        """A group's state on the device, once it is read; starts the read of a later group."""
        if g + _AHEAD < len(self.groups):
            self._reads[g + _AHEAD] = self._reader.submit(self._read, g + _AHEAD)
        buffer = self._reads.pop(g).result()
        state = [
            [self._on_devices(self._layout.view(buffer, g, u, k)) for k in range(len(unit.leaves))]
            for u, unit in enumerate(self.groups[g])
        ]
        jax.block_until_ready(state)
        self._to_read.put(buffer)
        return state

    def coming(self, _g: int) -> GroupState:
        """See `OffloadBuffer`."""
        return []

    def arrived(self, g: int, _brought: GroupState) -> GroupState:
        """See `OffloadBuffer`."""
        state = self._lifts.get().result()
        if g + 1 < len(self.groups):  # during the update of this group
            self._lifts.put(self._lifter.submit(self._lifted, g + 1))
        return state

    def _on_devices(self, shards: np.ndarray) -> jax.Array:
        """An array of the replica, from its shards on the devices here."""
        # On a CPU an array may share the read buffer, which the next read overwrites.
        arrays = [
            jax.device_put(
                x.copy() if self._is_cpu else x, in_memory(SingleDeviceSharding(device), DEVICE)
            )
            for x, device in zip(shards, self._devices, strict=True)
        ]
        shape = shards.shape[1:]
        if self._num_inner > 1:
            shape = (math.prod(shape) * self._num_inner,)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, arrays)

    def going(self, g: int, state: GroupState) -> GroupState:
        """See `OffloadBuffer`."""
        self._writes.append(self._writer.submit(self._write, g, [state]))
        while len(self._writes) > _AHEAD:
            self._writes.pop(0).result()
        return []

    def _write(self, g: int, waiting: list[GroupState]) -> None:
        buffer = self._to_write.get()
        try:
            self._fill(buffer, g, waiting.pop())  # frees it on the device
            self._file.write(buffer[: self._layout.sizes[g]], self._layout.starts[g])
        finally:
            self._to_write.put(buffer)

    def _fill(self, buffer: memoryview, g: int, state: GroupState) -> None:
        for u, arrays in enumerate(state):
            for k, x in enumerate(arrays):
                start, size = self._layout.place(g, u, k)
                self._fill_array(buffer[start : start + size], x)

    def _fill_array(self, buffer: memoryview, x: jax.Array) -> None:
        """Copy the shards of an array on the devices here, in the order of the devices."""
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        for row, device in zip(
            np.split(np.frombuffer(buffer, np.uint8), len(self._devices)),
            self._devices,
            strict=True,
        ):
            row[:] = array_bytes(shards[device])

    def gone(self, g: int, state: GroupState) -> None:
        """See `OffloadBuffer`."""

    def end(self) -> None:
        """See `OffloadBuffer`."""
        for write in self._writes:
            write.result()
        self._writes = []

    def close(self) -> None:
        """See `OffloadBuffer`."""
        self._lifter.shutdown()
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()


def _buffers(num: int, num_bytes: int) -> "queue.SimpleQueue[memoryview]":
    """Page-aligned buffers, as direct I/O needs them."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(num):
        buffers.put(memoryview(mmap.mmap(-1, _rounded_up(num_bytes))))
    return buffers


def buffer_maker(
    tier: Tier, directory: str | None
) -> Callable[[Replica, UpdateGroups], OffloadBuffer] | None:
    """A function from a replica's update groups to its buffer; None: state is on the device.

    Args:
        directory: Folder of the file, if state is on a disk.
    """
    if tier == "device":
        return None
    make = HostBuffer if tier == "host" else functools.partial(DiskBuffer, directory)

    def made(replica: Replica, groups: UpdateGroups) -> OffloadBuffer:
        check_host_memory(replica.devices[0], "placement.optimizer")
        return make(replica, groups)

    return made

"""What the disk tier of `memory.offload` takes of a disk's own speed: run by hand, not by pytest.

    PYTHONPATH=tests python -m support.disk_speed [--rounds 12] [--mib 1024] [--directory /scratch]

A state of so many MiB in 24 groups of two arrays streams once through the device and back, as an
update has it, without the arithmetic; `raw` reads and writes the same blocks of the same file with
as many threads, direct I/O and nothing else, in turns with it. The ratio is of raw seconds to those
of the tier: 1 is all that the disk gives. Writes `disk` in benchmarks/results/offload.json.
"""

import concurrent.futures
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from support.inside.lower import _AHEAD, DiskBuffer, Replica, Unit, UpdateGroups, _buffers
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import results
import turns

_GROUPS = 24


def groups(num_bytes):
    """Of two arrays each."""
    size = num_bytes // _GROUPS // 2 // 4 // 1024 * 1024
    dtypes = (np.dtype(np.float32),) * 2
    unit = Unit(
        domain=0, params=(0,), leaves=(0, 1), shapes=((size,),) * 2, dtypes=dtypes, stop=size
    )
    return UpdateGroups(((unit,),) * _GROUPS, (), P(), is_offloaded=True)


def streamed(tier):
    """Seconds of one pass of the tier."""
    start = time.perf_counter()
    tier.begin()
    for g in range(_GROUPS):
        tier.going(g, tier.arrived(g, []))
    tier.end()
    return time.perf_counter() - start


def raw(file, size, pools, buffers):
    """Seconds of the same reads and writes."""

    def run(way, free, g):
        buffer = free.get()
        way(buffer[:size], g * size)
        free.put(buffer)

    start = time.perf_counter()
    (reader, writer), (to_read, to_write) = pools, buffers
    reads = [reader.submit(run, file.read, to_read, g) for g in range(_GROUPS)]
    writes = []
    for g, read in enumerate(reads):
        read.result()
        writes.append(writer.submit(run, file.write, to_write, g))
    for write in writes:
        write.result()
    return time.perf_counter() - start


def of_disk(args):
    """Both, in turns, on files of the same folder."""
    own = groups(args.mib << 20)
    tier = DiskBuffer(args.directory, Replica(0, (jax.devices()[0],)), own)
    x = jax.numpy.arange(own.groups[0][0].stop, dtype=np.float32)
    for g in range(_GROUPS):
        for k in range(2):
            tier.put(g, 0, k, x)
    size = max(unit.num_bytes for [unit] in own.groups)
    file = tier._file  # where a file is decides its speed
    pools = [concurrent.futures.ThreadPoolExecutor(_AHEAD) for _ in range(2)]
    buffers = [_buffers(_AHEAD + 1, size) for _ in range(2)]
    seconds = {"tier": [], "raw": []}
    for _ in range(args.rounds):
        seconds["tier"].append(streamed(tier))
        seconds["raw"].append(raw(file, size, pools, buffers))
    tier.close()
    moved = 2 * size * _GROUPS
    return {
        "bytes": moved,
        "seconds": turns.medians(seconds),
        "gigabytes_per_second": {
            name: round(float(moved / np.median(own) / 1e9), 3) for name, own in seconds.items()
        },
        "raw seconds over those of the tier": turns.over(seconds["raw"], seconds["tier"]),
        "rounds": {name: [round(s, 3) for s in own] for name, own in seconds.items()},
    }


def main():
    """Both, written beside the steps of benchmarks/offload.py."""
    parser = results.parser(__doc__, "offload")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    known = {name: own for name, own in results.read(args.out).items() if name == "step"}
    results.write(args.out, known | {"disk": of_disk(args)})


if __name__ == "__main__":
    main()

"""HLO text of any size, and what `hxla.inspect` takes for it in a process of its own.

    PYTHONPATH=tests python -m support.large_dump FILE

Prints seconds, bytes and counts as JSON.
"""

import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import hxla
from support.paths import DATA, PYTHONPATH

DUMPS = DATA / "dumps"
_LINE = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")


def large_text(num_bytes: int) -> tuple[str, int]:
    """The computations of a real program again and again, all of them run by its entry.

    Returns:
        The text, and how many copies are in it; each has one all-reduce.
    """
    file = next((DUMPS / "jax-0.12").glob("*linen.cpu_after_optimizations.txt.gz"))
    whole = gzip.decompress(file.read_bytes()).decode()
    head, body = whole.split("\n\n\n", 1)
    start = body.index("ENTRY")
    inner, (opening, *entry) = body[:start], body[start:].splitlines(keepends=True)
    own = [line for line in entry if " parameter(" in line]
    rest = [line for line in entry if " parameter(" not in line and line.startswith("  ")]
    names = {re.match(r"\s+(?:ROOT )?%(\S+)", line)[1] for line in own}
    parts, middle, size, copy = [head, "\n\n\n"], own, 0, 0
    while size < num_bytes:

        def again(match, copy=copy):
            return match[0] if match[1] in names or not copy else f"%{match[1]}.c{copy}"

        parts.append(re.sub(r"%([\w.\-]+)", again, inner))
        called = [re.sub(r"%([\w.\-]+)", again, line).replace("ROOT ", "") for line in rest]
        middle = [*middle, *called] if copy % 200 == 0 else middle + called
        size += len(parts[-1]) + sum(map(len, called))
        copy += 1
    middle[-1] = "  ROOT" + middle[-1][1:]
    return "".join([*parts, opening, *middle, "}\n"]), copy


def bare_seconds(path: str) -> float:
    """Processor seconds of one match of every line, and nothing else."""
    begun = time.process_time()
    with open(path) as lines:
        assert sum(_LINE.match(line) is not None for line in lines)
    return time.process_time() - begun


def measured(path: str) -> dict[str, float]:
    """What an inspection of one file finds and takes; this process should do nothing else."""
    before = bare_seconds(path)
    begun, began = time.process_time(), time.perf_counter()
    program = hxla.inspect(path).main
    seconds, wall = time.process_time() - begun, time.perf_counter() - began
    # The process's own, from after the exec on: what getrusage says begins with the parent's.
    status = pathlib.Path("/proc/self/status").read_text()
    return {
        "collectives": len(program.collectives),
        "problems": len(program.problems),
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "bare_seconds": (before + bare_seconds(path)) / 2,
        "peak_bytes": int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024,
    }


def measured_alone(path: str | pathlib.Path) -> dict[str, Any]:
    """`measured` in a process of its own."""
    ran = subprocess.run(
        [sys.executable, __file__, str(path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    return json.loads(ran.stdout)


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))

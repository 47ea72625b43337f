"""`hxla.inspect` of a dump with 100 MB of HLO text, beside a bare match of its lines.

    python benchmarks/inspect_speed.py [--megabytes 100] [--rounds 3]

Every round is a process of its own: processor and wall seconds, and the most memory that it held,
Python and jax included. The match of every line with one pattern, right before and after, tells how
fast the core was; the ratio to it is what other work on the machine disturbs least. Writes
benchmarks/results/inspect_speed.json.
"""

import pathlib
import sys
import tempfile

import results

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.large_dump import large_text, measured_alone  # noqa: E402

parser = results.parser(__doc__, "inspect_speed")
parser.add_argument("--megabytes", type=float, default=100, help="of text, 2**20 bytes each")
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()

rounds = []
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "module_0000.jit_large.cpu_after_optimizations.txt"
    text, copies = large_text(int(args.megabytes * 2**20))
    num_lines = text.count("\n")
    file.write_text(text)
    for _ in range(args.rounds):
        found = measured_alone(file)
        if (found["collectives"], found["problems"]) != (copies, 0):
            sys.exit(f"{copies} collectives are in the text, but the inspection found {found}")
        row = {key: round(found[key], 2) for key in found if key.endswith("_seconds")}
        row["ratio"] = round(found["cpu_seconds"] / found["bare_seconds"], 2)
        row["peak_bytes"] = found["peak_bytes"]
        rounds.append(row)
        print(row, flush=True)

result = {
    "megabytes": args.megabytes,
    "lines": num_lines,
    "collectives": copies,
    "cpu_seconds": min(row["cpu_seconds"] for row in rounds),
    "ratio": sorted(row["ratio"] for row in rounds)[len(rounds) // 2],
    "peak_bytes": max(row["peak_bytes"] for row in rounds),
    "rounds": rounds,
}
results.write(args.out, result)

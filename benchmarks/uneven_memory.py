"""The largest model that two processes of unlike memory train, with even and with uneven shares.

    python benchmarks/uneven_memory.py [--speeds 1:1 3:1 1:3]

Each process is in a cgroup whose limit kills it, the second one's a third of the first's; both are
throttled to their speeds. A model of many equal layers trains with Adam by the plan that hxla makes
of the mesh file alone, which says what a process may use of its limit: all but what interpreter,
libraries and compiler take, which a tiny model shows first. The largest that the planner takes is
then trained for two steps; if a process is killed, a smaller one is, until it ends. Writes
benchmarks/results/uneven_memory.json.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import optax
import results
from flax import nnx

import hxla

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.large_net import Net, loss  # noqa: E402

WIDTH = 768
LIMITS = (3_900_000_000, 1_300_000_000)
LAYER_PARAMS = 8 * WIDTH**2 + 5 * WIDTH
BATCH_SIZE = 4


def mesh_file(folder: pathlib.Path, speeds: list[float], beside: int = 0) -> pathlib.Path:
    """What the planner knows: of each limit all but what a process has beside the plan."""
    path = folder / "mesh.toml"
    text = 'name = "unlike"\n'
    for limit, speed in zip(LIMITS, speeds, strict=True):
        text += f'[[device]]\nkind = "cpu"\ncore_share = {speed / max(speeds):.4g}\n'
        text += f"memory_gib = {(limit - beside) / 2**30}\n"
    path.write_text(text)
    return path


def is_planned(layers: int, shares: str, mesh: pathlib.Path, counts: list[int]) -> bool:
    """Whether the planner finds room for a model of so many layers."""
    tokens = np.zeros((32, 8), np.int32)
    job = hxla.Job(
        nnx.eval_shape(lambda: Net(WIDTH, layers, nnx.Rngs(0))),
        {"tokens": tokens, "next": tokens},
        loss,
        optax.adam(1e-4),
        batch_size=BATCH_SIZE,
        config={"memory": {"shares": shares}} if shares == "even" else None,
    )
    try:
        job.plan(str(mesh), auto=False, mesh={"data": 2}, microbatch_size=1, counts=counts)
    except hxla.PlanError:
        return False
    return True


def trained(layers: int, shares: str, mesh: pathlib.Path, counts: list[int]) -> dict | None:
    """Two steps within the limits; None if a process was killed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hxla", "run", "--mesh", str(mesh)]
        command += [str(ROOT / "tests/jobs/large_model.py"), "--limit", *map(str, LIMITS)]
        options = {"width": WIDTH, "layers": layers, "steps": 2, "save_at": 2, "devices": 2}
        options |= {"axis": "data", "shares": shares, "checkpoints": f"{folder}/checkpoints"}
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command += ["--counts", *map(str, counts)]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
    told = [json.loads(text) for text in re.findall(r"told (\{.*\})", done.stdout)]
    told = sorted(told, key=lambda own: own["rank"])
    if done.returncode or len(told) < 2:
        print(done.stdout[-1500:], done.stderr[-500:], flush=True)
        return None
    stage = re.findall(r"stage (\d)", done.stdout)[0]
    planned = [own["predicted"] - own["of process"] for own in told]
    peaks = [own["peak"] for own in told]
    return {"stage": int(stage), "bytes planned": planned, "peak bytes of the processes": peaks}


def bytes_beside(folder: pathlib.Path) -> int:
    """What a process has beside the plan, of a tiny model's two the one that has more."""
    told = trained(1, "even", mesh_file(folder, [1, 1]), [2, 2])
    assert told is not None
    pairs = zip(told["peak bytes of the processes"], told["bytes planned"], strict=True)
    return int(max(peak - planned for peak, planned in pairs))


def largest(shares: str, mesh: pathlib.Path, counts: list[int]) -> dict:
    """The most layers that were trained, and the most that were planned."""
    low, high = 1, 128
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_planned(middle, shares, mesh, counts) else (low, middle)
    layers = low
    while (told := trained(layers, shares, mesh, counts)) is None:
        layers -= max(layers // 20, 1)
    return {
        "layers": layers,
        "layers planned": low,
        "parameters": layers * LAYER_PARAMS + 129 * WIDTH,
        **told,
    }


def main() -> None:
    """Every ratio of speeds."""
    parser = results.parser(__doc__, "uneven_memory")
    parser.add_argument("--speeds", nargs="+", default=["1:1", "3:1", "1:3"])
    args = parser.parse_args()
    rows = results.read(args.out).get("speeds", {})
    for text in args.speeds:
        speeds = [float(x) for x in text.split(":")]
        counts = [round(BATCH_SIZE * s / sum(speeds)) for s in speeds]
        with tempfile.TemporaryDirectory() as folder:
            beside = bytes_beside(pathlib.Path(folder))
            mesh = mesh_file(pathlib.Path(folder), speeds, beside)
            found = {name: largest(name, mesh, counts) for name in ("even", "auto")}
        ratio = found["auto"]["parameters"] / found["even"]["parameters"]
        row = {"bytes beside the plan": beside, **found, "uneven / even": round(ratio, 3)}
        rows[text] = results.row(row)
        results.write(args.out, {"limits": LIMITS, "speeds": rows})


if __name__ == "__main__":
    main()

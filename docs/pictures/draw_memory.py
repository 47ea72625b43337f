"""Draws memory.svg: the bytes on a device by owner in each stage of ZeRO, planned and compiled.

python docs/pictures/draw_memory.py
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import jax  # noqa: E402

NUM = 4
jax.config.update("jax_num_cpu_devices", NUM)

import gpt  # noqa: E402
import matplotlib  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {
    "parameters": "#2f6fdb",
    "sums": "#e39a1d",
    "optimizer": "#2a9d78",
    "gradients": "#c65f8a",
    "activations": "#9aa5b8",
}
FORMS = {
    "one\nprogram": {"zero": 0},
    "ZeRO 1": {"zero": 1},
    "ZeRO 1\nchain": {"zero": 1, "recompute": "none"},
    "ZeRO 2\nboundaries": {"zero": 2, "recompute": "boundaries"},
    "ZeRO 3\nboundaries": {"zero": 3, "recompute": "boundaries"},
}


def main() -> None:
    """Write the picture."""
    figure, panel = plt.subplots(figsize=(6.4, 3.6))
    cluster = hxla.Cluster(
        name="four", devices=(hxla.Device(kind="cpu", memory_bytes=2**30),) * NUM
    )
    for place, (label, memory) in enumerate(FORMS.items()):
        job = hxla.Job(
            lambda: gpt.GPT(nnx.Rngs(0), layers=8, width=384, heads=6),
            gpt.library(),
            gpt.loss,
            optax.adamw(1e-3),
            batch_size=2 * NUM,
            config={"memory": memory, "communication": {"bucket_mib": 16}},
        )
        plan = job.plan(cluster, auto=False, microbatch_size=1)
        held, left = plan.prediction.devices[0].held, 0.0
        for owner, color in COLOURS.items():
            own = getattr(held, owner) / 2**20
            panel.bar(place, own, 0.62, bottom=left, color=color, label=None if place else owner)
            left += own
        with job.open(plan) as session:
            inputs = sum(x.nbytes for x in jax.tree.leaves(gpt.library())) / len(
                gpt.library()["text"]
            )
            compiled = (session.running_plan.memory_bytes + 2 * inputs) / 2**20
        print(label.replace("\n", " "), round(left, 1), round(compiled, 1), flush=True)
        panel.plot(place, compiled, "k_", ms=26, label=None if place else "as compiled")
    panel.set_xticks(range(len(FORMS)), list(FORMS), fontsize=8)
    panel.set_ylabel("MiB on each of four devices")
    panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draws collectives.svg: seconds of an all-reduce by algorithm, by its bytes.

python docs/pictures/draw_collectives.py
"""

import pathlib

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import hxla
from hxla._src.choose.collective_costs import ALGORITHMS, volume

HERE = pathlib.Path(__file__).parent
NODES, EACH = 2, 8


def main() -> None:
    """Write the picture."""
    cluster = hxla.load_cluster("whale-8v100-8p100")
    inside, between = cluster.nodes[1].link, cluster.default_link
    num_bytes = np.geomspace(1e3, 1e9, 121)
    figure, panel = plt.subplots(figsize=(6.4, 4))
    for name in ALGORITHMS:
        seconds = [volume(name, NODES * EACH, b).seconds(between) for b in num_bytes]
        panel.loglog(num_bytes, seconds, label=name)
    # Reduce-scatter and all-gather in each node, and between them rings of like workers over the
    # nodes, all through one card: Mikami et al., "Massively Distributed SGD", 2018, section 3.2.
    within = [volume("ring", EACH, b).seconds(inside) for b in num_bytes]
    rings = [volume("ring", NODES, b / EACH) for b in num_bytes]
    across = [
        ring.num_rounds * between.latency_seconds
        + EACH * ring.serial_bytes / between.bytes_per_second
        for ring in rings
    ]
    seconds = [a + b for a, b in zip(within, across, strict=True)]
    panel.loglog(num_bytes, seconds, "k--", label="hierarchical, one card a node")
    panel.set_xlabel("bytes of the array")
    panel.set_ylabel("seconds")
    panel.set_title("16 workers, 6.25 GB/s and 14 µs")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "collectives.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

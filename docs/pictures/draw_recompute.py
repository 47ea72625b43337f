"""Draws recompute.svg from benchmarks/results/recompute.json: time against memory.

python docs/pictures/draw_recompute.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
FOUND = json.loads((HERE.parents[1] / "benchmarks/results/recompute.json").read_text())
COLOURS = {"usual": "black", "remat": "tab:orange", "segments": "tab:blue"}


def main() -> None:
    """Write the picture."""
    models = FOUND["models"]
    figure, panels = plt.subplots(1, len(models), figsize=(4 * len(models), 3.4))
    for panel, (name, rows) in zip(panels, models.items(), strict=True):
        for label, row in rows.items():
            if label in ("commit", "date"):
                continue
            kind, _, rest = label.partition(" ")
            panel.plot(row["memory_mib"], row["ratio"], "o", color=COLOURS[kind], label=kind)
            panel.annotate(
                rest or kind,
                (row["memory_mib"], row["ratio"]),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=7,
            )
        panel.set_title(name)
        panel.set_xlabel("MiB for a microbatch")
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds of a step, to the usual one's")
    handles = [plt.Line2D([], [], marker="o", ls="", color=c) for c in COLOURS.values()]
    panels[-1].legend(handles, ["one program", "nnx.remat on blocks", "segments"], fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "recompute.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""The regret of plans: the measured step of a chosen plan beside the best of all that were tried.

    python benchmarks/regret.py [--pairs 4 | mlp@1.0-0.33 ...] [--rules 3]

For each pair of a model and a cluster of processes on this machine there are three chosen plans:
`profile` is that of `hxla profile`, `hxla plan` and `hxla run --plan`; `auto` is `plan="auto"`;
`default` is a script without a plan. Beside them are plans of all forms made by rule: one device
alone, even counts, other microbatch sizes, ZeRO, recomputation, pipelines, with three devices or
more those whose first two share a stage, and for decoders tensor parallelism. All take turns of
some steps, so the machine's drift meets all of them. The measured step is the mean of the middle
half of a plan's steps.

The regret of a plan is its measured step over the least one of its pair, minus one. `default` is
also compared with the plans of as many replicas of one device. A plan that cannot run is listed
with its error. Each row is written to benchmarks/results/regret.json at once, with the load of the
machine before and after; rows of other pairs that it holds stay. Memory limits, paced links,
experts and clusters whose links differ are not among the pairs.
"""

import contextlib
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jobs
import prediction
import results

import hxla

SCRIPT = jobs.ROOT / "benchmarks" / "regret_script.py"
CLUSTERS = {
    "1.0-0.33": [1.0, 0.33],
    "1.0-0.5": [1.0, 0.5],
    "1.0-1.0": [1.0, 1.0],
    "0.5-0.2": [0.5, 0.2],
    "0.5-0.5-0.33": [0.5, 0.5, 0.33],
    "0.5-0.5-0.33-0.2": [0.5, 0.5, 0.33, 0.2],
}
DECODERS = ("gpt", "gpt-wide", "long", "vocabulary")
MODELS = ("mlp", "gpt", "cnn", "lstm", "t5", *DECODERS[1:])
#: Four clusters for each model; the first pairs differ in both.
PAIRS = [
    (model, cluster)
    for turn in range(4)
    for n, model in enumerate(MODELS)
    for cluster in [list(CLUSTERS)[(n - turn) % len(CLUSTERS)]]
]
CHOSEN = ("profile", "auto", "default")


def rules(model: str, num: int) -> dict[str, dict[str, Any]]:
    """Plans made by rule for `num` devices: options of the script and settings of hxla."""
    even = ",".join(["1"] * num)
    made: dict[str, dict[str, Any]] = {
        "alone": {"alone": True},
        "stages": {"options": ["--stages", num]},
        "even counts": {"options": ["--counts", "even"]},
        "4 microbatches": {"options": ["--microbatches", 4 * (num > 2) + 4]},
        "16 microbatches": {"options": ["--microbatches", 16]},
        "zero 1": {"settings": {"HXLA_MEMORY_ZERO": "1"}},
        "zero 2": {"settings": {"HXLA_MEMORY_ZERO": "2"}},
        "zero 3": {"settings": {"HXLA_MEMORY_ZERO": "3"}},
        "recomputed": {"settings": {"HXLA_MEMORY_RECOMPUTE": "boundaries"}},
        "even stages": {"options": ["--stages", even]},
        "stages, 16 microbatches": {"options": ["--stages", num, "--microbatches", 16]},
        "stages, recomputed": {
            "options": ["--stages", num],
            "settings": {"HXLA_MEMORY_RECOMPUTE": "boundaries"},
        },
    }
    if num > 2:
        rest = [{"devices": 1}] * (num - 2)
        for name, axis in (("by parameters", "tensor"), ("by examples", "data")):
            forms = json.dumps([{axis: 2}, *rest])
            made[f"two share a stage {name}"] = {"options": ["--forms", forms]}
    if model in DECODERS:
        made["tensor"] = {"options": ["--tensor", num]}
    return made


def are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two plans have as many replicas, each of one device."""
    return not (one["axes"] or other["axes"]) and len(one["counts"]) == len(other["counts"])


def one(
    model: str, cluster: str, num_rules: int | None, *, rounds: int, chunk: int
) -> dict[str, Any]:
    """All plans of one pair, in turns."""
    shares = CLUSTERS[cluster]
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        mesh, lone = prediction.mesh_of(shares, folder), prediction.mesh_of(shares[:1], folder)
        profile, plan = folder / "profile.json", folder / "plan.json"
        where, script = ["--mesh", mesh], [SCRIPT, "none", model]
        settings: dict[str, str] = {}
        prediction.command(
            "profile", *where, "--write", profile, *script, folder=folder, settings=settings
        )
        options = ["--profile", profile, "--write", plan]
        prediction.command("plan", *where, *options, *script, folder=folder, settings=settings)
        known = hxla.Plan.read(plan).prediction
        made = dict(list(rules(model, len(shares)).items())[:num_rules])
        wanted = {"profile": {}, "auto": {"options": ["--plan", "auto"]}, "default": {}, **made}
        turns = ["--turns", rounds, "--chunk", chunk]
        steps: dict[str, dict[str, Any]] = {}
        with contextlib.ExitStack() as stack:
            running: dict[str, jobs.Job] = {}
            for n, (name, how) in enumerate(wanted.items()):
                job = jobs.Job(
                    folder / f"job{n}",
                    list(map(str, [SCRIPT, model, *turns, *how.get("options", ())])),
                    mesh=None if name == "profile" else str(lone if how.get("alone") else mesh),
                    plan=plan if name == "profile" else None,
                    settings=how.get("settings"),
                )
                stack.callback(job.close)
                try:
                    job.wait()
                    running[name] = job
                except SystemExit as error:
                    steps[name] = {"failed": str(error).strip().splitlines()[-1][:200]}
            jobs.in_turns(running, rounds)
            for name, job in running.items():
                steps[name] = job.finish()
    load.append(os.getloadavg()[0])
    # A pipeline predicts its step anew when it runs.
    if known is not None and "failed" not in steps["profile"]:
        steps["profile"]["predicted_seconds"] = known.step_seconds
    return {"model": model, "cluster": cluster, "load": load, **judged(steps)}


def judged(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Measured steps, the regret of each chosen plan, and the errors of predictions."""
    plans = []
    for name, told in steps.items():
        if "failed" in told:
            plans.append({"plan": name, **told})
            continue
        measured = prediction.middle_mean(told["seconds"])
        row = {"plan": name, "words": told["words"], "measured_seconds": round(measured, 5)}
        if told["predicted_seconds"]:
            row["predicted_seconds"] = round(told["predicted_seconds"], 5)
            row["error"] = round(told["predicted_seconds"] / measured - 1, 4)
        plans.append(row)
    seconds = {row["plan"]: row["measured_seconds"] for row in plans if "failed" not in row}
    best = min(seconds, key=lambda name: seconds[name])
    ran = [name for name in CHOSEN if name in seconds]
    regret = {name: round(seconds[name] / seconds[best] - 1, 4) for name in ran}
    over_default = {}
    if "default" in ran:
        alike = min(s for name, s in seconds.items() if are_alike(steps[name], steps["default"]))
        regret["default, among its form"] = round(seconds["default"] / alike - 1, 4)
        over_default = {
            name: round(seconds[name] / seconds["default"] - 1, 4)
            for name in ("profile", "auto")
            if name in ran
        }
    return {"best": best, "regret": regret, "over_default": over_default, "plans": plans}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all pairs."""
    found: dict[str, Any] = {"pairs": len(rows)}
    for name in (*CHOSEN, "default, among its form"):
        values = [row["regret"][name] for row in rows if name in row["regret"]]
        if not values:
            continue
        found[f"regret of {name}"] = {
            "mean": round(statistics.mean(values), 4),
            "worst": round(max(values), 4),
        }
    errors = [abs(p["error"]) for row in rows for p in row["plans"] if "error" in p]
    if errors:
        mean, worst = round(statistics.mean(errors), 4), round(max(errors), 4)
        found["error of predictions"] = {"mean": mean, "worst": worst, "plans": len(errors)}
    return found


def table(row: Mapping[str, Any]) -> str:
    """The plans of a pair, the fastest first."""
    plans = sorted(row["plans"], key=lambda plan: plan.get("measured_seconds", float("inf")))
    lines = [f"{row['model']} on {row['cluster']}, load {row['load'][0]:.1f}, {row['load'][1]:.1f}"]
    for plan in plans:
        if "failed" in plan:
            lines.append(f"  {plan['plan']:<24} {plan['failed']}")
            continue
        predicted = plan.get("predicted_seconds")
        known = f"{1e3 * predicted:9.1f} ms predicted" if predicted else ""
        lines.append(f"  {plan['plan']:<24} {1e3 * plan['measured_seconds']:9.1f} ms {known}")
    return "\n".join(lines)


def main() -> None:
    """Some pairs or all."""
    parser = results.parser(__doc__, "regret")
    names = [f"{model}@{cluster}" for model, cluster in PAIRS]
    parser.add_argument("--pairs", nargs="+", help="how many, or their names: " + ", ".join(names))
    parser.add_argument("--rules", type=int, help="at most so many plans made by rule")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each plan")
    parser.add_argument("--chunk", type=int, default=6, help="steps of a turn")
    args = parser.parse_args()
    asked = args.pairs or [str(len(PAIRS))]
    chosen = names[: int(asked[0])] if asked[0].isdigit() else asked
    if wrong := set(chosen) - set(names):
        parser.error(f"no such pairs: {', '.join(sorted(wrong))}")
    rows = {f"{r['model']}@{r['cluster']}": r for r in results.read(args.out).get("rows", ())}
    for name in chosen:
        model, cluster = name.split("@")
        made = one(model, cluster, args.rules, rounds=args.rounds, chunk=args.chunk)
        print(table(made), flush=True)
        rows[name] = results.row(made)
        known = [rows[pair] for pair in names if pair in rows]
        results.write(args.out, {**summary(known), "rows": known})


if __name__ == "__main__":
    main()

"""Sums over processes by algorithm, over links that are paced, beside what two figures predict.

    python benchmarks/collectives.py [--workers 2 4 8 3] [--megabits 10]

Processes of one CPU device each, joined by `jax.distributed` over Gloo, sit behind a link of their
own (`paced_links.py`), so that it is the link and not the processor that a message waits for. They
sum arrays by a ring, a tree and by halving and doubling: the very messages of
tests/support/collective_messages.py, round by round, which a test holds equal to the planner's
formulas.

The two figures of a link are fitted to one message from one worker to another, there and back, of
the job of two; nothing else is. Every row has the measured seconds over the predicted ones.

A round is one permute, but for one in which all workers exchange in pairs: of two permutes between
the same workers the second begins when the first has ended, it seems because each sends before it
says on the same connection that it is ready to receive. Such rounds are reduce-scatters of each
pair, whose messages are the same ones. The form `halving-doubling, permutes` shows what permutes
take, and has another prediction beside it, in which the messages of a pair follow one another.

Each round of turns has every case once, and the medians are over rounds. A case ends when its last
worker has ended. Sums are checked in every turn, and a row says of wrong ones. The result is in
benchmarks/results/collectives.json.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import paced_links
import results

sys.path.insert(0, str(results.ROOT / "tests"))

from support import collective_messages as messages

PING_PONG, EXCHANGE, OWN = "ping-pong", "exchange", "psum"
ALGORITHMS = ["ring", "tree", "halving-doubling", "halving-doubling, permutes"]
FITTED_WORKERS = 2
TARGET_SECONDS = 0.3  # of a case: it repeats smaller ones


def found_by(
    n: int, cases: Sequence[Sequence[Any]], megabits: float, rounds: int
) -> list[tuple[list[float], int]]:
    """Seconds of each case in each round of one job, and how often its sum was wrong."""
    worker = results.ROOT / "benchmarks" / "collectives_worker.py"
    command = [sys.executable, str(worker), f"{paced_links.address(0)}:5321", str(n), str(rounds)]
    told = paced_links.results_of([*command, json.dumps(cases)], n, megabits * 1e6)
    seconds = [
        [
            (max(end for _, end in turn) - max(begin for begin, _ in turn)) / case[2]
            for turn in zip(*own, strict=True)
        ]
        for case, own in zip(cases, zip(*(times for times, _ in told), strict=True), strict=True)
    ]
    wrong = [max(own) for own in zip(*(wrong for _, wrong in told), strict=True)]
    return list(zip(seconds, wrong, strict=True))


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency in seconds and bytes a second of the line of least relative squares.

    An idle link lets its first packet pass at once, so that the line may begin below zero, where no
    link does: then it goes through zero.

    Args:
        points: Bytes and seconds of messages.
    """
    weights = [1 / t**2 for _, t in points]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    y = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    both = sum(w * (b - x) * (t - y) for w, (b, t) in zip(weights, points, strict=True))
    slope = both / sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    if y < slope * x:
        both = sum(w * b * t for w, (b, t) in zip(weights, points, strict=True))
        return 0.0, sum(w * b * b for w, (b, _) in zip(weights, points, strict=True)) / both
    return y - slope * x, 1 / slope


def predicted(form: str, n: int, num_bytes: int, latency: float, bandwidth: float) -> list[float]:
    """Seconds by the messages; of permutes also those where one of a pair follows the other."""
    if form in (PING_PONG, EXCHANGE):
        return [latency + num_bytes / bandwidth]
    name, _, by_permutes = form.partition(", ")
    make = getattr(messages, ("ring" if name == OWN else name).replace("-", "_"))
    chunks, rounds = make(n)
    sent = messages.run(n, chunks, rounds)
    forms = [sent]
    if by_permutes:
        ways = [{(a, b) for a, b, *_ in own} for own in rounds]
        turns = [2 if any((b, a) in own for a, b in own) else 1 for own in ways]
        forms.append([one for one, k in zip(sent, turns, strict=True) for _ in range(k)])
    return [messages.seconds(s, chunks, num_bytes, latency, bandwidth) for s in forms]


def forms_of(n: int) -> list[str]:
    """What so many workers measure.

    Numbers that are no powers of two leave workers without a partner, which a reduce-scatter of
    pairs cannot.
    """
    algorithms = ALGORITHMS if n & (n - 1) == 0 else [a for a in ALGORITHMS if a != ALGORITHMS[2]]
    return [*([PING_PONG, EXCHANGE] if n == FITTED_WORKERS else []), *algorithms, OWN]


def main() -> None:
    """Every number of workers, and the rows of all."""
    parser = results.parser(__doc__, "collectives")
    sizes = [61_440, 245_760, 983_040]
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 3])
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="bytes")
    parser.add_argument("--megabits", type=float, default=10.0, help="a second, of each link")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    paced_links.enter_own_network()
    rows, link = [], (0.0, 1.0)
    for n in sorted({FITTED_WORKERS, *args.workers}, key=lambda n: n != FITTED_WORKERS):
        # Whole numbers of every algorithm's chunks.
        sizes = [size // (4 * n * 8) * 4 * n * 8 for size in args.sizes]
        once = [8 * size / (args.megabits * 1e6) for size in sizes]
        cases = [
            (form, size, max(1, min(10, round(TARGET_SECONDS / seconds))))
            for form in forms_of(n)
            for size, seconds in zip(sizes, once, strict=True)
        ]
        found = found_by(n, cases, args.megabits, args.rounds)
        medians = [statistics.median(own) for own, _ in found]
        if n == FITTED_WORKERS:
            own = [(c[1], t / 2) for c, t in zip(cases, medians, strict=True) if c[0] == PING_PONG]
            link = fitted(own)
        rows += [row(case, n, *own, link) for case, own in zip(cases, found, strict=True)]
        write(args, link, rows)


def row(
    case: Sequence[Any], n: int, found: Sequence[float], wrong: int, link: tuple[float, float]
) -> dict[str, Any]:
    """One form, number of workers and size."""
    form, size, _ = case
    own = [t / 2 for t in found] if form == PING_PONG else found
    measured = statistics.median(own)
    first, *others = predicted(form, n, size, *link)
    made = {
        "form": form,
        "workers": n,
        "bytes": size,
        "measured_seconds": round(measured, 6),
        "predicted_seconds": round(first, 6),
        "ratio": round(measured / first, 4),
        "least_and_most_seconds": [round(min(own), 6), round(max(own), 6)],
    }
    for seconds in others:
        made["ratio, pairs in turn"] = round(measured / seconds, 4)
    if wrong:
        made["wrong sums"] = wrong
    return made


def write(
    args: argparse.Namespace, link: tuple[float, float], rows: Sequence[dict[str, Any]]
) -> None:
    """The result so far."""
    bar = [r["ratio"] for r in rows if r["form"] in ALGORITHMS[:3]]
    within = sum(abs(ratio - 1) <= 0.2 for ratio in bar)
    results.write(
        args.out,
        {
            "megabits_per_second": args.megabits,
            "fitted": {"latency_seconds": link[0], "bytes_per_second": link[1]},
            "within_20_percent": f"{within} of {len(bar)}",
            "rows": list(rows),
        },
    )


if __name__ == "__main__":
    main()

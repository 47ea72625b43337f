"""Which share of what all tests cover the quick ones cover, room by room.

    make coverage                 # writes .coverage-quick.json
    make coverage ARGS=--all      # writes .coverage-all.json
    PYTHONPATH=tests python -m support.covered .coverage-quick.json .coverage-all.json

Lines and branches count alike, as `coverage json` reports them.
"""

import collections
import json
import pathlib
import sys


def by_room(report):
    """Covered lines and branches of each room, as sets."""
    found = collections.defaultdict(set)
    for name, file in json.loads(pathlib.Path(report).read_text())["files"].items():
        parts = pathlib.PurePath(name).parts
        room = parts[2] if len(parts) > 3 else "hxla"
        found[room] |= {(name, line) for line in file["executed_lines"]}
        found[room] |= {(name, *branch) for branch in file["executed_branches"]}
    return found


def main(quick, whole):
    """Print a row for each room, and end with 1 if one is below 0.95."""
    few, all_ = by_room(quick), by_room(whole)
    few = {room: few[room] & all_[room] for room in all_}
    print(f"{'room':12} {'quick':>7} {'all':>7}  share")
    for room in sorted(all_):
        print(
            f"{room:12} {len(few[room]):7} {len(all_[room]):7}  {share(few[room], all_[room]):.3f}"
        )
    low = [room for room in all_ if share(few[room], all_[room]) < 0.95]
    print("below 0.95:", ", ".join(low) or "none")
    return bool(low)


def share(some, all_):
    return len(some) / max(1, len(all_))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

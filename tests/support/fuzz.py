"""Damaged files of every kind that hxla reads: refused in words, or read and usable.

    PYTHONPATH=tests python -m support.fuzz --inputs 1000 --seed 0

Mutations are drawn from the seed and an input's number alone. A process of its own reads them one
after another, and one that does not answer is ended and named. Of an input three things are held
against it: an error that is none of hxla's, more than two seconds, more than 500 MB.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from support.paths import PYTHONPATH

MOST_SECONDS, MOST_MEBIBYTES = 2.0, 500.0
_PATIENCE_SECONDS = 60.0  # of the parent: importing jax takes some
_TOKEN = re.compile(rb'-?\d+\.?\d*(?:e[+-]?\d+)?|"[^"\n]*"|true|false|null|[\w.-]+')
_DIGITS = re.compile(rb"\d{1,9}")
_NASTY = [
    b"0", b"-1", b"0.5", b"-0.0", b"1e300", b"-1e300", b"1e-320", b"99999999999", b"9" * 5000,
    b"1e999", b"NaN", b"Infinity", b"nan", b"inf", b"true", b"false", b"null", b'""', b'"x"',
    b'"1"', b"[]", b"{}", b"[[]]", b"2147483648", b"9223372036854775808", b'"%s"' % (b"a" * 20000),
    b"'(a+)+$'", b"'(a|a)*b'", b"'.*.*.*.*.*.*x'", b'"F1000000"', b'"F0.99999999"', b"2024-01-01",
    b'"\\ud800"', b'"\\u0000"', b"\xff", b"1_000", b"0x10", b'"tensor"', b'"stage"', b"65536",
]  # fmt: skip
_VALUES = [
    None, True, False, 0, -1, 1, 2, 0.5, 1.5, 1e300, 1e-320, -0.0, 10**11, 2**63, 10**400, "", "x",
    "1", "a" * 5000, "F1000000", "F9.9", "(a+)+$", "data", "stage", "float32", "O", "int4",
    [], {}, [[]], [1, 2], ["a"], {"a": 1}, float("nan"), float("inf"), 65536, 1000, [0] * 1000,
]  # fmt: skip


def _number(data: bytes, rng: random.Random) -> bytes:
    found = list(_TOKEN.finditer(data))
    for match in sorted(rng.sample(found, min(rng.choice((1, 1, 2, 4)), len(found))), key=_end):
        nasty = rng.choice(_NASTY)
        data = data[: match.start()] + nasty + data[match.end() :]
    return data


def _nudge(data: bytes, rng: random.Random) -> bytes:
    """A number that is a little other, and may be right."""
    found = list(_DIGITS.finditer(data))
    for match in sorted(rng.sample(found, min(rng.choice((1, 1, 2)), len(found))), key=_end):
        number = int(match[0])
        other = rng.choice((number + 1, number - 1, 2 * number, number // 2, 0, 1, 10 * number))
        data = data[: match.start()] + b"%d" % other + data[match.end() :]
    return data


def _end(match: re.Match[bytes]) -> int:
    return -match.end()


def _swap(data: bytes, rng: random.Random) -> bytes:
    found = list(_TOKEN.finditer(data))
    if len(found) < 2:
        return data
    a, b = sorted(rng.sample(found, 2), key=lambda m: m.start())
    return data[: a.start()] + b[0] + data[a.end() : b.start()] + a[0] + data[b.end() :]


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _delete(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 10, 200)) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 10, 300))]
    return data[:start] + piece * rng.choice((2, 20, 2000)) + data[start:]


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    for _ in range(rng.choice((1, 2, 5))):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        choice = rng.randrange(3)
        if choice == 0:
            lines[i], lines[j] = lines[j], lines[i]
        elif choice == 1:
            lines.insert(i, lines[j])
        elif len(lines) > 1:
            del lines[i]
    return b"".join(lines)


def _nest(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((50, 200, 3000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"a.", b" = 1")))
    inner = opening * depth + (b"1" if opening != b"a." else b"a") + closing * depth
    found = list(_TOKEN.finditer(data))
    if not found or rng.random() < 0.2:
        return inner
    match = rng.choice(found)
    return data[: match.start()] + inner + data[match.end() :]


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"\0" * 100, b"\xef\xbb\xbf" + data, rng.randbytes(1000), data * 3))


def _large(data: bytes, rng: random.Random) -> bytes:
    unit = rng.choice((b"[],", b"a = 1\n", b" ", b"0", b'"a":1,', b"[[a]]\n", b"\n", b"a.b.", b"("))
    return data + unit * (rng.choice((1 << 17, 1 << 21)) // len(unit))


def _json(data: bytes, rng: random.Random) -> bytes:
    """A value, a key or a length changed where it stands."""
    try:
        tree = json.loads(data)
    except ValueError:
        return _number(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        above, key = rng.choice(places)
        choice = rng.randrange(6)
        if choice == 0:
            del above[key]
        elif choice == 1 and isinstance(above, list):
            above.append(above[key])
        elif choice == 2:
            other, name = rng.choice(places)
            try:
                above[key] = json.loads(json.dumps(other[name]))
            except (KeyError, IndexError):
                continue
        elif choice == 3 and isinstance(above, dict):
            above[rng.choice(("unknown", "", "name", "rank"))] = rng.choice(_VALUES)
        else:
            above[key] = rng.choice(_VALUES)
        if not list(_places(tree)):
            break
    return json.dumps(tree, indent=1).encode()


def _places(tree):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


MUTATIONS = {
    "token": _number, "swap": _swap, "flip": _flip, "cut": _cut, "delete": _delete,
    "repeat": _repeat, "lines": _lines, "nest": _nest, "noise": _noise, "large": _large,
    "value": _json, "nudge": _nudge,
}  # fmt: skip
_WEIGHTS = {"token": 4, "value": 6, "nudge": 6, "lines": 2}


@functools.cache
def _bomb(unit: bytes) -> bytes:
    return gzip.compress(unit * ((1 << 28) // len(unit)), 1)


def write(path: pathlib.Path, kind, rng: random.Random) -> str:
    """Make a damaged file; returns how it was damaged."""
    special = rng.random()
    if special < 0.01:
        os.mkfifo(path)
        return "pipe"
    if special < 0.015:
        path.mkdir()
        return "folder"
    if special < 0.02:
        path.symlink_to("/dev/zero")
        return "endless device"
    if special < 0.025:
        path.symlink_to(path)
        return "link to itself"
    if kind.is_packed and special < 0.08:
        path.write_bytes(_bomb(rng.choice((b"\0", b"[", b"a = 1\n"))))
        return "gzip bomb"
    weights = [_WEIGHTS.get(name, 1) for name in MUTATIONS]
    name = rng.choices(list(MUTATIONS), weights)[0]
    if kind.is_packed and rng.random() < 0.3:
        path.write_bytes(MUTATIONS[name](gzip.compress(kind.text), rng))
        return f"{name} of what is packed"
    data = MUTATIONS[name](kind.text, rng)
    path.write_bytes(gzip.compress(data) if kind.is_packed else data)
    return name


class Memory:
    """The most resident memory since it was asked last, in MiB above what there was then."""

    def __init__(self) -> None:
        self._most = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _now(self) -> float:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._now())
            time.sleep(0.002)

    def start(self) -> None:
        self._before = self._most = self._now()

    def stop(self) -> float:
        return max(self._most, self._now()) - self._before


def child(numbers: list[int], seed: int) -> None:
    """Read inputs, and print a line before and after each."""
    import hxla
    from support.fuzz_kinds import kinds

    every = kinds()
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        for i, kind in enumerate(every.values()):  # imports, and caches that are filled once
            home = pathlib.Path(folder, f"right{i}")
            home.mkdir()
            path = home / kind.name
            path.write_bytes(gzip.compress(kind.text) if kind.is_packed else kind.text)
            kind.use(path)
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            name = list(every)[number % len(every)]
            home = pathlib.Path(folder, str(number))
            home.mkdir()
            how = write(home / every[name].name, every[name], rng)
            print(json.dumps({"number": number, "kind": name, "how": how}), flush=True)
            found = {"number": number, "outcome": "accepted"}
            memory.start()
            begun, computed = time.perf_counter(), time.process_time()
            try:
                every[name].use(home / every[name].name)
            except hxla.HxlaError as error:
                found["outcome"] = "refused"
                found["words"] = str(error)[:200]
                if len(str(error)) > 20_000:
                    found |= {
                        "outcome": "failed",
                        "words": f"an error of {len(str(error))} letters",
                    }
            except BaseException:
                found |= {"outcome": "failed", "words": traceback.format_exc()[-1500:]}
            found["seconds"] = time.perf_counter() - begun
            found["processor_seconds"] = time.process_time() - computed
            found["mebibytes"] = memory.stop()
            print(json.dumps(found), flush=True)


@dataclasses.dataclass(kw_only=True)
class Input:
    """A damaged file, and what became of it."""

    number: int
    kind: str
    how: str
    outcome: str = "hung"
    words: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    mebibytes: float = 0.0


def run(num_inputs: int, seed: int, patience_seconds: float = _PATIENCE_SECONDS) -> list[Input]:
    """All inputs, in processes that are replaced when one hangs."""
    waiting = list(range(num_inputs))
    found: list[Input] = []
    while waiting:
        command = [sys.executable, __file__, "--child", "--seed", str(seed)]
        env = os.environ | {"PYTHONPATH": PYTHONPATH}
        process = subprocess.Popen(
            [*command, "--numbers", ",".join(map(str, waiting))],
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"JAX_PLATFORMS": "cpu"},
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=patience_seconds)
            except queue.Empty:
                line = None
            if line is None:
                break
            row = json.loads(line)
            if "kind" in row:
                found.append(Input(**row))
                waiting.remove(row["number"])
            else:
                found[-1] = dataclasses.replace(found[-1], **row)
        process.kill()
        if process.wait() == 0 or (waiting and not found):
            break
    return found


def _forward(pipe, lines) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def bad(found: list[Input]) -> list[Input]:
    """Inputs that were answered by no error of hxla's, or by one after too long or too much."""
    return [
        i
        for i in found
        if i.outcome in ("failed", "hung")
        or i.seconds > MOST_SECONDS
        or i.mebibytes > MOST_MEBIBYTES
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child([int(n) for n in args.numbers.split(",")], args.seed)
        return 0
    found = run(args.inputs, args.seed)
    for kind in dict.fromkeys(i.kind for i in found):
        own = [i for i in found if i.kind == kind]
        counts = collections.Counter(i.outcome for i in own)
        told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        most = max(i.seconds for i in own), max(i.mebibytes for i in own)
        print(f"{kind:<20} {told}; at most {most[0]:.2f} s and {most[1]:.0f} MiB")
    for i in bad(found):
        print(
            f"\ninput {i.number} of seed {args.seed}, {i.kind}, {i.how}: {i.outcome}, "
            f"{i.seconds:.2f} s ({i.processor_seconds:.2f} s of the processor), "
            f"{i.mebibytes:.0f} MiB\n{i.words}"
        )
    print(f"\n{len(found)} inputs, {len(bad(found))} of them answered badly")
    return bool(bad(found)) or len(found) < args.inputs


if __name__ == "__main__":
    sys.exit(main())

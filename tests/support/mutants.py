"""Plants one fault at a time and asks whether the quick tests notice.

    make mutants ARGS="--rooms lower plan"

The faults are lines of `support/data/faults.toml`. Each is planted in a copy of the sources, where
the quick tests of its room run until one fails; where none does, the quick tests of all rooms. The
faults that nothing noticed are listed, and the exit code is their number.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

from support.paths import DATA, ROOT

FAULTS = DATA / "faults.toml"
#: A fault may make a process wait for ever: then it is noticed.
MOST_SECONDS = 1800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One line that another takes the place of.

    Attributes:
        room: The room of the package that it is in, without underscore.
        what: The fault in words.
        old: A whole line that the package has once.
        new: What stands there instead.
    """

    room: str
    what: str
    old: str
    new: str

    def planted(self, package: pathlib.Path) -> tuple[pathlib.Path, str]:
        """The file that the line is in, and its text with the fault."""
        found = []
        for path in sorted(package.rglob("*.py")):
            lines = path.read_text().splitlines()
            found += [(path, lines, i) for i, line in enumerate(lines) if line == self.old]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} lines of the package are {self.old!r}, not one")
        [(path, lines, i)] = found
        lines[i] = self.new
        return path, "\n".join(lines) + "\n"


def faults():
    """All of them, in the file's order."""
    return [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["fault"]]


def fails(copy: pathlib.Path, tests: str, workers: int) -> str | None:
    """The first test that fails in a copy of the sources; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-rfE"]
    command += ["-p", "no:cacheprovider", "-n", str(workers), "--dist", "worksteal", tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        ran = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {MOST_SECONDS} s"
    if ran.returncode == 0:
        return None
    said = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (said or ran.stdout.splitlines()[-1:] or ran.stderr.splitlines()[-1:] or ["?"])[0]


def main():
    """Plant each fault, and say what noticed it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rooms", nargs="*", help="only faults of these rooms")
    parser.add_argument("--own-tests", action="store_true", help="run no tests of other rooms")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    chosen = [f for f in faults() if not args.rooms or f.room in args.rooms]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "hxla")
        asked = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
        for name in subprocess.run(asked, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for number, fault in enumerate(chosen):
            path, text = fault.planted(copy / "hxla")
            plain, begun = path.read_text(), time.monotonic()
            path.write_text(text)
            by = fails(copy, f"tests/{fault.room}", args.workers)
            if by is None and not args.own_tests:
                by = fails(copy, "tests", args.workers)
                by = by and f"(another room) {by}"
            path.write_text(plain)
            unnoticed += [fault] if by is None else []
            took = time.monotonic() - begun
            print(f"{number + 1}/{len(chosen)} {fault.room}: {fault.what} {took:.0f} s", flush=True)
            print(f"    {by or 'UNNOTICED'}", flush=True)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} faults were noticed; not these:")
    for fault in unnoticed:
        print(f"    {fault.room}: {fault.what}\n      {fault.new.strip()}")
    sys.exit(len(unnoticed))


if __name__ == "__main__":
    main()

"""How a benchmark writes its result, and what every result says of where it is from."""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping
from typing import Any

import jax

import hxla

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
_RUNS = ("hxla", "meshes", "rules", "examples", "benchmarks", "pyproject.toml")


def facts() -> dict[str, str]:
    """What figures depend on: the commit, the date, the machine and the versions."""
    _check_checkout()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "commit": commit(ROOT),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "hxla": version(ROOT),
    }


def row(result: Mapping[str, Any]) -> dict[str, Any]:
    """One of several results in a file, which are not all of one commit, day and machine."""
    told = facts()
    return {name: told[name] for name in ("commit", "date", "processor")} | dict(result)


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Write a result with the facts above it, and print it."""
    text = json.dumps({"measured": facts(), **result}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(json.dumps(result, indent=1), f"\nwritten: {path}", flush=True)


def read(path: pathlib.Path) -> dict[str, Any]:
    """What `write` wrote, or nothing if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """One with an option for where the result of a benchmark goes.

    Args:
        doc: The benchmark's docstring.
        name: Of its file.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=pathlib.Path, default=FOLDER / f"{name}.json")
    return made


def commit(checkout: pathlib.Path) -> str:
    """The commit of a checkout, `-dirty` if anything that runs differs from it."""
    head = _git(checkout, "rev-parse", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--", *_RUNS, ":!benchmarks/results")
    return f"{head}{'-dirty' if changed else ''}" if head else "not known"


def version(checkout: pathlib.Path) -> str:
    """The version of hxla that a checkout holds."""
    file = checkout / "hxla" / "_src" / "core" / "version.py"
    if file.exists():
        return str(re.search('__version__ = "(.+)"', file.read_text())[1])
    table = tomllib.loads((checkout / "pyproject.toml").read_text())
    if "version" in table["project"]:
        return str(table["project"]["version"])
    text = (checkout / table["tool"]["hatch"]["version"]["path"]).read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def _git(checkout: pathlib.Path, *arguments: str) -> str:
    try:
        ran = subprocess.run(
            ["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ran.stdout.strip()


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _check_checkout() -> None:
    own = pathlib.Path(hxla.__file__).parent.parent
    if own.resolve() != ROOT.resolve():
        raise SystemExit(
            f"hxla is imported from {own}, so this checkout's commit would be wrong: install "
            f"{ROOT} with pip install --editable, or set PYTHONPATH={ROOT}"
        )

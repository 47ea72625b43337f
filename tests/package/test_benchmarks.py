"""Benchmarks use hxla as its users do: by its public names."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

import hxla
from support.paths import PYTHONPATH, ROOT
from support.tiers import rows

FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
KNOWN = {*hxla.__all__, "__file__"}
sys.path.insert(0, str(ROOT / "benchmarks"))

import paced_links  # noqa: E402


def private_uses(text):
    """Lines that use anything of hxla that is not a public name."""
    tree, found = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong = [a.name for a in node.names if a.name.startswith("hxla.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hxla":
            wrong = [node.module] if node.module != "hxla" else []
            wrong += [a.name for a in node.names if a.name not in KNOWN]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            wrong = [node.attr] if node.value.id == "hxla" and node.attr not in KNOWN else []
        else:
            wrong = []
        found += [f"line {node.lineno}: {name}" for name in wrong]
    return found


def test_benchmarks_build_on_public_names_only():
    found = {file.stem: private_uses(file.read_text()) for file in FILES}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        "import hxla._src.session.step",
        "import hxla.testing",
        "from hxla._src.lower import exact",
        "from hxla import _core",
        "from hxla import Proposal",
        "import hxla\nhxla._src.session.step.Stepper",
        "import hxla\nhxla.set_default_strategy(None)",
    ],
)
def test_what_is_not_public_is_found(text):
    assert len(private_uses(text)) >= 1


def test_results_carry_their_commit_and_date():
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        measured = json.loads(file.read_text())["measured"]
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", measured["commit"]), file
        assert re.match(r"20\d\d-\d\d-\d\d", measured["date"]), file


def run(name, folder, options, **settings):
    script = ROOT / "benchmarks" / f"{name}.py"
    plain = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, script, *options, "--out", folder / "found.json"],
        env=plain | {"PYTHONPATH": PYTHONPATH} | settings,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(paced_links.lacking()), reason=paced_links.lacking())
def test_sums_of_two_processes_take_what_their_link_says(tmp_path):
    sizes = ["--workers", "2", "--sizes", "61440", "122880", "--rounds", "1"]
    assert run("collectives", tmp_path, sizes).returncode == 0
    told = json.loads((tmp_path / "found.json").read_text())
    assert {row["form"] for row in told["rows"]} >= {"ring", "tree", "halving-doubling"}
    # Gloo's reduce-scatter was seen to give wrong sums over such links; hxla has none of it.
    by_scatters = {"exchange", "ring", "halving-doubling"}  # of two workers
    assert not any("wrong sums" in row for row in told["rows"] if row["form"] not in by_scatters)
    # Of 10 megabits a second, without the headers of its packets.
    assert told["fitted"]["bytes_per_second"] == pytest.approx(10e6 / 8, rel=0.15)


@pytest.mark.parametrize("name", rows(["collectives", "islands", "staggered"], "collectives"))
def test_where_no_links_can_be_made_one_line_says_so(name, tmp_path):
    ran = run(name, tmp_path, [], PATH=str(tmp_path))
    assert ran.returncode != 0
    [line] = ran.stderr.strip().splitlines()
    assert line.startswith("no paced links here: ")


@pytest.mark.slow
@pytest.mark.skipif(bool(paced_links.lacking()), reason=paced_links.lacking())
def test_pipelines_behind_shared_cards_train_by_every_start(tmp_path):
    sizes = ["--rounds", "1", "--microbatches", "2", "--rows", "256"]
    ran = run("staggered", tmp_path, ["--devices", "waiting", *sizes])
    assert ran.returncode == 0, ran.stderr
    [row] = json.loads((tmp_path / "found.json").read_text())["devices"].values()
    assert all(seconds > 0 for seconds in row["step_seconds"].values())


@pytest.mark.slow
@pytest.mark.skipif(bool(paced_links.lacking()), reason=paced_links.lacking())
def test_islands_send_less_and_take_less_time_over_a_slow_link(tmp_path):
    """Of the bytes of one sum in each step; both processes end with the same bits, or it fails."""
    ran = run("islands", tmp_path, ["--steps", "20", "--every", "10", "--width", "64"])
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "found.json").read_text())
    sent, parameters = told["bytes_sent_a_step"], told["parameters"]
    # Half of two limbs and half of the sums; half of parameters and two moments, and of the means.
    assert sent["together"] == pytest.approx(parameters * (8 + 4) / 2, rel=0.25)
    assert sent["islands"] == pytest.approx(parameters * 3 * (4 + 4) / 2 / 10, rel=0.25)

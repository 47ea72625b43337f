"""The package as a whole: its public names, its one-way imports, its examples."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import hxla

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "hxla"
# Imports go down this list only; names within one entry may import one another in any direction
# that has no cycle.
LAYERS = [
    {"_types", "_errors", "_format", "_robust"},
    {"_jaxpr", "_history", "_nvml", "_page"},
    {"_config", "_catalog", "_schedules"},
    {"_replay"},
    {"_ticks"},
    {"_timeline"},
    {"_cluster", "_mesh_file", "_rules", "_annotate", "_factors", "_virtual"},
    {"_profile"},
    {"_model", "_loss", "_graph", "_graph_picture", "_plan", "_proposal"},
    {"_trace", "_evaluate"},
    {"_segments", "_uncross", "_halves", "_groups"},
    {"_parts"},
    {"_planner"},
    {"_lower"},
    {"_measure"},
    {"_partition", "_detect"},
    {"_launch"},
    {"_inspect"},
    {"_train"},
    {"testing"},
    {"__init__", "__main__"},
]


def public_names():
    return {
        name
        for name, value in vars(hxla).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_the_public_names_are_the_documented_ones():
    documented = set(re.findall(r"^\| `hxla\.(\w+)`", (ROOT / "docs/api.md").read_text(), re.M))
    assert public_names() == documented


def test_every_public_name_has_a_docstring():
    assert not [n for n in public_names() if not inspect.getdoc(getattr(hxla, n))]


def imports(path):
    """First components below `hxla` of everything a module imports from the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            if node.module:
                yield (*base, *node.module.split("."))[0]
            elif base:
                yield base[0]
            else:
                yield from (alias.name for alias in node.names)


def layer(name):
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"{name} has no place in LAYERS"
    return found[0]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_one_way(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    up = {name for name in imports(path) if layer(name) > layer(own)}
    assert not up


@pytest.mark.parametrize(
    "model", ["resnet.py", "experts.py", "bert.py", "gpt.py", "t5.py", "lstm.py", "vit.py"]
)
def test_a_model_needs_four_lines_of_hxla_at_most(model):
    lines = (ROOT / "examples" / model).read_text().splitlines()
    code = [line for line in lines if re.search(r"\bhxla\b", line) and not line.startswith('"""')]
    code = [line for line in code if re.search(r"import hxla|hxla\.\w+\(", line)]
    assert len(code) <= 4, code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("02_split_classifier.py", ["gather float32[256,2048]", "accuracy"]),
        ("03_experts.py", ["tensor=128", "412,975,439,872"]),
        ("06_inspect.py", ["64.0 KiB  tensor", "1 all-to-all of 256.0 KiB over tensor in mlp"]),
        ("04_rules.py", ["Bert: loss", "GPT: loss", "698,367,393,792"]),
    ],
)
def test_an_example_runs(script, wanted):
    steps = [] if script == "06_inspect.py" else ["--steps", "3"]
    _runs([str(ROOT / "examples" / script), *steps], wanted)


@pytest.mark.slow
def test_a_model_too_large_for_a_device_trains_over_two_without_annotations():
    script = str(ROOT / "examples" / "05_auto.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-2-small", script, "--steps", "3"]
    _runs(command, ["auto_parallel: 2 devices a copy", "up/kernel: P(None, 'tensor')", "1 copies"])


def _runs(command, wanted):
    ran = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for text in wanted:
        assert text in ran.stdout

"""The package as a whole: its public names, its one-way imports, its examples."""

import ast
import graphlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import types
from collections import Counter

import pytest

import hxla

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "hxla"
# Imports go down this list only, and have no cycle within an entry.
LAYERS = (
    "_core",
    "_jax",
    "_schedule",
    "_model",
    "_graph",
    "_cluster",
    "_plan",
    "_profile",
    "_planner",
    "_lower",
    "_launch",
    "_report",
    "_inspect",
    "_run",
    "testing",
    "__init__",
    "__main__",
)
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module):
    """Modules of the package that a module imports, inside functions too."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        name = ".".join(filter(None, base))
        if name in MODULES:
            yield name
        else:
            yield from (".".join(filter(None, (name, alias.name))) for alias in node.names)


GRAPH = {module: {m for m in imports(module) if m in MODULES} for module in MODULES}


def layer(module):
    return LAYERS.index(module.split(".")[0])


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    assert not [m for m in GRAPH[module] if layer(m) > layer(module)]


def test_imports_have_no_cycle():
    try:
        tuple(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def defined(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name


def test_no_name_stands_for_two_ideas():
    files = Counter(path.stem for path in MODULES.values() if not path.stem.startswith("__"))
    classes = Counter(name for path in MODULES.values() for name in set(defined(path)))
    assert not [name for names in (files, classes) for name, n in names.items() if n > 1]


def test_a_file_is_one_idea():
    assert not [m for m, path in MODULES.items() if len(path.read_text().splitlines()) > 500]


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
        ("03_experts.py", ["data x tensor = 1 x 128", "412,975,439,872"]),
        ("06_inspect.py", ["64.0 KiB  tensor", "1 all-to-all of 256.0 KiB over tensor in mlp"]),
        ("04_rules.py", ["Bert: loss", "GPT: loss", "698,367,393,792"]),
    ],
)
def test_an_example_runs(script, wanted):
    steps = [] if script == "06_inspect.py" else ["--steps", "3"]
    _runs([str(ROOT / "examples" / script), *steps], wanted)


@pytest.mark.slow
def test_the_demo_runs(tmp_path):
    script = str(ROOT / "examples" / "01_mixed_cluster.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-1.0-0.33", script, "--steps", "4"]
    command += ["--compared-steps", "2", "--folder", str(tmp_path)]
    _runs(command, ["of attainable", "identical after 2 steps", "nats per byte"])
    assert (tmp_path / "mixed_cluster.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_model_too_large_for_a_device_trains_over_two_without_annotations():
    script = str(ROOT / "examples" / "05_auto.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-2-small", script, "--steps", "3"]
    _runs(
        command,
        ["data x tensor = 1 x 2", "chosen by search", "up/kernel: P(None, 'tensor')", "1 copies"],
    )


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

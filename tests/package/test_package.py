"""The package as a whole: its public names, its one-way imports, its examples."""

import ast
import contextlib
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections import Counter

import optax
import pytest
from flax import nnx

import hxla
from support import families, models
from support.launched import own_environment
from support.paths import EXAMPLES, ROOT, TESTS

PACKAGE = ROOT / "hxla"
TEXTS = (".py", ".md", ".toml", ".json", ".txt")
# Imports go down this list only, and have no cycle within an entry.
LAYERS = (
    "core",
    "jax",
    "schedule",
    "model",
    "weights",
    "graph",
    "cluster",
    "plan",
    "profile",
    "lower",
    "launch",
    "report",
    "data",
    "checkpoint",
    "job",
    "choose",
    "inspect",
    "session",
    "scheduler",
    "cli",
    "_src",
    "testing",
    "__init__",
    "__main__",
)
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imports(module):
    """Modules of the package that a module imports, inside functions too."""
    package = module.split(".")[:-1]
    for node in ast.walk(TREES[module]):
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
    first, *others = module.split(".")
    return LAYERS.index(others[0] if first == "_src" and others[1:] else first)


def test_imports_go_one_way():
    assert not [(m, used) for m in GRAPH for used in GRAPH[m] if layer(used) > layer(m)]


def test_tests_name_private_modules_in_one_place_only():
    """So that a room of the package moves without a change to its tests."""
    private = re.compile(r"^\s*(?:from|import) hxla\._(?!_main__)", re.M)
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    found = {str(path.relative_to(TESTS)) for path, text in texts.items() if private.search(text)}
    assert not {name for name in found if not name.startswith("support/inside/")}


def test_tests_mirror_the_rooms():
    rooms = {path.name for path in (PACKAGE / "_src").iterdir() if path.is_dir()} - {"__pycache__"}
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders == rooms | {"laws", "package"}
    assert not list(TESTS.glob("test_*.py"))


def test_imports_have_no_cycle():
    try:
        tuple(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def defined(module):
    return {node.name for node in TREES[module].body if isinstance(node, ast.ClassDef)}


def test_no_class_stands_for_two_ideas():
    classes = Counter(name for module in MODULES for name in defined(module))
    assert not [name for name, num in classes.items() if num > 1]


def test_a_file_is_one_idea():
    long = {m: len(path.read_text().splitlines()) for m, path in MODULES.items()}
    assert not {m: num for m, num in long.items() if num > 700}
    classes = [n for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    lines = {c.name: c.end_lineno - c.lineno + 1 for c in classes}
    assert not {name: num for name, num in lines.items() if num > 400}


def public_names():
    """In the order of `hxla/__init__.pyi`, with the module that defines each and its node there."""
    body = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    parts = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {a.asname: definition(node.module, a.name) for node in parts for a in node.names}


def definition(module, name):
    """The module of the package that defines a name, and the node that does; None if another's."""
    for node in TREES[module].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [ast.unparse(t) for t in getattr(node, "targets", None) or [node.target]]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = module.split(".")[: -node.level] + (node.module or "").split(".")
            [alias] = [a for a in node.names if (a.asname or a.name) == name] or [None]
            if alias is not None:
                return definition(".".join(filter(None, base)), alias.name)
            continue
        else:
            continue
        if name in names:
            return module, node
    return None


PUBLIC = public_names()


def test_no_file_is_left_half_merged():
    folders = PACKAGE, TESTS, EXAMPLES, ROOT / "docs", ROOT / "benchmarks"
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in TEXTS]
    left = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.M)
    assert len(files) > 500
    assert not [str(path) for path in files if left.search(path.read_text())]


def test_the_public_names_are_the_documented_ones_in_their_order():
    documented = re.findall(
        r"^\| `hxla\.(\w+)`", (ROOT / "docs/reference/public-names.md").read_text(), re.M
    )
    assert list(PUBLIC) == documented
    assert set(hxla.__all__) == set(PUBLIC)
    assert all(hasattr(hxla, name) for name in PUBLIC)


def test_a_name_is_imported_when_it_is_used():
    """And a process that trains imports neither the solvers of plans nor what reads dumps."""
    code = """
import sys, hxla
assert "jax" not in sys.modules
hxla.train
assert "jax" in sys.modules
unused = {"scipy.optimize", "orbax.checkpoint", "matplotlib", "hxla._src.inspect.inspect"}
print(sorted(unused & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_classes_are_shown_by_their_public_names():
    classes = [(name, getattr(hxla, name)) for name in PUBLIC]
    shown = {name: cls.__module__ for name, cls in classes if isinstance(cls, type)}
    assert set(shown.values()) == {"hxla"}, shown


def test_a_launcher_starts_without_jax():
    code = "import sys, hxla.__main__; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def documentation(module, node):
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node)
    above = MODULES[module].read_text().splitlines()[node.lineno - 2]
    return above.removeprefix("#:") if above.startswith("#:") else None


def test_public_names_and_their_methods_are_documented_in_whole_sentences():
    wrong = []
    for name, (module, node) in PUBLIC.items():
        methods = node.body if isinstance(node, ast.ClassDef) else ()
        public = [m for m in methods if isinstance(m, ast.FunctionDef) and m.name[0] != "_"]
        for item in (node, *public):
            text = documentation(module, item)
            if not text or not re.match(r"\s*[A-Z`0-9].*[.:]$", text.splitlines()[0]):
                wrong.append((name, getattr(item, "name", name), text))
    assert not wrong


#: Objects of these classes are made by others, `Job.open`: no user calls the constructor.
MADE_BY_OTHERS = {"Session"}


def annotations(node):
    """Annotations of a function, of the public methods and fields of a class, or an alias."""
    if isinstance(node, ast.FunctionDef):
        spec = node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
        yield from (a.annotation for a in every if a is not None and a.annotation is not None)
        yield from [node.returns] if node.returns is not None else []
    elif isinstance(node, ast.ClassDef):
        special = {"__call__", "__iter__"}
        if node.name not in MADE_BY_OTHERS:
            special.add("__init__")
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) and not inner.target.id.startswith("_"):
                yield inner.annotation
            if isinstance(inner, ast.FunctionDef) and (
                inner.name in special or not inner.name.startswith("_")
            ):
                yield from annotations(inner)
    elif not isinstance(node.value, ast.Call):
        yield node.value  # an alias, not a constant


def mentioned(annotation):
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError):
                yield from mentioned(ast.parse(node.value, mode="eval").body)


def test_every_name_that_a_public_signature_mentions_is_public():
    hidden = set()
    for name, (module, node) in PUBLIC.items():
        for other in {n for annotation in annotations(node) for n in mentioned(annotation)}:
            found = definition(module, other)
            if found is None or other in PUBLIC:
                continue
            value = getattr(importlib.import_module(f"hxla.{found[0]}"), other)
            if getattr(value, "__module__", "").startswith("hxla") or not isinstance(value, type):
                hidden.add((name, other))
    assert not hidden


def test_a_model_needs_four_lines_of_hxla_at_most():
    for model in ("resnet", "experts", "bert", "gpt", "t5", "lstm", "vit"):
        lines = (EXAMPLES / f"{model}.py").read_text().splitlines()
        code = [line for line in lines if re.search(r"import hxla|\bhxla\.\w+\(", line)]
        code = [line for line in code if not line.startswith('"""')]
        assert len(code) <= 4, (model, code)


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
def test_an_example_runs(script, wanted, monkeypatch):
    # Where a process has all devices its programs are compiled once, but not with jax's cache.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    steps = [] if script == "06_inspect.py" else ["--steps", "3"]
    _runs([str(EXAMPLES / script), *steps], wanted)


@pytest.mark.slow
def test_the_demo_runs(tmp_path):
    script = str(EXAMPLES / "01_mixed_cluster.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-1.0-0.33", script, "--steps", "4"]
    command += ["--compared-steps", "2", "--folder", str(tmp_path)]
    _runs(command, ["of attainable", "identical after 2 steps", "nats per byte"])
    assert (tmp_path / "mixed_cluster.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_demo_notices_work_that_slows_both_processes_alike(tmp_path):
    script = str(EXAMPLES / "01_mixed_cluster.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-1.0-0.33", script, "--steps", "3"]
    command += ["--compared-steps", "2", "--folder", str(tmp_path)]
    burning = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(burning) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        _runs(command, ["this machine is busy", "of a core; its share is 1.", "identical"])
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_a_model_too_large_for_a_device_trains_over_two_without_annotations():
    script = str(EXAMPLES / "05_auto.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-2-small", script, "--steps", "3"]
    said = _runs(command, ["chosen by search", " replicas, loss "])
    # One copy that both cut, or two that share their state, by what was measured.
    ways = {
        "data x tensor = 1 x 2": "up/kernel: P(None, 'tensor')",
        "replicas of one device each: with whole state": "ZeRO stage 2",
    }
    [way] = [way for way in ways if way in said]
    assert ways[way] in said


@pytest.mark.slow
def test_the_example_of_a_pipeline_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes its report into runs/
    script = str(EXAMPLES / "07_pipeline.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-1.0-0.5", script, "--steps", "2"]
    _runs(command, ["pipeline of 2 stages", "report: runs/pipeline/report.html"])


@pytest.mark.slow
def test_the_example_of_unlike_stages_runs():
    script = str(EXAMPLES / "17_unlike_stages.py")
    _runs(["-m", "hxla", "run", "-n", "3", script, "--steps", "2"], ["stage 1 on", "tensor 2"])


@pytest.mark.slow
def test_the_example_of_unlike_replicas_runs():
    script = str(EXAMPLES / "18_unlike_replicas.py")
    _runs(
        ["-m", "hxla", "run", "-n", "3", script, "--steps", "2"], ["replica 1: ", "microbatches ("]
    )


@pytest.mark.slow
def test_the_example_of_a_scanned_decoder_runs_ranges_of_its_layers():
    script = str(EXAMPLES / "09_scanned_pipeline.py")
    command = ["-m", "hxla", "run", "--mesh", "cpu-1.0-0.5", script, "--steps", "2"]
    _runs(command, ["pipeline of 2 stages", "stage 0: tok .. blocks[", "stage 1: blocks["])


@pytest.mark.slow
def test_the_example_of_a_memory_limit_finds_the_deepest_model():
    script = str(EXAMPLES / "11_memory_limit.py")
    options = ["--mib", "130", "--most-layers", "8", "--steps", "2"]
    _runs([script, *options], ["a microbatch does not fit", "microbatch keeps", " layers, loss "])


@pytest.mark.slow
def test_a_users_own_loop_ends_with_the_bits_of_train(tmp_path):
    script = EXAMPLES / "08_own_loop.py"
    assert len(script.read_text().splitlines()) <= 40
    options = ["--steps", "3", "--checkpoint-dir", str(tmp_path)]
    printed = _runs([str(script), *options], ["sha256"])
    gpt = families.example("gpt")
    trained = hxla.train(
        hxla.Job(
            gpt.GPT(nnx.Rngs(0), width=64, layers=2),
            {"text": gpt.library()["text"][64:]},
            gpt.loss,
            optax.adamw(3e-3),
            batch_size=32,
        ),
        microbatch_size=4,
        steps=3,
        mesh=models.mesh(data=2),
    )
    assert printed.split()[-1] == trained.sha256
    resumed = _runs([str(script), "--steps", "4", *options[2:]], ["resumed from step 3"])
    assert resumed.split()[-1] != trained.sha256


def _runs(command, wanted):
    ran = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=own_environment(),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for text in wanted:
        assert text in ran.stderr + ran.stdout
    return ran.stderr + ran.stdout

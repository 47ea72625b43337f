"""Every code block of the documentation runs, or the page says above it why it does not.

A page's Python blocks run in their order and share their names. `<!-- run ... -->` is a block that
readers do not see, of Python or of commands after a `$`; `<!-- not run: why -->` stands above one
that is not run. A `diff` is a whole script before and after: each runs in a folder of its own, if
what it imports is installed.
"""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

import hxla
from support.doc_pages import PAGES, run
from support.inside.core import as_config
from support.inside.scheduler import read_live_jobs
from support.paths import PYTHONPATH

BLOCK = re.compile(
    r"<!-- run\n(?P<hidden>.*?)-->"
    r"|(?:<!-- not run: (?P<why>[^>]*) -->\n+)?^ *```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```",
    re.S | re.M,
)
[README] = re.findall(r"```python\n(import hxla.*?)```", PAGES["README.md"], re.S)
#: What pages speak of without making it: a small model, its data, and what trains it.
USUAL = """
import jax, jax.numpy as jnp, numpy as np, optax, hxla
from flax import nnx
rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(512, 8)).astype(np.float32), "y": np.arange(512) % 4}
held_out = {key: value[:64] for key, value in data.items()}
def make_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs))
model = make_model()
def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
optimizer = optax.adam(1e-2)
"""
#: What makes a table of TOML a whole file, and what reads it.
FILES = {
    "rule": ("name = 'x'\n", hxla.load_rules),
    "tensor": ("", hxla.load_names),
    "node": ("", hxla.load_cluster),
    "memory": ("", as_config),
    "precision": ("", as_config),
    "job": ("", read_live_jobs),
    "device": ("name = 'x'\n", hxla.load_cluster),
}


def blocks(page):
    """The language of each block, `hidden` or a reason among them, and its text."""
    for found in BLOCK.finditer(PAGES[page]):
        if found["hidden"] is not None:
            yield "hidden", found["hidden"]
        else:
            yield ("why" if found["why"] else found["language"]), found["why"] or found["code"]


def fences(text):
    return re.findall(r"^ *```(\w+)", text, re.M)


def test_every_block_is_run_or_says_why_it_is_not():
    # text: what a program says
    known = {"python", "console", "bash", "diff", "toml", "hidden", "why", "text"}
    for page, text in PAGES.items():
        assert not [(kind, code) for kind, code in blocks(page) if kind not in known], page
        shown = [kind for kind, _ in blocks(page) if kind != "hidden"]
        assert len(shown) == len(re.findall(r"^ *```", text, re.M)) / 2, page
        assert all(len(why) > 10 for kind, why in blocks(page) if kind == "why"), page


RUNNABLE = [page for page in PAGES if any(kind != "why" for kind, _ in blocks(page))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HXLA_CLUSTER_VISIBLE_DEVICES", "[0, 1]")
    for name in ("script.py", "train.py"):
        pathlib.Path(name).write_text(README)
    namespace = {}
    exec(USUAL, namespace)
    for i, (kind, code) in enumerate(blocks(page)):
        if kind == "python" and code.startswith(">>>"):
            run(code, namespace)
        elif kind in ("python", "hidden") and not code.startswith("$ "):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"<block {i} of {page}>", "exec"), namespace)
        elif kind in ("console", "bash", "hidden"):
            for command in commands(code):
                shell(command)
        elif kind == "toml":
            read(code)
        elif kind == "diff":
            for side, sign in (("before", "-"), ("after", "+")):
                with working_in(tmp_path / f"{side}{i}"), contextlib.redirect_stdout(io.StringIO()):
                    run_side(code, sign, f"<{side}, block {i} of {page}>")


@contextlib.contextmanager
def working_in(folder):
    folder.mkdir()
    with contextlib.chdir(folder):
        yield


def run_side(diff, sign, name):
    """Run one side of a script that changes, if what it imports is installed."""
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", "")]
    script = "\n".join(lines)
    imported = re.findall(r"^(?:import|from) (\w+)", script, re.M)
    code = compile(script, name, "exec")
    if all(map(importlib.util.find_spec, imported)):
        exec(code, {"__name__": "__main__"})


def commands(code):
    """The lines to type: those after a `$`, where there is one, and else all of them."""
    lines = [re.sub(r"\s+# .*", "", line) for line in code.splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return typed or [line for line in lines if line and not line.startswith("#")]


def shell(command):
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("HXLA_")}
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=clean | {"PATH": path, "PYTHONPATH": PYTHONPATH},
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


def read(text):
    kind = next(k for k in FILES if f"[{k}]" in text or f"[{k}." in text)
    before, reader = FILES[kind]
    if re.match(r"(# .*\n)?name = ", text):
        before = ""
    named = re.match(r"# (\S+\.toml)\n", text)
    name = named[1] if named else "read.toml"
    pathlib.Path(name).write_text(before + text)
    reader(name)

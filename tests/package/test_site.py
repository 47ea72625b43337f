"""The documentation as a site, and the workflow that runs what the documentation says."""

import importlib.util
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_make_exist_and_the_workflow_runs_them(page):
    said = set(re.findall(r"^make ([a-z-]+)", (ROOT / page).read_text(), re.M))
    assert said <= TARGETS
    measured = {"bench", "bench-gpu"}  # these want a quiet machine, or a GPU
    assert said - measured <= set(re.findall(r"run: make ([a-z-]+)", WORKFLOW))


def test_every_example_shows_what_it_printed():
    spec = importlib.util.spec_from_file_location("run_examples", ROOT / "docs/run_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {path.stem for path in (ROOT / "examples").glob("[0-9]*.py")}
    assert module.COMMANDS.keys() == names
    for name, (start, options) in module.COMMANDS.items():
        first, *rest = (ROOT / f"docs/outputs/{name}.txt").read_text().splitlines()
        assert first == f"$ {start} examples/{name}.py {options}".rstrip()
        assert len(rest) > 5


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path):
    own = ROOT / ".venv-docs/bin/python"
    python = str(own) if own.exists() else sys.executable
    has = subprocess.run([python, "-c", "import mkdocs, mkdocstrings"], capture_output=True)
    if has.returncode:
        pytest.skip("no mkdocs here: `make docs` makes an environment that has it")
    ran = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert "WARNING" not in ran.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "examples/01_mixed_cluster.html", "examples/gpt.html"} <= pages.keys()
    for page, text in pages.items():
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", text)
        assert not fetched, page
    entries = re.findall(r'<h2 id="hxla\.(\w+)"', pages["reference/training.html"])
    assert entries[:4] == ["train", "Job", "Session", "Result"]
    rows = re.findall(r"<td><a .*?</td>|<td>.*?</td>", pages["reference/public-names.html"])
    linked = re.findall(
        r'<td[^>]*><a [^>]*href="([\w-]+\.html)#hxla\.(\w+)"', pages["reference/public-names.html"]
    )
    assert {name for _, name in linked} == set(hxla.__all__)
    for page, name in linked:
        assert f'id="hxla.{name}"' in pages[f"reference/{page}"]
    assert hits(tmp_path / "index.html", "hxla.train")[0] == "reference/training.html"

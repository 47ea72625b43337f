"""The documentation as a site, and the workflow that runs what the documentation says."""

import importlib.util
import re
import subprocess
import sys
import urllib.parse

import pytest

import hxla
from support import browser
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    made = ROOT / ".venv-docs/bin/python"
    python = str(made) if made.exists() else sys.executable
    has = subprocess.run([python, "-c", "import material, mkdocstrings"], capture_output=True)
    if has.returncode:
        pytest.skip("no MkDocs here: `make docs` makes an environment that has it")
    ran = subprocess.run(
        [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.slow
def test_the_site_fetches_nothing_and_begins_its_reference_with_what_scripts_call(site):
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "examples/01_mixed_cluster.html", "examples/gpt.html"} <= pages.keys()
    for page, text in pages.items():
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", text)
        assert not fetched, page
    entries = re.findall(r'<h2 id="hxla\.(\w+)"', pages["reference/training.html"])
    assert entries[:4] == ["train", "Job", "Session", "Result"]


@pytest.mark.slow
def test_public_names_link_to_their_entries(site):
    names = (site / "reference/public-names.html").read_text()
    links = re.findall(r'<td[^>]*><a[^>]* href="([\w-]+\.html)#hxla\.(\w+)"', names)
    assert {name for _, name in links} == set(hxla.__all__)
    for page, name in links:
        assert f'id="hxla.{name}"' in (site / "reference" / page).read_text()


#: What people type, and the pages of which one is to be among the first three.
SEARCHED = {
    "gradient accumulation": ["how-to/gradient-accumulation"],
    "early stopping": ["how-to/early-stopping"],
    "wandb": ["how-to/experiment-tracking"],
    "resume": ["how-to/checkpoints"],
    "mixed precision": ["how-to/mixed-precision"],
    "slurm": ["how-to/slurm"],
    "two different gpus": ["how-to/unlike-gpus", "tutorials/unlike-devices"],
    "out of memory": ["how-to/memory", "how-to/troubleshooting"],
    "freeze layers": ["how-to/lora"],
    "load huggingface weights": ["how-to/pretrained-weights"],
    "batch size": ["how-to/gradient-accumulation", "concepts/plans"],
    "learning rate schedule": ["how-to/watching-a-run", "how-to/coming-from-optax"],
    "checkpoint best": ["how-to/early-stopping"],
    "tensorboard": ["how-to/experiment-tracking"],
    "notebook": ["how-to/notebooks"],
    "oom": ["how-to/memory"],
    "bit reproducible": ["concepts/reproducibility"],
    "pipeline parallel": ["how-to/pipelines"],
    "fsdp": ["how-to/sharding"],
    "zero": ["how-to/memory"],
    "lora": ["how-to/lora"],
    "deterministic": ["concepts/reproducibility"],
    "profile": ["how-to/watching-a-run", "how-to/inspect", "how-to/plans"],
    "install cuda 12": ["tutorials/install"],
    "evaluate each epoch": ["how-to/early-stopping", "how-to/data"],
}


def hits(site, words):
    """The first three pages that the search finds, in a browser that has opened the folder."""
    done = browser.run(
        site / "index.html",
        "--virtual-time-budget=30000",
        "--dump-dom",
        query=f"?q={urllib.parse.quote(words)}",
    )
    found = re.findall(r'<a href="([^"?]*)[^"]*" class="md-search-result__link"', done)
    return [href.rpartition(f"{site.name}/")[2] for href in dict.fromkeys(found)][:3]


@pytest.mark.slow
def test_search_from_a_folder_has_the_right_page_among_its_first_three(site):
    found = {words: hits(site, words) for words in SEARCHED}
    missed = {
        words: pages
        for words, pages in found.items()
        if not {f"{page}.html" for page in SEARCHED[words]} & set(pages)
    }
    assert len(missed) <= 2, missed

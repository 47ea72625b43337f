"""What the documentation shows: examples run, and names, settings and options exist."""

import ast
import contextlib
import doctest
import inspect
import io
import pathlib
import re

import pytest

import hxla
from hxla import __main__, testing

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "rules/README.md", *sorted((ROOT / "docs").glob("*.md")))
}


def documented_objects():
    """Public functions, classes and methods whose docstring has an example."""
    for prefix, names in (("hxla", vars(hxla)), ("testing", vars(testing))):
        for name, value in names.items():
            own = getattr(value, "__module__", "").startswith("hxla") and name[0] != "_"
            if not own or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            yield f"{prefix}.{name}", value
            if inspect.isclass(value):
                for key, method in vars(value).items():
                    if inspect.isfunction(method) and key[0] != "_":
                        yield f"{prefix}.{name}.{key}", method
    yield "testing", testing


EXAMPLES = {name: v.__doc__ for name, v in documented_objects() if ">>>" in (v.__doc__ or "")}
CHECKER = doctest.OutputChecker()


def run(text):
    """Run the examples of a text, and hold what they print against what it says they print.

    What a statement prints that the text says nothing of, such as training's progress, is free.
    """
    namespace = {}
    for example in doctest.DocTestParser().get_examples(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(example.source, "<example>", "single"), namespace)
            except hxla.HxlaError as error:
                print(f"{type(error).__name__}: {error}")
                assert example.want, error
        got, flags = printed.getvalue(), doctest.ELLIPSIS
        if example.want and not CHECKER.check_output(example.want, got, flags):
            pytest.fail(CHECKER.output_difference(example, got, flags))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_a_docstring_runs_and_prints_what_it_says(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HXLA_CLUSTER_VISIBLE_DEVICES", "[0, 1]")
    run(EXAMPLES[name])


def test_every_public_function_has_an_example():
    functions = [n for n, v in vars(hxla).items() if inspect.isfunction(v)]
    assert not [n for n in functions if f"hxla.{n}" not in EXAMPLES]
    assert {"hxla.Job", "hxla.Plan", "hxla.Session"} <= set(EXAMPLES)

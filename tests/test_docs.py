"""What the documentation shows: examples run, and names, settings and options exist."""

import ast
import contextlib
import dataclasses
import doctest
import inspect
import io
import pathlib
import re

import pydantic
import pytest

import hxla
from hxla import __main__, testing

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "rules/README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}


def public_objects():
    """Public functions and classes, the public methods of these, and `hxla.testing`."""
    for prefix, module in (("hxla", hxla), ("testing", testing)):
        for name, value in vars(module).items():
            home = getattr(value, "__module__", "")
            own = name[0] != "_" and home.startswith("hxla" if module is hxla else "hxla.testing")
            if not own or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            yield f"{prefix}.{name}", value
            for key in vars(value) if inspect.isclass(value) else ():
                if key[0] != "_" and inspect.isroutine(getattr(value, key)):
                    yield f"{prefix}.{name}.{key}", getattr(value, key)
    yield "testing", testing


PUBLIC = dict(public_objects())
EXAMPLES = {name: v.__doc__ for name, v in PUBLIC.items() if ">>>" in (v.__doc__ or "")}
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
                if not example.want:
                    raise
                print(f"{type(error).__name__}: {error}")
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


def described(text):
    """Names that the sections of a docstring describe."""
    return set(re.findall(r"^ +(\w+): ", text, re.M))


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isroutine(v)])
def test_a_docstring_describes_every_parameter(name):
    parameters = inspect.signature(PUBLIC[name]).parameters.keys() - {"self"}
    assert parameters <= described(PUBLIC[name].__doc__)


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isclass(v)])
def test_a_docstring_describes_every_field(name):
    own = PUBLIC[name]
    if own is hxla.Config:
        fields = set()  # its sections describe themselves
    elif dataclasses.is_dataclass(own):
        fields = {f.name for f in dataclasses.fields(own)}
    elif issubclass(own, pydantic.BaseModel):
        fields = {n for n, field in own.model_fields.items() if not field.description}
    else:
        fields = set()
    assert fields <= described(own.__doc__)

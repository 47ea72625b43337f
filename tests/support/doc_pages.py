"""The pages of the documentation, and how their examples are run."""

import contextlib
import doctest
import io

import pytest

import hxla
from support.paths import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "rules/README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}


CHECKER = doctest.OutputChecker()


def run(text, namespace=None):
    """Run the examples of a text, and hold what they print against what it says they print.

    What a statement prints that the text says nothing of, such as training's progress, is free.
    """
    namespace = {} if namespace is None else namespace
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

"""What the documentation shows: examples run, and names, settings and options exist."""

import ast
import dataclasses
import doctest
import inspect
import re

import pydantic
import pytest

import hxla
from hxla import testing
from support.doc_pages import PAGES, ROOT, run


def public_objects():
    """Public functions and classes, the public methods of these, and `hxla.testing`."""
    for prefix, module in (("hxla", hxla), ("testing", testing)):
        for name in dir(module):
            value = getattr(module, name)
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_a_docstring_runs_and_prints_what_it_says(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HXLA_CLUSTER_VISIBLE_DEVICES", "[0, 1]")
    run(EXAMPLES[name])


def test_every_public_function_has_an_example():
    functions = [n for n in hxla.__all__ if inspect.isfunction(getattr(hxla, n))]
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


BLOCKS = [
    pytest.param(code, id=f"{page}-{i}")
    for page, text in PAGES.items()
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
]
#: What a line of the documentation calls a value, and the class that it is of.
VALUES = {
    "job": hxla.Job,
    "plan": hxla.Plan,
    "other": hxla.Plan,
    "session": hxla.Session,
    "record": hxla.StepRecord,
    "result": hxla.Result,
    "inspection": hxla.Inspection,
}
MODULES = {"hxla": hxla, "testing": testing}


def has(owner, name):
    return hasattr(owner, name) or name in described(owner.__doc__)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_the_documentation_names_only_what_exists(code):
    if code.startswith(">>>"):
        examples = doctest.DocTestParser().get_examples(code)
        code = "".join(example.source for example in examples)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        owner = {**MODULES, **VALUES}.get(node.value.id)
        assert owner is None or has(owner, node.attr), ast.unparse(node)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            holds_only_known_arguments(node)


def holds_only_known_arguments(call):
    owner, _, name = ast.unparse(call.func).rpartition(".")
    function = getattr({**MODULES, **VALUES}.get(owner), name, None)
    if function is not None and callable(function):
        known = inspect.signature(function).parameters
        given = {keyword.arg for keyword in call.keywords} - {None}
        assert given <= known.keys() or "fields" in known, ast.unparse(call)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_exists(page):
    """Names in backticks: `hxla.train(...)`, `Plan.diff`, `session.state`, `auto.num_stages`."""
    prose = re.sub(r"```.*?```", "", PAGES[page], flags=re.S)
    sections = hxla.Config.model_fields
    classes = {n: v for n in hxla.__all__ if inspect.isclass(v := getattr(hxla, n))}
    for text in re.findall(r"`([^`\n]+)`", prose):
        for owner, name in re.findall(r"(?<![\w./])(\w+)\.([a-z_A-Z]\w*)", text):
            if owner == "hxla" and not re.match(r"hxla\.(toml|\w+\[)", text):
                assert hasattr(hxla, name), text
            elif owner in classes or owner in VALUES:
                assert has(classes.get(owner) or VALUES[owner], name), text
            elif owner in sections and name not in ("json", "toml"):
                assert name in sections[owner].annotation.model_fields, text


def options():
    """The long options of each command of `hxla`."""
    found = {}
    source = ast.parse((ROOT / "hxla/__main__.py").read_text())
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if node.func.attr == "add_argument" and texts[0].startswith("--"):
                command = ast.unparse(node.func.value)
                command = "run" if command in ("where", "kept") else command
                found.setdefault(command, set()).add(texts[0])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_only_options_that_exist(page):
    known = options()
    commands = r"hxla (run|plan|profile|devices|inspect|schedule)\b([^`\n|]*)"
    for command, rest in re.findall(commands, PAGES[page]):
        words = rest.split(".py")[0].split()
        used = {word.split("=")[0].rstrip(".,;:)") for word in words if word.startswith("--")}
        assert used <= known[command], f"hxla {command}{rest}"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", PAGES[page]):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in slugs, f"{target}#{anchor}"

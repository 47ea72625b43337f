"""What the documentation shows: examples run, and names, settings and options exist."""

import ast
import dataclasses
import doctest
import importlib.util
import inspect
import json
import re

import pydantic
import pytest

import hxla
from hxla import testing
from support.doc_pages import PAGES, ROOT, run
from support.inside.cli import cli
from support.sentences import mean_words, sentences


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


def to_describe(value):
    """Parameters of a function, fields of a class."""
    if inspect.isroutine(value):
        return inspect.signature(value).parameters.keys() - {"self"}
    if dataclasses.is_dataclass(value):
        return {f.name for f in dataclasses.fields(value)}
    if value is not hxla.Config and issubclass(value, pydantic.BaseModel):
        return {n for n, field in value.model_fields.items() if not field.description}
    return set()  # a configuration's sections describe themselves


def test_docstrings_describe_every_parameter_and_field():
    values = {n: v for n, v in PUBLIC.items() if inspect.isroutine(v) or inspect.isclass(v)}
    missing = {n: to_describe(v) - described(v.__doc__) for n, v in values.items()}
    assert not {name: names for name, names in missing.items() if names}


BLOCKS = [
    code for text in PAGES.values() for code in re.findall(r"```python\n(.*?)```", text, re.S)
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
CLASSES = {n: v for n in hxla.__all__ if inspect.isclass(v := getattr(hxla, n))} | VALUES


def has(owner, name):
    return hasattr(owner, name) or name in described(owner.__doc__)


def test_python_in_the_documentation_names_only_what_exists():
    unknown = []
    for code in BLOCKS:
        if code.startswith(">>>"):
            examples = doctest.DocTestParser().get_examples(code)
            code = "".join(example.source for example in examples)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {**MODULES, **VALUES}.get(node.value.id)
                if owner is not None and not has(owner, node.attr):
                    unknown.append(ast.unparse(node))
            elif isinstance(node, ast.Call) and not has_known_arguments(node):
                unknown.append(ast.unparse(node))
    assert not unknown


def has_known_arguments(call):
    owner, _, name = ast.unparse(call.func).rpartition(".")
    function = getattr({**MODULES, **VALUES}.get(owner), name, None)
    if function is None or not callable(function):
        return True
    known = inspect.signature(function).parameters
    given = {keyword.arg for keyword in call.keywords} - {None}
    return given <= known.keys() or "fields" in known


def test_pages_name_only_what_exists():
    """Names in backticks: `hxla.train(...)`, `Plan.diff`, `session.state`, `auto.num_stages`."""
    unknown = []
    for page, text in PAGES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        for words in re.findall(r"`([^`\n]+)`", prose):
            for owner, name in re.findall(r"(?<![\w./])(\w+)\.([a-z_A-Z]\w*)", words):
                if not exists(owner, name, words):
                    unknown.append((page, words))
    assert not unknown


def exists(owner, name, words):
    sections = hxla.Config.model_fields
    if owner == "hxla" and not re.match(r"hxla\.(toml|\w+\[)", words):
        return hasattr(hxla, name)
    if owner in CLASSES:
        return has(CLASSES[owner], name)
    if owner in sections and name not in ("json", "toml"):
        return name in sections[owner].annotation.model_fields
    return True


def settings(section, path=""):
    """The keys of a configuration and their defaults, as a table of the documentation has them."""
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, pydantic.BaseModel):
            if path:
                yield f"{path}{name}", "{}"
            yield from settings(type(default), f"{path}{name}.")
        else:
            number = isinstance(default, float) and default == int(default)
            yield f"{path}{name}", json.dumps(int(default) if number else default)


def test_the_configuration_page_has_every_setting_with_its_default():
    text = PAGES["docs/reference/configuration.md"]
    shown = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", text, re.M)
    assert sorted(shown) == sorted(settings(hxla.Config))


def test_the_page_of_the_command_line_is_that_of_the_commands():
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "docs/command_line.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert PAGES["docs/reference/command-line.md"] == made.page(), "run docs/command_line.py"


def options(command=cli):
    """The long options of each command of `hxla`, a group's being those of its commands."""
    found = {}
    for name, inner in command.commands.items():
        below = options(inner).values() if hasattr(inner, "commands") else ()
        found[name] = {o for param in inner.params for o in param.opts if o[:2] == "--"}
        found[name] = found[name].union(*below)
    return found


def test_pages_use_only_options_that_exist():
    known = options()
    commands = r"hxla (run|plan|profile|devices|inspect|schedule)\b([^`\n|]*)"
    unknown = []
    for page, text in PAGES.items():
        is_made = page == "docs/reference/command-line.md"  # of sentences that name many options
        for command, rest in () if is_made else re.findall(commands, text):
            words = rest.split(".py")[0].split()
            used = {word.split("=")[0].rstrip(".,;:)") for word in words if word.startswith("--")}
            if not used <= known[command]:
                unknown.append((page, f"hxla {command}{rest}"))
    assert not unknown


def test_links_between_pages_lead_somewhere():
    lost = []
    for page, text in PAGES.items():
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            has_heads = anchor and path.exists()
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if has_heads else []
            slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
            if not path.exists() or (anchor and anchor not in slugs):
                lost.append((page, f"{target}#{anchor}"))
    assert not lost


#: What a newcomer reads.
READ_FIRST = [
    page
    for page in PAGES
    if page in ("README.md", "docs/index.md")
    or page.startswith(("docs/tutorials/", "docs/how-to/"))
]
WORDS = 25


def test_sentences_of_a_newcomers_pages_have_at_most_25_words_in_the_mean():
    long = {page: mean for page in READ_FIRST if (mean := mean_words(PAGES[page])) > WORDS}
    assert not long


def test_words_are_counted_in_prose_alone():
    page = """# A heading is not counted

Two words. It counts `hxla run --mesh x` once, with [a link](where/it/leads.md) as text:

- an item
- another, on
  two lines

| a | table |
|---|---|

<!-- not run: why -->

```python
code = "is not counted."
```
"""
    assert [len(words) for words in sentences(page)] == [2, 9, 2, 4]

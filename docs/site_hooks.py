"""What MkDocs cannot do alone: it calls these functions while it builds the site.

Rules, the contributing guide and the changelog stay where readers of the repository look for them.
Each section of `reference/public-names.md` is a page of the reference. Each example is a page with
its source, what it printed and its picture, and so is each module that examples import.
"""

import ast
import functools
import itertools
import pathlib
import posixpath
import re
import subprocess
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
VERSION = ROOT / "hxla/_src/core/version.py"
#: Files of the repository that are pages of the site.
PAGES = {
    "rules/README.md": "rules.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
#: Pictures beside examples.
PICTURES = {"01_mixed_cluster": "mixed_cluster.png"}
#: The first pages of the reference, and the first names of its first page.
FIRST_SECTIONS = ("Training", "Sessions and results")
FIRST_NAMES = ("train", "Job", "Session", "Result")
#: Search shows examples, the reference and changes after the pages that explain.
RANKED_LOW = "---\nsearch:\n  boost: 0.3\n---\n\n"
#: Inline code up to this length, with entities such as `&lt;` counted once, stays on one line.
UNBROKEN = r"<code>(?=(?:[^<&]|&\w+;){1,32}</code>)"
#: A public name in code, and before it what has no links inside: blocks, headings, comments, links.
NAMED = r"^ *```.*?^ *```|^#[^\n]*|<!--.*?-->|\[[^\]]*\]\([^)]*\)|`hxla\.(\w+)[^`\n]*`"


def on_config(config: Any) -> Any:
    """Fill the entries of the navigation that have no pages, and say which version this is."""
    _fill(config.nav, "Examples", [{_title(path): _page(path)} for path in examples()])
    _fill(config.nav, "API", [{title: _slug(title)} for title in sections()])
    [version] = re.findall(r'^__version__ = "(.*)"', VERSION.read_text(), re.M)
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=, commit %h of %cs"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    config.site_name = f"hxla {version}"
    config.copyright = f"hxla {version}{commit}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files."""
    made = {
        page: _links((ROOT / path).read_text(), page, posixpath.dirname(path) or ".")
        for path, page in PAGES.items()
    }
    made["changelog.md"] = RANKED_LOW + made["changelog.md"]
    made |= {_slug(title): _reference(title, names) for title, names in sections().items()}
    made |= {_page(path): _example(path) for path in examples()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the repository's files to their pages, and public names to their entries."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    markdown = _links(markdown, page.file.src_uri)
    # Without a prompt the lexer of consoles takes a command for output.
    markdown = re.sub(
        r"^( *```)console\n((?:(?! *(?:\$ |```)).*\n)*) *```",
        r"\1bash\n\2```",
        markdown,
        flags=re.M,
    )
    public = {name for names in sections().values() for name in names}

    def linked(found: re.Match) -> str:
        return f"[{found[0]}][hxla.{found[1]}]" if found[1] in public else found[0]

    return re.sub(NAMED, linked, markdown, flags=re.M | re.S)


def on_page_content(content: str, **_: Any) -> str:
    """Let tables become lists on a phone, and keep short code on one line."""
    content = re.sub(r"<table>.*?</table>", _labelled, content, flags=re.S)
    return re.sub(UNBROKEN, '<code class="unbroken">', content)


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog of the search for those who hear the page."""
    return output.replace('class="md-search"', 'class="md-search" aria-label="Search"')


@functools.cache
def examples() -> list[pathlib.Path]:
    """The numbered scripts, and the modules beside them that they import."""
    scripts = sorted((ROOT / "examples").glob("[0-9]*.py"))
    return scripts + sorted({module for path in scripts for module in _imported(path)})


@functools.cache
def sections() -> dict[str, list[str]]:
    """The names in each page of the reference, in their order."""
    text = (ROOT / "docs/reference/public-names.md").read_text()
    found = {
        part.partition("\n")[0]: re.findall(r"^\| `hxla\.(\w+)`", part, re.M)
        for part in text.split("\n## ")[1:]
    }
    first = {title: [n for n in found[title] if n not in FIRST_NAMES] for title in FIRST_SECTIONS}
    first[FIRST_SECTIONS[0]] = [*FIRST_NAMES, *first[FIRST_SECTIONS[0]]]
    return first | {title: names for title, names in found.items() if title not in first}


def _fill(nav: list, title: str, pages: list) -> None:
    for entry in nav:
        for key, inside in entry.items():
            if key == title:
                entry[key] = pages
            elif isinstance(inside, list):
                _fill(inside, title, pages)


def _links(text: str, page: str, folder: str = "docs") -> str:
    """Text of a page, or of a file in a folder of the repository that becomes one."""
    here = (ROOT / folder / page).parent if folder == "docs" else ROOT / folder

    def replaced(found: re.Match) -> str:
        target = (here / found[2]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return found[0]
        inside = target.relative_to(ROOT).as_posix()
        if inside in PAGES:
            goal = PAGES[inside]
        elif target in examples():
            goal = _page(target)
        elif inside.startswith("docs/"):
            goal = inside.removeprefix("docs/")
        else:
            return f"{found[1]} (`{inside}`)"  # a file of the repository that is no page
        return f"[{found[1]}]({posixpath.relpath(goal, posixpath.dirname(page))}{found[3] or ''})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", replaced, text)


def _labelled(found: re.Match) -> str:
    """A table whose cells know their columns; one without titles loses their empty row."""
    table = found[0]
    titles = [re.sub("<.*?>", "", th) for th in re.findall(r"<th.*?>(.*?)</th>", table, re.S)]
    if not any(titles):
        return re.sub(r"<thead>.*?</thead>", "", table, flags=re.S)
    cells = itertools.cycle(titles if len(titles) > 2 else [""])
    return re.sub("<td", lambda _: f'<td data-label="{next(cells)}"', table)


def _slug(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"


def _reference(title: str, names: list[str]) -> str:
    entries = [f"::: hxla.{name}" for name in names] or [f"::: hxla.{title.lower()}"]
    return RANKED_LOW + "\n\n".join([f"# {title}", *entries])


def _imported(path: pathlib.Path) -> list[pathlib.Path]:
    """The modules beside an example that it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return [module for name in sorted(names) if (module := path.with_name(f"{name}.py")).exists()]


def _page(path: pathlib.Path) -> str:
    return f"examples/{path.stem}.md"


def _title(path: pathlib.Path) -> str:
    number, _, name = path.stem.partition("_")
    return name.replace("_", " ").capitalize() if number.isdigit() else f"{path.stem}.py"


def _example(path: pathlib.Path) -> str:
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    parts = [f"# {_title(path)}", summary]
    if modules := _imported(path):
        links = " and ".join(f"[{module.name}]({module.stem}.md)" for module in modules)
        parts.append(f"Its model is in {links}.")
    if path.stem in PICTURES:
        parts.append(f"![What the example draws](../pictures/{PICTURES[path.stem]})")
    parts.append(
        f'```{{.python title="examples/{path.name}" data-search-exclude}}\n{path.read_text()}```'
    )
    output = ROOT / f"docs/outputs/{path.stem}.txt"
    if output.exists():
        parts += [
            "## What it prints",
            "Times and counts are those of one run on two cores; losses and sums do not depend on "
            "them.",
            f"```{{.text data-search-exclude}}\n{output.read_text()}```",
        ]
    return RANKED_LOW + "\n\n".join(parts)

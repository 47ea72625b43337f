"""Pages of the site that are made of files outside of this folder: MkDocs calls these functions.

Rules, the contributing guide and the changelog stay where readers of the repository look for them.
The reference is one page with every public name in the order of `reference/public-names.md`, and
each example is a page of its source, what it printed and its pictures.
"""

import ast
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = pathlib.Path(__file__).parent.parent
#: Files of the repository that are pages of the site.
PAGES = {
    "rules/README.md": "rules.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
#: Pictures beside examples.
PICTURES = {"01_mixed_cluster": "mixed_cluster.png"}


def examples() -> list[pathlib.Path]:
    """The numbered scripts."""
    return sorted((ROOT / "examples").glob("[0-9]*.py"))


def on_config(config: Any) -> Any:
    """Add a page for each example to the navigation."""
    entry = next(item for item in config.nav if "Examples" in item)
    entry["Examples"] = [{_title(path): f"examples/{path.stem}.md"} for path in examples()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files."""
    made = {
        page: _links((ROOT / path).read_text(), page, posixpath.dirname(path) or ".")
        for path, page in PAGES.items()
    }
    made["reference.md"] = _reference()
    made |= {f"examples/{path.stem}.md": _example(path) for path in examples()}
    made["pygments.css"] = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to the repository's files into links to their pages."""
    return _links(markdown, page.file.src_uri)


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
            goal = f"examples/{target.stem}.md"
        elif inside.startswith("docs/"):
            goal = inside.removeprefix("docs/")
        else:
            return f"{found[1]} (`{inside}`)"  # a file of the repository that is no page
        return f"[{found[1]}]({posixpath.relpath(goal, posixpath.dirname(page))}{found[3] or ''})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", replaced, text)


def _reference() -> str:
    names = re.findall(
        r"^\| `hxla\.(\w+)`", (ROOT / "docs/reference/public-names.md").read_text(), re.M
    )
    return "\n\n".join(["# Reference", *(f"::: hxla.{name}" for name in names)]) + (
        "\n\n::: hxla.testing\n"
    )


def _docstring(path: pathlib.Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or path.stem


def _title(path: pathlib.Path) -> str:
    return path.stem.split("_", 1)[1].replace("_", " ").capitalize()


def _example(path: pathlib.Path) -> str:
    parts = [f"# {_title(path)}"]
    output = ROOT / f"docs/outputs/{path.stem}.txt"
    if path.stem in PICTURES:
        parts.append(f"![What the example draws](../pictures/{PICTURES[path.stem]})")
    parts += [f'```python title="examples/{path.name}"\n{path.read_text()}```']
    parts += [
        "## What it prints",
        "Times and counts are those of one run on two cores, and but for the first example with "
        "other work beside it; losses and sums do not depend on them.",
        f"```text\n{output.read_text()}```",
    ]
    return "\n\n".join(parts)

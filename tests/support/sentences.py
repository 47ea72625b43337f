"""How long the sentences of a page are."""

import re

#: What is no prose: blocks of code, comments, headings, tables, pictures.
NO_PROSE = r"^ *```.*?^ *```|<!--.*?-->|^#[^\n]*|^ *\|[^\n]*|!\[[^\]]*\]\([^)]*\)"


def sentences(page: str) -> list[list[str]]:
    """The words of each sentence of a page in Markdown; `code` is one word, an item a sentence."""
    prose = re.sub(NO_PROSE, "\n\n", page, flags=re.S | re.M)
    prose = re.sub(r"`[^`]*`", "code", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    parts = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s|[.!?](?=[\s\"')*]|$)", prose, flags=re.M)
    words = [re.findall(r"\w[\w'.,-]*", part) for part in parts]
    return [found for found in words if found]


def mean_words(page: str) -> float:
    """Words of a page's sentences in the mean."""
    found = sentences(page)
    return sum(map(len, found)) / max(1, len(found))

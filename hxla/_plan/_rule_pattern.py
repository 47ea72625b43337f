"""Patterns of rules that take time in proportion to a path, not exponential time."""

import re
import warnings

_MOST_LETTERS = 500
_MOST_DEPTH = 16
_MOST_REPEATS = 4  # as many nested loops over a path
_MOST_OPTIONAL = 8  # each doubles the ways to match
_PIECE = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<escape>\\.)|(?P<flags>\(\?[a-zA-Z-]+[:)])
    |(?P<open>\((?:\?(?:P<\w+>|<?[!=]|:|>))?)
    |(?P<close>\))|(?P<or>\|)|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_pattern(pattern: str) -> None:
    """Refuse what is no pattern, and what could take very long on some path.

    A repeat of what itself repeats, or has alternatives, may match one path in exponentially many
    ways, all of which are tried before it is given up.

    Args:
        pattern: A regular expression.

    Raises:
        ValueError: What is wrong with it and what to write instead.
    """
    if len(pattern) > _MOST_LETTERS:
        raise ValueError(f"a pattern of {len(pattern)} letters: write {_MOST_LETTERS} at most")
    _check_repeats(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of sets that a later Python would read otherwise
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"{pattern[:80]!r} is no pattern: {error}") from None


def _check_repeats(pattern: str) -> None:
    groups = [False]  # for each that is open whether something in it has several ways to match
    last = False  # likewise of what stands before
    repeats = optional = 0
    for piece in _PIECE.finditer(pattern):
        kind, text = piece.lastgroup, piece[0]
        if kind == "open":
            groups.append(False)
            if len(groups) > _MOST_DEPTH:
                raise ValueError(f"groups are nested more than {_MOST_DEPTH} deep")
        elif kind == "flags":
            if "x" in text:
                raise ValueError("leave the flag x away: blanks would count for nothing")
            groups += [False] if text.endswith(":") else []
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else False
            groups[-1] |= last
        elif kind == "or":
            groups[-1] = True
        elif kind == "repeat":
            most = _most(text)
            if most == 1:
                optional += 1
            else:
                if last:
                    raise ValueError(
                        f"{pattern[:80]!r} repeats what itself repeats or has alternatives, which "
                        "may take for ever: repeat one letter or class, as in '.*' or '[a-z0-9]+'"
                    )
                repeats += 1
            groups[-1], last = True, False
        else:
            last = False
    if repeats > _MOST_REPEATS or optional > _MOST_OPTIONAL:
        raise ValueError(
            f"{pattern[:80]!r} has {repeats} repeats and {optional} optional parts, which may take "
            f"very long: use {_MOST_REPEATS} and {_MOST_OPTIONAL} at most, or several rules"
        )


def _most(repeat: str) -> int:
    """How often a repeat may match; 2 stands for more than once."""
    if repeat[0] in "*+":
        return 2
    if repeat[0] == "?":
        return 1
    numbers = repeat.strip("{}?+").split(",")
    return 1 if numbers[-1] in ("0", "1") else 2

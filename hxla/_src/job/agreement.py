"""What the processes of a job must have alike: where they differ, they would train apart.

Before the first step they compare what they were asked, the plan, the programs and a batch: hashes
first, and what differs only if they do. Later, now and then, their copies of the state.
"""

import difflib
import importlib.metadata
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import LaunchError
from ..core.types import PyTree
from ..plan.plan import Plan

_PACKAGES = ("hxla", "jax", "jaxlib", "flax", "optax")
_MOST_LINES = 30  # of an error
_MOST_OF_A_TEXT = 6  # lines of a program
_NUMBERED = re.compile(r"%\w+( = )?")
_MOST_COMPARED = 4000  # lines between the first and the last that differ
_WIDTH = 100  # of a value

Facts = Mapping[str, str]  # what is compared, by its name
Differing = Callable[[str, str], tuple[str, ...]]  # name and text to all texts, if they differ


def agree(what: str, facts: Facts, differing: Differing) -> None:
    """Refuse to go on, on every process, where processes differ.

    Args:
        what: Name of the comparison; every process makes each equally often.
        facts: Of this process; of a value of many lines those that differ are shown.
        differing: Name and text to the texts of all processes, or to nothing if they are equal.

    Raises:
        LaunchError: With every difference: what it is, and which ranks have which value.
    """
    told = [_facts(text) for text in differing(what, json.dumps(facts))]
    lines = []
    for key in dict.fromkeys(itertools.chain(*told)):
        values = [own.get(key, "none") for own in told]
        if len(set(values)) > 1:
            lines += list(_difference(key, values))
    if told:
        more = len(lines) - _MOST_LINES
        shown = lines[:_MOST_LINES] + ([f"and {more} more"] if more > 0 else [])
        raise LaunchError(
            "the processes of this job do not agree, and would train apart:\n  "
            + "\n  ".join(shown)
            + "\nstart the same script with the same arguments, data, files and library versions "
            "on every rank"
        )


def _facts(text: str) -> dict[str, str]:
    try:
        return dict(json.loads(text))
    except ValueError:  # too long a message was cut off
        return {"what was compared": text}


def _difference(key: str, values: Sequence[str]) -> Iterator[str]:
    if not any("\n" in value for value in values):
        yield f"{key}: {_by_rank(values)}"
        return
    # Values of programs are numbered: with one more or less every number changes.
    texts = [[_NUMBERED.sub("", line).strip() for line in v.splitlines()] for v in values]
    kinds: dict[str, int] = {}
    for rank, value in enumerate(values):
        kinds.setdefault(value, rank)
    first, *others = kinds.values()
    alike = [r for r, value in enumerate(values) if value == values[first]]
    for other in others:
        unlike = [r for r, value in enumerate(values) if value == values[other]]
        yield f"{key}: {ranks_text(alike)} and {ranks_text(unlike)} have different ones"
        pairs = dict.fromkeys(_unlike(texts[first], texts[other]))
        for a, b in itertools.islice(pairs, _MOST_OF_A_TEXT):
            yield f"  {_brief(a)} on {ranks_text(alike)}; {_brief(b)} on {ranks_text(unlike)}"


def _unlike(one: Sequence[str], two: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lines of two texts that differ, side by side; `nothing` where one has no such line."""
    if len(one) == len(two):
        yield from (pair for pair in zip(one, two, strict=True) if pair[0] != pair[1])
        return
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    start = sum(1 for _ in pairs)
    one, two = one[start : start + _MOST_COMPARED], two[start : start + _MOST_COMPARED]
    for tag, i, j, k, m in difflib.SequenceMatcher(None, one, two).get_opcodes():
        if tag != "equal":
            yield from itertools.zip_longest(one[i:j], two[k:m], fillvalue="nothing")


def _by_rank(values: Sequence[str]) -> str:
    """`16 on ranks 0 to 2; 32 on rank 3`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{_brief(value)} on {ranks_text(own)}" for value, own in ranks.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """`ranks 0 to 2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    shown = ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _brief(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 4] + " ..."


# -- what is compared ------------------------------------------------------------------------------


def facts_of_plan(plan: Plan) -> dict[str, str]:
    """Every decision of a plan by its key."""
    return flat("plan", plan.decisions.model_dump(mode="json"))


def facts_of_versions() -> dict[str, str]:
    """Of the libraries that compute."""
    found = {}
    for name in _PACKAGES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a checkout on the path
    return found


def facts_of_data(batch: PyTree, name: str) -> dict[str, str]:
    """Shape, dtype and hash of every array of a batch.

    Args:
        batch: A pytree of host arrays.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        x = np.asarray(leaf)
        bits = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        where = name + jax.tree_util.keystr(path)
        found[where] = f"{x.dtype}{list(x.shape)} with CRC-32 {bits:08x}"
    return found


def flat(name: str, tree: Any) -> dict[str, str]:
    """Values in dictionaries and lists by their paths, joined by dots."""
    if isinstance(tree, Mapping) and tree:
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(
        isinstance(x, Mapping | list | tuple) for x in tree
    ):
        items = [(str(key), value) for key, value in enumerate(tree)]
    else:
        return {name: str(tree)}
    return {k: v for key, value in items for k, v in flat(f"{name}.{key}", value).items()}

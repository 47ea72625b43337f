"""Facts on which the processes of a job must agree, because otherwise they would train apart.

Before the first step they compare arguments, plan, programs and a batch: first by hashes, and only
if these differ by their text. Later they sometimes compare the state of replicas.
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
_MOST_PROGRAM_LINES = 6
_NUMBERED = re.compile(r"%\w+( = )?")
_MOST_COMPARED = 4000  # lines after the first that differs
_WIDTH = 100  # of a value

Facts = Mapping[str, str]  # compared values by name
Differing = Callable[[str, str], tuple[str, ...]]  # name and text to all texts, if they differ


def agree(what: str, facts: Facts, differing: Differing) -> None:
    """Stop every process if the facts of some differ.

    Args:
        what: Name of the comparison; every process must make each equally often.
        facts: Of this process; of a value of many lines the differing ones are shown.
        differing: Name and text to the texts of all processes; to none if all are equal.

    Raises:
        LaunchError: With every difference, and the value of each rank.
    """
    per_rank = [_facts(text) for text in differing(what, json.dumps(facts))]
    lines = []
    for key in dict.fromkeys(itertools.chain(*per_rank)):
        values = [facts_of_rank.get(key, "none") for facts_of_rank in per_rank]
        if len(set(values)) > 1:
            lines += list(_difference(key, values))
    if per_rank:
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
    except ValueError:  # a message that was too long is truncated
        return {"what was compared": text}


def _difference(key: str, values: Sequence[str]) -> Iterator[str]:
    if not any("\n" in value for value in values):
        yield f"{key}: {_by_rank(values)}"
        return
    # The values of a program are numbered; one additional value changes all numbers.
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
        for a, b in itertools.islice(pairs, _MOST_PROGRAM_LINES):
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
    return "; ".join(
        f"{_brief(value)} on {ranks_text(of_value)}" for value, of_value in ranks.items()
    )


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
    """The decisions of a plan, by key."""
    return flat("plan", plan.decisions.model_dump(mode="json"))


def facts_of_versions() -> dict[str, str]:
    """The versions of the libraries that compute."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a checkout on the path
    return versions


def facts_of_data(batch: PyTree, name: str) -> dict[str, str]:
    """Shape, dtype and hash of every array of a batch on the host."""
    facts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        x = np.asarray(leaf)
        bits = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        where = name + jax.tree_util.keystr(path)
        facts[where] = f"{x.dtype}{list(x.shape)} with CRC-32 {bits:08x}"
    return facts


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

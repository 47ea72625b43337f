"""Axis names that a function's collectives use and nothing around it binds.

A model written for `pmap` or `shard_map` averages over an axis such as `batch`. Here it runs alone
on a microbatch, so the axis has one member.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

Found = TypeVar("Found")

_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")


def unbound_axis(error: BaseException) -> str | None:
    """The axis name that an error is about, if it is about one."""
    found = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    return found[1] if found else None


def naming_axes(trace: Callable[[], Found], names: list[str]) -> Found:
    """What `trace` returns, once it complains of no axis any more.

    Args:
        trace: Runs a function within `with_axes(function, names)`; it is called again for each name
            that nothing bound, and changes nothing else.
        names: Those that are bound; others are added as they are found.
    """
    while True:
        try:
            return trace()
        except NameError as error:
            name = unbound_axis(error)
            if name is None or name in names:
                raise
            names.append(name)


def with_axes(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The same function, to trees of arrays, with axes of one member around it."""
    for name in names:
        function = _with_axis(function, name)
    return function


def _with_axis(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    # Nothing is mapped over the axis, but the place in it is, and so is what is made of it.
    alone = jax.vmap(function, in_axes=None, out_axes=0, axis_name=name, axis_size=1)
    return lambda *arguments: jax.tree.map(lambda x: x[0], alone(*arguments))

"""Calls in a user's model that say on which devices arrays are, which a plan says here."""

import re
from collections.abc import Iterator
from typing import Any

from .jaxpr import inner_programs

_CALLS = {
    "shard_map": "jax.shard_map",
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "reshard": "jax.sharding.reshard",
}
#: What jax says of such calls when no mesh, or a mesh of another type of axis, is in force.
_ERRORS = re.compile(
    "requires a non-empty mesh in context|context mesh cannot be empty|not under a mesh context"
    "|can only refer to Auto axes|that are of type Auto or Manual"
)


def placement_calls(jaxpr: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The calls of a program that place arrays: the name of each, and its equations from outside.

    The last equation is the call; those before it run the programs around it.
    """
    for eqn in jaxpr.eqns:
        name = _CALLS.get(eqn.primitive.name)
        if eqn.primitive.name == "device_put":
            places = eqn.params.get("devices", ())
            name = "jax.device_put" if any(map(_has_several, places)) else None
        if name is not None:
            yield name, (eqn,)
            continue
        for inner in inner_programs(eqn):
            for name, equations in placement_calls(inner):
                yield name, (eqn, *equations)


def is_placement_error(error: BaseException) -> bool:
    """Whether jax refused a call that places arrays, or arrays that such a call made."""
    is_of_types = type(error).__name__ == "ShardingTypeError"
    return is_of_types or _ERRORS.search(str(error)) is not None


def _has_several(place: Any) -> bool:
    return getattr(place, "num_devices", 1) > 1

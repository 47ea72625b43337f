"""Collections of a Linen module that `sow` fills: results of one call, not state.

Flax tells them apart by what happens where a collection is absent and may not be changed: `sow`
does nothing then, while a variable cannot be had.
"""

from collections.abc import Callable

from flax import errors as flax_errors
from flax.core import DenyList

from .._core._errors import ConfigError
from .._core._types import PyTree

# What the optimizer changes, and what a gradient is taken for, if it is given.
_FIXED = ("params", "perturbations")

#: What a call may change.
CHANGED = DenyList(_FIXED)

#: What Flax raises where a variable cannot be had.
NEEDED = (flax_errors.ScopeCollectionNotFound, flax_errors.ScopeVariableNotFoundError)


#: Calls the loss abstractly: from these variables, where this may change; returns what is left in
#: the collections that may.
Left = Callable[[PyTree, DenyList], PyTree]


def kept_collections(left: Left, variables: PyTree, *, is_whole: bool) -> tuple[str, ...]:
    """The names of the collections that a call takes over from the one before.

    Args:
        left: See `Left`.
        variables: The initial ones, `params` among them.
        is_whole: Whether they are all that there are, for the module was initialised by hxla.

    Raises:
        ConfigError: If `variables` lacks such a collection.
    """
    found = set(variables) if is_whole else {*variables, *left(variables, CHANGED)}
    kept = sorted(name for name in found - set(_FIXED) if not _is_sown(left, variables, name))
    missing = sorted(set(kept) - set(variables))
    if missing:
        raise ConfigError(
            f"variables lacks the collections {missing}, which the module keeps between calls: "
            "pass all that module.init returned"
        )
    return tuple(kept)


def _is_sown(left: Left, variables: PyTree, name: str) -> bool:
    others = {key: value for key, value in variables.items() if key != name}
    try:
        left(others, DenyList((*_FIXED, name)))
    except NEEDED:
        return False
    except Exception:
        # The loss misses what was not sown; a loss that fails on its own fails again when traced.
        return True
    return True

"""What a call writes besides results: sown collections of Linen, and fields of NNX modules.

Flax tells them apart by what happens where a collection is absent and may not be changed: `sow`
does nothing then, while a variable cannot be had.

Parameters are the optimizer's, and a loss is traced once: what a call writes into an `nnx.Param` or
into a Python attribute would be lost. It is found, and refused by name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import errors as flax_errors
from flax import nnx
from flax.core import DenyList

from ..core.errors import ConfigError, LossError
from ..core.types import PyTree

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


_REMEDY = (
    "a loss is traced once, and parameters are the optimizer's, so this would be lost: keep what a "
    "call writes in a variable of another type, self.calls = nnx.Variable(jnp.int32(0)), or write "
    "to a copy, nnx.clone(model), where it is for this call only, as nnx.SpectralNorm and "
    "nnx.WeightNorm write normalised kernels"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallWrites:
    """What a loss returned, with the parameters that its call may have written.

    Attributes:
        before: The values of those parameters when the call began.
    """

    out: Any
    before: list[Any]
    after: list[Any]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def with_writes(out: Any, names: Sequence[str], before: PyTree, after: PyTree) -> Any:
    """What a loss returned, as it is if every parameter is the very array that it was."""
    every = zip(names, before, jax.tree.leaves(after), strict=True)
    other = [(name, a, b) for name, a, b in every if a is not b]
    if not other:
        return out
    written, old, new = zip(*other, strict=True)
    return CallWrites(out, list(old), list(new), tuple(written))


def refuse_writes(*told: str) -> None:
    """Refuse a loss that writes what is no state of training.

    Args:
        told: What it writes, a line each; none: nothing.

    Raises:
        LossError: If there is any.
    """
    if told:
        raise LossError("\n  ".join(("the loss changes", *told)) + f"\n{_REMEDY}")


def attributes_of(module: nnx.Module) -> dict[str, Any]:
    """The Python attributes of a module and of those inside, by path: what is no array."""
    found = {}
    for path, own in nnx.iter_graph(module):
        if not isinstance(own, nnx.Pytree):
            continue
        for name, value in vars(own).items():
            if not (name.startswith("_pytree__") or isinstance(value, nnx.Variable | nnx.Pytree)):
                found["/".join(map(str, (*path, name)))] = value
    return found


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Each attribute that is another one after a call, with both values."""
    none = object()
    told = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, none), after.get(name, none)
        if old is not new and not _are_equal(old, new):
            shown = ["nothing" if x is none else _shown(x) for x in (old, new)]
            told.append(f"the attribute {name}: {shown[0]} before, {shown[1]} after a call")
    return told


def refuse_attributes(told: Sequence[str], again: Callable[[], tuple[str, str, bool]]) -> None:
    """Refuse changed attributes, but for those that each call sets alike, as `model.train()` does.

    Args:
        told: See `changed_attributes`.
        again: Gives the program of a first and of a second call, and whether the second one
            changes attributes.

    Raises:
        LossError: If a second call would not be as the first one was.
    """
    if told:
        first, second, changes = again()
        if changes or first != second:
            refuse_writes(*told)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) and type(a) is type(b)
    except Exception:  # whatever the comparison of user's own objects raises
        return False


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array):
        return f"{x.dtype}{list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 40 else f"{type(x).__name__}(...)"

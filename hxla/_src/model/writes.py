"""Side effects of a call: sown collections of Linen, and fields of NNX modules.

If a collection is absent and immutable, `sow` does nothing, but a variable raises: that tells sown
collections from others.

Parameters are the optimizer's, and a loss is traced once. A write into an `nnx.Param` or a Python
attribute would be lost, so it is refused by name.
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

# The optimizer changes the first; a gradient is taken for the second, if it is passed.
_FIXED = ("params", "perturbations")

#: The collections that a call may change.
CHANGED = DenyList(_FIXED)

#: Errors of Flax for a missing variable.
NEEDED = (flax_errors.ScopeCollectionNotFound, flax_errors.ScopeVariableNotFoundError)


#: Calls the loss abstractly, with variables and a filter of mutable collections, and returns these
#: collections after the call.
AbstractCall = Callable[[PyTree, DenyList], PyTree]


def kept_collections(call: AbstractCall, variables: PyTree, *, is_whole: bool) -> tuple[str, ...]:
    """The names of the collections that persist from call to call.

    Args:
        variables: The initial variables, `params` included.
        is_whole: Whether `variables` is complete, as after initialisation by hxla.

    Raises:
        ConfigError: If `variables` lacks such a collection.
    """
    present = set(variables) if is_whole else {*variables, *call(variables, CHANGED)}
    kept = sorted(name for name in present - set(_FIXED) if not _is_sown(call, variables, name))
    missing = sorted(set(kept) - set(variables))
    if missing:
        raise ConfigError(
            f"variables lacks the collections {missing}, which the module keeps between calls: "
            "pass all that module.init returned"
        )
    return tuple(kept)


def _is_sown(call: AbstractCall, variables: PyTree, name: str) -> bool:
    others = {key: value for key, value in variables.items() if key != name}
    try:
        call(others, DenyList((*_FIXED, name)))
    except NEEDED:
        return False
    except Exception:
        # The loss reads what was not sown; a loss that fails anyway fails again when traced.
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
    """The result of a loss, with the parameters that its call may have written.

    Attributes:
        before: The values of those parameters before the call.
    """

    out: Any
    before: list[Any]
    after: list[Any]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def with_writes(out: Any, names: Sequence[str], before: PyTree, after: PyTree) -> Any:
    """The result of a loss, wrapped in `CallWrites` if a parameter is another array after it."""
    every = zip(names, before, jax.tree.leaves(after), strict=True)
    other = [(name, a, b) for name, a, b in every if a is not b]
    if not other:
        return out
    written, old, new = zip(*other, strict=True)
    return CallWrites(out, list(old), list(new), tuple(written))


def refuse_writes(*lines: str) -> None:
    """Refuse a loss that writes anything but training state.

    Args:
        lines: The targets of its writes, a line each.

    Raises:
        LossError: If there is a line.
    """
    if lines:
        raise LossError("\n  ".join(("the loss changes", *lines)) + f"\n{_REMEDY}")


def attributes_of(module: nnx.Module) -> dict[str, Any]:
    """The Python attributes, but no arrays, of a module and its submodules, by path."""
    attributes = {}
    for path, node in nnx.iter_graph(module):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in vars(node).items():
            if not (name.startswith("_pytree__") or isinstance(value, nnx.Variable | nnx.Pytree)):
                attributes["/".join(map(str, (*path, name)))] = value
    return attributes


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each attribute that a call changed, with both values."""
    none = object()
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, none), after.get(name, none)
        if old is not new and not _are_equal(old, new):
            shown = ["nothing" if x is none else _shown(x) for x in (old, new)]
            lines.append(f"the attribute {name}: {shown[0]} before, {shown[1]} after a call")
    return lines


def refuse_attributes(lines: Sequence[str], again: Callable[[], tuple[str, str, bool]]) -> None:
    """Refuse changed attributes, unless every call sets the same, as `model.train()` does.

    Args:
        lines: See `changed_attributes`.
        again: Returns the programs of a first and a second call, and whether the second changes
            attributes.

    Raises:
        LossError: If a second call would differ from the first.
    """
    if lines:
        first, second, changes = again()
        if changes or first != second:
            refuse_writes(*lines)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) and type(a) is type(b)
    except Exception:  # whatever the comparison of user objects raises
        return False


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array):
        return f"{x.dtype}{list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 40 else f"{type(x).__name__}(...)"

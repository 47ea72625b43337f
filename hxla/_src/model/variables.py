"""Variables of a model: which parameters are trained, how the others merge, what a call writes.

Variables that are no parameters merge over microbatches, by the user's rules. Parameters are the
optimizer's, and a loss is traced once. A write into an `nnx.Param` or a Python attribute would be
lost, so it is refused by name.

If a collection is absent and immutable, `sow` does nothing, but a variable raises: that tells sown
collections of Linen from others.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import errors as flax_errors
from flax import nnx
from flax.core import DenyList, FrozenDict, freeze
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from ..core import files
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


#: The argument `trainable`, see `frozen_names`.
Trainable = str | Sequence[Any] | Callable[..., Any] | None

_ACCEPTED = (
    "a pattern of paths ('head/'), an NNX filter (nnx.LoRAParam, nnx.Not(...), "
    "nnx.PathContains(...), a function of path and value), or a list of these"
)


def frozen_names(params: PyTree, trainable: Trainable) -> frozenset[str]:
    """The paths of the parameters that are not trained.

    Args:
        params: Arrays or shapes.
        trainable: A pattern that occurs in the path of a parameter, from the start of a path
            component, as in rule sets; an NNX filter, which gets the path as a tuple; or several,
            of which one must match. None: all are trained.

    Raises:
        ConfigError: If a pattern or filter matches no parameter, or is of another type.
    """
    if trainable is None:
        return frozenset()
    entries = list(entries_of(params))
    chosen: set[str] = set()
    problems = []
    for selector in trainable if isinstance(trainable, list | tuple) else [trainable]:
        is_match = as_predicate(selector, "trainable")
        matches = {name for path, name, value in entries if is_match(path, name, value)}
        chosen |= matches
        if not matches:
            nearest_path = nearest(selector, [name for _, name, _ in entries])
            shown = (
                repr(selector)
                if isinstance(selector, str)
                else getattr(selector, "__name__", selector)
            )
            problems.append(f"  {shown}{nearest_path}")
    if problems:
        raise ConfigError(
            "trainable names no parameter of the model by\n"
            + "\n".join(problems)
            + f"\ntrainable is {_ACCEPTED}; parameters of Linen have paths and no types"
        )
    return frozenset(name for _, name, _ in entries) - chosen


def trained_leaves(params: PyTree, frozen: frozenset[str]) -> tuple[bool, ...]:
    """Whether each array of the parameters is trained."""
    is_trained: list[bool] = []
    for _, name, value in entries_of(params):
        is_trained += [name not in frozen] * len(jax.tree.leaves(value))
    return tuple(is_trained)


def trained_tree(params: PyTree, frozen: frozenset[str]) -> PyTree:
    """The user's tree without frozen parameters, its arrays in the same order."""
    if not frozen:
        return params
    if isinstance(params, nnx.State):
        return nnx.filter_state(params, lambda path, _: "/".join(map(str, path)) not in frozen)
    flat = flatten_dict(params)
    kept = unflatten_dict({k: x for k, x in flat.items() if "/".join(map(str, k)) not in frozen})
    return freeze(kept) if isinstance(params, FrozenDict) else kept


def entries_of(params: PyTree) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Path, name and value of each parameter; a value may be a box around arrays."""
    is_box = lambda x: isinstance(x, nnx.Variable | meta.AxisMetadata)  # noqa: E731
    for path, value in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        keys = tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path)
        yield keys, "/".join(map(str, keys)), value


def nearest(selector: Any, names: Sequence[str]) -> str:
    """The path nearest to a pattern, for a message."""
    return f" (the nearest path is {files.nearest(str(selector), names)!r})" if names else ""


def as_predicate(selector: Any, argument: str) -> Callable[[tuple[Any, ...], str, Any], bool]:
    """A pattern of paths or an NNX filter as a predicate of path, name and value.

    Raises:
        ConfigError: If `selector` is neither.
    """
    if isinstance(selector, str):
        try:
            pattern = re.compile(rf"(?:^|/)(?:{selector})")
        except re.error as error:
            raise ConfigError(f"{argument}={selector!r} is no pattern: {error}") from None
        return lambda _path, name, _value: pattern.search(name) is not None
    try:
        test = nnx.filterlib.to_predicate(selector)
    except (TypeError, ValueError):
        raise ConfigError(f"{argument}={selector!r}: pass {_ACCEPTED}") from None

    def run(path: tuple[Any, ...], _name: str, value: Any) -> bool:
        return bool(test(path, value))

    return run


#: The argument `merge`: a rule for each pattern of paths or NNX filter.
Merge = Mapping[Any, str] | None

#: The rules by name, with the merged value in words.
RULES = {
    "mean": "what it was and the mean of the changes",
    "sum": "what it was and the sum of the changes",
    "max": "the largest value, element by element",
    "min": "the smallest value, element by element",
    "last": "the last microbatch's value",
    "refuse": "an error where microbatches can make unlike values of it",
}


def merges_of(aux: PyTree, merge: Merge) -> tuple[str | None, ...]:
    """The user's rule for each array of the other variables, or None.

    Args:
        aux: Arrays or shapes, in the user's tree.
        merge: Rules by pattern of paths or NNX filter; the first match decides.

    Raises:
        ConfigError: If rules are unknown or match no variable: all faults at once.
    """
    if merge is None:
        return (None,) * len(jax.tree.leaves(aux))
    if not isinstance(merge, Mapping):
        raise ConfigError(
            f"merge={merge!r}: pass a mapping from paths to rules, such as {{'count': 'sum'}}"
        )
    entries = list(entries_of(aux))
    problems, rules = [], dict[str, str]()
    for selector, rule in merge.items():
        if rule not in RULES:
            problems.append(f"  {selector!r}: {rule!r} is no rule: use {', '.join(RULES)}")
            continue
        is_match = as_predicate(selector, "merge")
        matches = [name for path, name, value in entries if is_match(path, name, value)]
        if not matches:
            nearest_path = nearest(selector, [name for _, name, _ in entries])
            problems.append(f"  {selector!r} is no variable that the model keeps{nearest_path}")
        for name in matches:
            rules.setdefault(name, rule)
    if problems:
        raise ConfigError("merge:\n" + "\n".join(problems))
    array_rules: list[str | None] = []
    for _, name, value in entries:
        array_rules += [rules.get(name)] * len(jax.tree.leaves(value))
    return tuple(array_rules)


def statistics_of(aux: PyTree) -> tuple[bool, ...]:
    """Whether each array of the other variables is a batch statistic of Flax."""
    are_statistics: list[bool] = []
    for path, _, value in entries_of(aux):
        is_statistic = isinstance(value, nnx.BatchStat) or path[0] == "batch_stats"
        are_statistics += [is_statistic] * len(jax.tree.leaves(value))
    return tuple(are_statistics)

"""A Flax model, NNX or Linen, as pure functions over flat lists of arrays.

Both kinds become one `Functional`: parameters, auxiliary state (BatchNorm statistics and other
mutable collections), and a call of the user's loss. All its random keys derive from the key of the
microbatch.

The user's arrays of an NNX model leave the devices while a session is open. A session has the
parameters on its devices, and the user's would only be a second copy there. So meanwhile the
model's variables have NumPy arrays with the same numbers.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import PartitionSpec

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..jax.jaxpr import naming_axes, program_text, with_axes
from ..jax.program_parts import ResultGroup, apart
from .arguments import as_module, check_model
from .loss_call import CalledLoss, Loss, called
from .plain_arrays import (
    as_plain,
    from_plain,
    is_complex,
    is_key,
    is_plain,
    key_impl,
    root_key,
    with_arrays,
)
from .variables import (
    CHANGED,
    Merge,
    Trainable,
    attributes_of,
    changed_attributes,
    entries_of,
    frozen_names,
    kept_collections,
    merges_of,
    refuse_attributes,
    statistics_of,
    trained_leaves,
    trained_tree,
    with_writes,
)

#: Variables that no call of a model writes, and those that one may write.
_READ: Any = nnx.Param
_WRITTEN: Any = nnx.Not(nnx.Any(nnx.Param, nnx.RngState))


class GivenArrays:
    """The initial arrays of an NNX module.

    Args:
        trees: Trees with its present arrays. Arrays that the user puts in later are not read.
    """

    def __init__(self, module: nnx.Module, trees: PyTree):
        self._module = module
        self._leaves, self._treedef = jax.tree.flatten(trees)

    def read(self) -> PyTree:
        """The trees of initial arrays, in host memory while a session is open."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    @contextlib.contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Keep the arrays in host memory.

        At the end each variable that still has such an array gets one as it had before. Variables
        that were trained keep their new arrays.
        """
        moved = _Moved()
        self._leaves = list(map(moved.shared, self._leaves))
        self._change(_READ, moved.shared)
        self._change(_WRITTEN, moved.copied)
        moved.free()
        is_over = sys.is_finalizing  # a script may end without closing its session
        try:
            yield
        finally:
            if not is_over():
                self._change(_READ, moved.back)
                self._change(_WRITTEN, moved.back)
                self._leaves = list(map(moved.known_back, self._leaves))

    def _change(self, which: Any, change: Callable[[Any], Any]) -> None:
        state = nnx.state(self._module, which)
        nnx.update(self._module, jax.tree.map(change, state))


class _Moved:
    """Arrays that moved to host memory, and how each was on its device."""

    def __init__(self) -> None:
        self._hosts: dict[int, tuple[jax.Array, np.ndarray]] = {}  # by id of the array
        self._origins: dict[int, tuple[np.ndarray, Any, bool]] = {}  # by id of the host's
        self._back: dict[int, Any] = {}  # by id of the host's

    def shared(self, x: Any) -> Any:
        """An array in host memory, read only; the same one for the same array."""
        if id(x) not in self._hosts:
            host = self.copied(x)
            if host is x:
                return x
            host.flags.writeable = False
            self._hosts[id(x)] = x, host
        return self._hosts[id(x)][1]

    def copied(self, x: Any) -> Any:
        """An array in host memory, which may be written; keys and others unchanged."""
        is_here = isinstance(x, jax.Array) and not x.is_deleted() and x.is_fully_addressable
        if not is_here or is_key(x):
            return x
        host = np.array(x)  # a view of an array in a CPU's memory would keep the array
        self._origins[id(host)] = host, x.sharding, x.committed
        return host

    def free(self) -> None:
        """Let go of the arrays on devices."""
        self._hosts.clear()

    def back(self, x: Any) -> Any:
        """An array as it was before; others unchanged."""
        if id(x) in self._origins and id(x) not in self._back:
            self._back[id(x)] = _placed(*self._origins[id(x)])
        return self._back.get(id(x), x)

    def known_back(self, x: Any) -> Any:
        """An array as it was before, if `back` made it; others unchanged."""
        return self._back.get(id(x), x)


def _placed(host: np.ndarray, sharding: jax.sharding.Sharding, is_committed: bool) -> Any:
    try:
        return jax.device_put(host.copy(), sharding if is_committed else None)
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            f"an array of the model stays in host memory, its device has no room: {error}",
            stacklevel=2,
        )
        return host


# The last path keys of an array in an NNX variable.
_VARIABLE_KEYS = tuple(map(jax.tree_util.GetAttrKey, ("value", "raw_value")))

_LARGE_BYTES = 1 << 20  # of arrays that are initialised by a separate program

#: Random streams of a Linen module by default.
RNGS = ("params", "dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functional:
    """A model as pure functions.

    Attributes:
        params: Shapes of the parameters, in the user's tree.
        aux: Shapes of other arrays that the loss may change, in the user's tree.
        logical: For each parameter the logical axes of its dimensions in Flax's metadata, or None.
        train: `(params, aux, key, batch) -> (output of the loss, aux)`.
        evaluate: The same with the model in evaluation mode.
        finish: `(params, aux) -> (model, state)` as `hxla.train` returns them.
        given: Reads the user's arrays of `params` and `aux`; None: there are none.
        in_host_memory: The context in which these are in host memory.
        initialise: Makes the arrays of `params` and `aux` from `init_arguments`, where none are
            given; None for a model of shapes.
        frozen: Paths of the parameters that are not trained.
        merges: The user's rule for each array of `aux`, or None; see `merges_of`.
        statistics: Whether each array of `aux` is a batch statistic of Flax.
    """

    params: PyTree
    aux: PyTree
    logical: tuple[tuple[str | None, ...] | None, ...]
    train: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]
    evaluate: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]
    finish: Callable[[PyTree, PyTree], tuple[Any, PyTree]]
    given: Callable[[], tuple[PyTree, PyTree]] | None = None
    in_host_memory: Callable[[], AbstractContextManager[None]] = nullcontext
    initialise: Callable[..., tuple[PyTree, PyTree]] | None = None
    init_arguments: tuple[Any, ...] = ()
    frozen: frozenset[str] = frozenset()
    merges: tuple[str | None, ...] = ()
    statistics: tuple[bool, ...] = ()

    @property
    def can_start(self) -> bool:
        """Whether training can begin: a model of shapes can only be planned or resumed."""
        return self.initialise is not None or self.given is not None

    @property
    def arrays(self) -> tuple[PyTree, PyTree]:
        """The user's arrays of `params` and `aux`, or else their shapes."""
        return (self.params, self.aux) if self.given is None else self.given()

    def made_apart(self, wanted: Sequence[int]) -> list[ResultGroup]:
        """Split `initialise`, large arrays apart, so that few whole arrays exist at a time.

        Args:
            wanted: Indices of the arrays of `params` and `aux` to make.
        """
        assert self.initialise is not None
        closed = jax.make_jaxpr(self.initialise)(*self.init_arguments)
        return apart(closed, jax.tree.leaves(self.init_arguments), wanted, _LARGE_BYTES)

    @property
    def trained(self) -> PyTree:
        """The trained parameters, in the user's tree: the optimizer sees this."""
        return trained_tree(self.params, self.frozen)

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """For each parameter whether it is trained."""
        return trained_leaves(self.params, self.frozen)

    @property
    def trained_places(self) -> tuple[int, ...]:
        """The indices of the trained parameters."""
        return tuple(i for i, trained in enumerate(self.is_trained) if trained)


def is_abstract(x: Any) -> bool:
    """Whether a leaf is a shape only."""
    return isinstance(x, jax.ShapeDtypeStruct)


def _shapes(trees: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees)


def _has_arrays(trees: PyTree) -> bool:
    return not any(map(is_abstract, jax.tree.leaves(trees)))


def plain_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by their path in the user's tree, as nested names joined by dots.

    A dot or slash within a name is escaped as in a URL, `%2E` and `%2F`, so different paths have
    different names.

    Raises:
        ConfigError: If two leaves have the same path, as with the keys 0 and "0".
    """
    by_name: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = ".".join(_escaped(jax.tree_util.keystr((key,), simple=True)) for key in path)
        if name in by_name:
            raise ConfigError(f"two arrays of the state are called {name}: rename one of them")
        by_name[name] = leaf
    return by_name


def _escaped(name: str) -> str:
    for letter in "%./":
        name = name.replace(letter, f"%{ord(letter):02X}")
    return name or "%"


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def leaf_names(tree: PyTree) -> tuple[str, ...]:
    """The path of every leaf, as `block/attn/kernel`.

    If two paths would be equal, a slash within a name is escaped as `%2F`.
    """
    paths = [
        [jax.tree_util.keystr((key,), simple=True) for key in path if key not in _VARIABLE_KEYS]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    names = ["/".join(path) for path in paths]
    times = Counter(names)
    return tuple(
        name if times[name] == 1 else "/".join(key.replace("/", "%2F") for key in path)
        for name, path in zip(names, paths, strict=True)
    )


def _logical(specs: PyTree) -> tuple[tuple[str | None, ...] | None, ...]:
    """The logical axes of each parameter; None where the model names none."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return tuple(tuple(s) if s is not None and any(s) else None for s in leaves)


def _check_params(model: Functional) -> None:
    leaves = jax.tree.leaves(model.params)
    if not leaves:
        raise ConfigError("model has no trainable parameters: nothing to train")
    wrong = [
        f"  {name}: {leaf.dtype}{list(leaf.shape)}"
        for name, leaf, trained in zip(
            leaf_names(model.params), leaves, model.is_trained, strict=True
        )
        if trained and not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        raise ConfigError(
            "these parameters are no real or complex floats and have no gradient:\n"
            + "\n".join(wrong)
            + "\nleave them out of the trained parameters, trainable=..., or keep them in another "
            "variable type (NNX) or collection (Linen)"
        )


def _refuse_overwritten(aux: PyTree) -> None:
    overwritten = [
        name
        for path, name, value in entries_of(aux)
        if OVERWRITE_WITH_GRADIENT in (path[0], type(value).__name__)
    ]
    if overwritten:
        shown = ", ".join(overwritten[:3]) + ", ..." * (len(overwritten) > 3)
        raise ConfigError(
            f"the gradient of {shown} is its next value ({OVERWRITE_WITH_GRADIENT!r}, as of Flax's "
            "Fp8DotGeneralOp), which no sum over microbatches gives: leave "
            "dot_general_cls out of the model and pass precision='fp8', which scales products of "
            "8 bits by itself"
        )


def from_nnx(
    model: nnx.Module,
    loss: CalledLoss,
    eval_loss: CalledLoss,
    *,
    make: Callable[[], nnx.Module] | None = None,
    seed: int = 0,
) -> Functional:
    """Make an NNX module functional.

    Args:
        model: Unchanged until `finish`, which updates it in place. Its arrays may be shapes.
        loss: Called on the model in its present mode.
        eval_loss: Called on the model in evaluation mode.
        make: Makes the module; None: `model` has its arrays.
        seed: Seed of the random streams of a module of shapes.

    Returns:
        Params are all `nnx.Param` variables; aux is every other variable except random streams
        and `nnx.Intermediate`.
    """
    filters: Any = (nnx.Param, nnx.RngState, nnx.Intermediate, ...)

    def split(*, evaluating: bool) -> Any:
        clone = nnx.clone(model)
        nnx.pop(clone, nnx.Intermediate)  # of earlier calls
        if evaluating:
            clone.eval()
        graphdef, *parts = nnx.split(clone, *filters)
        return graphdef, *map(with_arrays, parts)

    graphdef_train, params, rngs, _, aux = split(evaluating=False)
    graphdef_eval = split(evaluating=True)[0]
    given = GivenArrays(model, (params, aux)) if _has_arrays((params, aux)) else None
    logical = _logical(nnx.get_partition_spec(params))
    params, aux = _shapes((params, aux))

    def call(graphdef: Any, loss: CalledLoss, *, checks: bool) -> Any:
        def run_once(graphdef: Any, params: PyTree, aux: PyTree, key: Any, batch: PyTree) -> Any:
            before = jax.tree.leaves(params)  # read now, for a call writes into variables
            module = nnx.merge(graphdef, params, _reseed(rngs, key), aux)
            attributes = attributes_of(module)
            out = loss(module, batch, key)
            changed = changed_attributes(attributes, attributes_of(module))
            nnx.pop(module, nnx.Intermediate)
            parts: Any = nnx.split(module, *filters)
            return (out, before, parts[1], parts[4]), parts[0], changed

        def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
            fresh: list[Any] = [jax.tree.map(lambda x: x, tree) for tree in (params, aux)]
            results, graphdef_after, changed = run_once(graphdef, fresh[0], fresh[1], key, batch)
            out, before, after, new_aux = results

            def again() -> tuple[str, str, bool]:
                texts, changes = [], []
                for definition in (graphdef, graphdef_after):

                    def traced(*arguments: Any, definition: Any = definition) -> Any:
                        results, _, changed = run_once(definition, *arguments)
                        changes.append(bool(changed))
                        return jax.tree.leaves(results)

                    texts.append(program_text(jax.make_jaxpr(traced)(params, aux, key, batch)))
                return texts[0], texts[1], changes[1]

            if checks:
                refuse_attributes(changed, again)
                out = with_writes(out, leaf_names(params), before, after)
            return out, new_aux

        return run

    def finish(params: PyTree, aux: PyTree) -> tuple[Any, PyTree]:
        nnx.update(model, params, aux)
        if any(map(is_abstract, jax.tree.leaves(rngs))):
            nnx.update(model, _reseed(rngs, root_key(seed)))
        return model, nnx.state(model, nnx.Not(nnx.RngState))

    def initialise() -> tuple[PyTree, PyTree]:
        assert make is not None
        parts: Any = nnx.split(make(), *filters)
        return with_arrays(parts[1]), with_arrays(parts[4])

    return Functional(
        params=params,
        aux=aux,
        logical=logical,
        train=call(graphdef_train, loss, checks=True),
        evaluate=call(graphdef_eval, eval_loss, checks=False),
        finish=finish,
        given=None if given is None else given.read,
        in_host_memory=nullcontext if given is None else given.in_host_memory,
        initialise=None if make is None else initialise,
    )


def _reseed(rngs: PyTree, key: jax.Array) -> PyTree:
    """Restart every random stream from `key`, folded with its position in the model."""
    leaves, treedef = jax.tree.flatten(rngs)
    fresh = []
    for i, leaf in enumerate(leaves):
        if is_key(leaf):
            stream = jax.random.fold_in(key, i)
            if key_impl(leaf) == jax.random.key_impl(key):
                fresh.append(jax.random.split(stream, leaf.shape) if leaf.shape else stream)
            else:  # another generator, whose keys may have another size
                size = jax.eval_shape(jax.random.key_data, leaf).shape
                data = jax.random.bits(stream, size, jnp.uint32)
                fresh.append(jax.random.wrap_key_data(data, impl=key_impl(leaf)))
        else:
            fresh.append(jnp.zeros_like(leaf))
    return jax.tree.unflatten(treedef, fresh)


def from_linen(
    module: nn.Module,
    loss: CalledLoss,
    eval_loss: CalledLoss,
    *,
    variables: PyTree | None,
    seed: int,
    example: PyTree,
    rngs: Sequence[str] = RNGS,
) -> Functional:
    """Make a Linen module functional.

    Args:
        module: Unbound module. The loss gets it bound, so `model(batch["x"])`,
            `model.method(...)` and `model.variables` work as inside `nn.apply`.
        variables: Initial variables, or None to initialise them by running the loss once.
        example: One microbatch, arrays or shapes, for the shapes of the initialisation.
        rngs: Names of the module's random streams.

    Returns:
        Params are the collection `params`; aux is every other collection except those of `sow`,
        which begin empty in each call.
    """

    def initialised(example: PyTree) -> dict[str, PyTree]:
        root = root_key(seed)
        first, second = jax.random.split(root, 2)
        later = [jax.random.fold_in(root, i) for i in range(2, len(rngs))]
        keys = dict(zip(rngs, (first, second, *later), strict=False))
        axes: list[str] = []
        init = nn.init(loss, module, mutable=True)
        return dict(naming_axes(lambda: with_axes(init, axes)(keys, example, root), axes))

    def applied(loss: CalledLoss, mutable: Any = CHANGED) -> Any:
        apply = nn.apply(loss, module, mutable=mutable)

        def run(variables: PyTree, key: jax.Array, batch: PyTree) -> Any:
            keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)}
            return apply(variables, batch, key, rngs=keys)

        return run

    def collections_after(variables: PyTree, mutable: Any) -> PyTree:
        axes: list[str] = []

        def silent(*arguments: Any) -> None:
            loss(*arguments)

        run = applied(silent, mutable)
        key = jax.eval_shape(root_key, 0)
        return naming_axes(
            lambda: jax.eval_shape(with_axes(run, axes), variables, key, example), axes
        )[1]

    def call(loss: CalledLoss) -> Any:
        def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
            out, collections = applied(loss)({"params": params, **aux}, key, batch)
            return out, {name: collections[name] for name in aux}

        return run

    is_made = variables is None
    if variables is None:
        variables = jax.eval_shape(initialised, example)
    variables = with_arrays(dict(unfreeze(variables)))
    if "params" not in variables:
        raise ConfigError(
            f"variables holds the collections {sorted(variables)} but no 'params': pass what "
            "module.init returned"
        )
    params = variables["params"]
    kept = kept_collections(collections_after, variables, is_whole=is_made)

    def initialise(example: PyTree) -> tuple[PyTree, PyTree]:
        made = initialised(example)
        return made["params"], {name: made[name] for name in kept}

    given = params, {name: variables[name] for name in kept}
    return Functional(
        params=_shapes(params),
        aux=_shapes(given[1]),
        logical=_logical(nn.get_partition_spec(params)),
        train=call(loss),
        evaluate=call(eval_loss),
        finish=lambda params, aux: (module, {"params": params, **aux}),
        given=(lambda: given) if _has_arrays(given) else None,
        initialise=initialise if is_made else None,
        init_arguments=(example,) if is_made else (),
    )


def functional(
    model: Any,
    loss: Loss,
    eval_loss: Loss,
    *,
    variables: PyTree | None,
    seed: int,
    example: PyTree,
    rngs: Sequence[str] = RNGS,
    trainable: Trainable = None,
    merge: Merge = None,
) -> Functional:
    """Make any Flax model functional: see `from_nnx`, `from_linen`, `frozen_names`, `merges_of`.

    A function without arguments that returns an NNX module is only traced: its arrays are made on
    the devices that store them.

    Raises:
        ConfigError: If `model` is no Flax module, its parameters cannot be trained, or
            `trainable` or `merge` matches none of its variables.
    """
    check_model(model)
    loss, eval_loss = called(loss), called(eval_loss, "eval_loss")
    if isinstance(model, nn.Module):
        made = from_linen(
            model, loss, eval_loss, variables=variables, seed=seed, example=example, rngs=rngs
        )
        return _finished(made, trainable, merge)
    model, make = as_module(model)
    if variables is not None:
        raise ConfigError("variables is for Linen modules: an NNX model has its variables")
    return _finished(from_nnx(model, loss, eval_loss, make=make, seed=seed), trainable, merge)


def _finished(model: Functional, trainable: Trainable, merge: Merge) -> Functional:
    """A functional model with the user's choices, and with plain arrays."""
    model = dataclasses.replace(
        model,
        frozen=frozen_names(model.params, trainable),
        merges=merges_of(model.aux, merge),
        statistics=statistics_of(model.aux),
    )
    _check_params(model)
    _refuse_overwritten(model.aux)
    original, initialise, given = (model.params, model.aux), model.initialise, model.given
    if is_plain(model.params, in_parts=True) and is_plain(model.aux):
        return model

    def plain(params: PyTree, aux: PyTree) -> tuple[PyTree, PyTree]:
        return as_plain(params, in_parts=True), as_plain(aux)

    def call(run: Any) -> Any:
        def with_plain(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
            old = from_plain(aux, original[1])
            before = jax.tree.leaves(old)  # read now, for a call writes into variables
            out, new = run(from_plain(params, original[0]), old, key, batch)
            if str(jax.tree.structure(old)) != str(jax.tree.structure(new)):
                return out, new  # the tracing refuses it
            # An unchanged variable stays the same array.
            each = zip(
                jax.tree.leaves(aux),
                before,
                *map(jax.tree.leaves, (new, as_plain(new))),
                strict=True,
            )
            leaves = [x if a is b else y for x, a, b, y in each]
            return out, jax.tree.unflatten(jax.tree.structure(aux), leaves)

        return with_plain

    params, aux = plain(*original)
    logical = [
        None if names is None else (*names, *[None] * is_complex(x))
        for names, x in zip(model.logical, jax.tree.leaves(original[0]), strict=True)
    ]
    return dataclasses.replace(
        model,
        params=params,
        aux=aux,
        logical=tuple(logical),
        train=call(model.train),
        evaluate=call(model.evaluate),
        finish=lambda *trained: model.finish(*map(from_plain, trained, original)),
        given=None if given is None else lambda: plain(*given()),
        initialise=None if initialise is None else lambda *xs: plain(*initialise(*xs)),
    )

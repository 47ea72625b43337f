"""The program that updates a replica's state from the sums of a step."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.program_parts import balanced, in_groups
from ..model.optimizer import Optimizer
from .compile import update_options
from .contribution import Contribution, Tensors
from .microbatch import clip
from .padding import NOT_PADDED, StatePadding, padded, unpadded
from .padding_safe import keeps_padding
from .replica import Replica
from .state_sums import changed, decided
from .uneven_update import Lies, UnevenUpdate

_FEWEST_ROWS = 16  # of a table, for fewer slices are compiled as soon


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """What an update is made from.

    Attributes:
        param_tree: Structure of the user's parameters.
        clip_norm: Global norm to which the gradient is clipped; None: not at all.
        num_groups: Parts in which parameters are updated one after another.
        of_totals: `Reducer.of_totals`.
        padding: Of the state: the optimizer sees arrays without it.
    """

    optimizer: Optimizer
    param_tree: Any
    tensors: Tensors
    contribution: Contribution
    num_microbatches: int
    clip_norm: float | None = None
    num_groups: int = 1
    of_totals: Sequence[Sequence[int]]
    padding: StatePadding


class UpdateInputs(NamedTuple):
    """What an update reads and does not change.

    Attributes:
        totals: Those of `Reducer.reduce`; where copies own parts, those of the copy's parts.
        words: Those of other variables, of all microbatches, see `_state_sums`.
        weight: What the sums are divided by.
        where: int32[2], the copy's first granule and a zero that no compiler knows; None, with
            `sums`: the one program decides how it rounds.
        sums: float32[S], of the update's sums over whole arrays, what `summed` gave.
        rows: int32 scalars 0, 1 and so on, see `num_rows`.
    """

    totals: Any
    words: Any
    exponents_T: Any
    weight: Any
    value: Any
    where: Any = None
    sums: Any = None
    rows: Any = ()


def _updated(
    spec: UpdateSpec,
    params: Sequence[jax.Array],
    grads: Sequence[jax.Array],
    opt_state: PyTree,
    value: jax.Array,
) -> tuple[list[jax.Array], PyTree]:
    """What the user's optimizer makes of its own arrays."""
    if _is_by_element(spec, params, opt_state, value):
        return _updated_as_given(spec, params, grads, opt_state, value)
    of_params, of_state = spec.padding.of_trained, spec.padding.of_opt_state
    new_params, state = _updated_as_given(
        spec,
        unpadded(list(params), of_params),
        unpadded(list(grads), of_params),
        unpadded(opt_state, of_state),
        value,
    )
    return padded(new_params, of_params), padded(state, of_state)


def _updated_as_given(
    spec: UpdateSpec,
    params: Sequence[jax.Array],
    grads: Sequence[jax.Array],
    opt_state: PyTree,
    value: jax.Array,
) -> tuple[list[jax.Array], PyTree]:
    """The same, of arrays with or without padding."""
    tree, own = (jax.tree.unflatten(spec.param_tree, arrays) for arrays in (params, grads))
    updates, state = spec.optimizer.update(own, opt_state, tree, value=value)
    return jax.tree.leaves(optax.apply_updates(tree, updates)), state


def _is_by_element(
    spec: UpdateSpec, params: Sequence[jax.Array], opt_state: PyTree, value: jax.Array
) -> bool:
    """Whether the optimizer may have padded arrays: else they are gathered for it."""
    if spec.padding.is_none:
        return True
    of_params, of_state = spec.padding.of_trained, spec.padding.of_opt_state
    leaves, state_def = jax.tree.flatten(opt_state)
    each = [*of_params, *of_params, *of_state, NOT_PADDED]
    arrays = [*params, *params, *leaves, value]
    plain = [
        jax.eval_shape(p.unpad, jax.ShapeDtypeStruct(x.shape, x.dtype))
        for p, x in zip(each, arrays, strict=True)
    ]
    num = len(params)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        state = jax.tree.unflatten(state_def, arrays[2 * num : -1])
        new_params, state = _updated_as_given(
            spec, arrays[:num], arrays[num : 2 * num], state, arrays[-1]
        )
        return [*new_params, *jax.tree.leaves(state)]

    return keeps_padding(run, plain, [*each, *of_params, *of_state])


def num_rows(spec: UpdateSpec) -> int:
    """Rows of the largest pack whose tensors the update cuts out by numbers that are arguments."""
    return max((len(tensors) for tensors in spec.of_totals if _is_table(spec, tensors)), default=0)


def _is_table(spec: UpdateSpec, tensors: Sequence[int]) -> bool:
    """Whether a total is a table of many tensors of one size.

    XLA compiles a program of its own for a slice at each other place: 200 of four numbers take 13 s
    of a CPU, and 3 s at places that it does not know.
    """
    sizes = {spec.tensors.floats[i].size for i in tensors}
    return len(tensors) >= _FEWEST_ROWS and len(sizes) == 1 and 0 not in sizes


def whole_sums(spec: UpdateSpec, given: UpdateInputs) -> list[jax.Array]:
    """The sums of all tensors, in their own shapes.

    Args:
        spec: What the update is made from.
    """
    floats, found = spec.tensors.floats, {}
    for total, tensors in zip(given.totals, spec.of_totals, strict=True):
        x = jax.lax.bitcast_convert_type(total, jnp.float32)
        if given.rows and _is_table(spec, tensors):
            table = x.reshape(len(tensors), -1)
            exponents = given.exponents_T[np.array(tensors)][:, None]
            table = jax.lax.optimization_barrier(spec.contribution.value(table, exponents))
            for i, row in zip(tensors, given.rows, strict=False):
                found[i] = jax.lax.dynamic_index_in_dim(table, row, keepdims=False)
            continue
        ends = np.cumsum([floats[i].size for i in tensors])
        each = jnp.split(x.reshape(-1), ends[:-1]) if len(tensors) > 1 else [x]
        for i, own in zip(tensors, each, strict=True):
            found[i] = spec.contribution.value(own, given.exponents_T[i])
    return [found[i].reshape(x.shape) for i, x in enumerate(floats)]


def new_aux(
    spec: UpdateSpec,
    aux: Sequence[jax.Array],
    sums: Sequence[jax.Array],
    words: Sequence[jax.Array],
) -> list[jax.Array]:
    """The other variables after a step.

    Args:
        spec: What the update is made from.
        sums: Of the changes of those that are averaged or added up.
        words: Of the others that change.
    """
    tensors, changed_by, said, out = spec.tensors, iter(sums), iter(words), []
    for rule, x, is_summed in zip(tensors.merges, aux, tensors.is_summed, strict=True):
        if rule == "same":
            out.append(x)
        elif is_summed:
            by = next(changed_by)
            out.append(changed(x, by / spec.num_microbatches if rule == "mean" else by))
        else:
            out.append(decided(rule, x, next(said)))
    return out


def update_program(
    spec: UpdateSpec,
    replica: Replica,
    params: Sequence[P],
    opt_state: PyTree,
    aux: Sequence[P],
) -> Any:
    """The program of an update, whose first three arguments are donated.

    `(params, opt_state, aux, given) -> (the first three, tick)`.

    Args:
        spec: What the update is made from.
        opt_state: Tree of the PartitionSpecs of the optimizer's state.
        aux: PartitionSpec of each other variable.
    """
    tensors, contribution = spec.tensors, spec.contribution
    run = update_function(spec)
    own = _on_own_parts(spec, replica, params, opt_state, aux)
    if own is not None:
        run = own
    elif spec.num_groups > 1:
        sizes = [x.size * x.dtype.itemsize for x in tensors.params]
        run = in_groups(run, balanced(sizes, spec.num_groups))
    shardings: Any = None
    if replica.axes:
        shardings = jax.tree.map(
            replica.sharding,
            (list(params), opt_state, list(aux), P()),
            is_leaf=lambda s: isinstance(s, P),
        )
    return jax.jit(
        run,
        donate_argnums=(0, 1, 2),
        compiler_options=update_options(replica.devices[0].platform, contribution.form),
        out_shardings=shardings,
    )


def update_function(spec: UpdateSpec, updated: Callable[..., Any] = _updated) -> Callable[..., Any]:
    """What `update_program` compiles, for a copy with no process of its own for each device.

    Args:
        spec: What the update is made from.
        updated: What the user's optimizer makes of its arrays.
    """
    num_params = len(spec.tensors.params)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        found = whole_sums(spec, given)
        grads = [(found[i] / given.weight).astype(p.dtype) for i, p in enumerate(params)]
        if spec.clip_norm is not None:
            grads = clip(grads, spec.clip_norm)
        new_params, opt_state = updated(spec, params, grads, opt_state, given.value)
        others = new_aux(spec, aux, found[num_params:], given.words)
        return new_params, opt_state, others, given.weight + 0

    return hxla_update


def _on_own_parts(
    spec: UpdateSpec,
    replica: Replica,
    params: Sequence[P],
    opt_state: PyTree,
    aux: Sequence[P],
) -> Callable[..., Any] | None:
    """The same for the one device of a copy that is here; None where that is not to be."""
    tensors, padding, place = spec.tensors, spec.padding, replica.only_place
    words_are_cut = any(map(any, itertools.compress(aux, tensors.is_decided)))
    if place is None or padding.is_none or spec.num_groups > 1 or words_are_cut:
        return None
    own_device = UnevenUpdate(mesh=replica.mesh, place=place)
    of_params, of_aux = (
        [Lies(s, p) for s, p in zip(specs, paddings, strict=True)]
        for specs, paddings in ((params, padding.of_trained), (aux, padding.aux))
    )
    state_specs = jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, P))
    of_state = list(map(Lies, state_specs, padding.of_opt_state))
    held = [*of_params, *of_state, *of_aux]
    of_sums = [*of_params, *itertools.compress(of_aux, tensors.is_summed)]
    own_tensors = dataclasses.replace(
        tensors,
        params=tuple(map(own_device.like, tensors.params, of_params)),
        aux=tuple(map(own_device.like, tensors.aux, of_aux)),
    )
    own_spec = dataclasses.replace(spec, tensors=own_tensors)
    on_own, on_padded = (
        update_function(own_spec, _updated_as_given),
        update_function(spec),
    )

    def hxla_update(*arguments: Any) -> Any:
        params, opt_state, aux, given = arguments
        if not _is_by_element(spec, params, opt_state, given.value):
            return on_padded(*arguments)
        leaves, structure = jax.tree.flatten(arguments)

        def flat(*arrays: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(on_own(*jax.tree.unflatten(structure, arrays)))

        lies = [*held, *of_sums]
        lies += [Lies(P(), NOT_PADDED)] * (len(leaves) - len(lies))
        found = own_device.run(flat, leaves, lies, [*range(len(held)), None])
        results = params, opt_state, aux, given.weight
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return hxla_update

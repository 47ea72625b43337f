"""The arithmetic of an update: of a group of units, or of everything as the optimizer wrote it.

Its inputs are gradients from the totals of a step, and changes of other variables. Most updates run
unit by unit, see `units`: the traced update then reads the arrays of one group only. An update is
one program for float sums, and for optimizers that treat arrays as a whole on replicas that each
update everything.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import ClosedJaxpr, as_function
from ..jax.program_parts import balanced, in_groups
from ..jax.rounded import divided, rounded
from ..jax.separable_update import MISSING
from ..plan.ownership import Ownership
from .chunks import Chunks
from .compile import update_options
from .contribution import Contribution, Tensors
from .decisions import guarded
from .microbatch import clip
from .padding import NOT_PADDED, StatePadding, padded, unpadded
from .replica import Replica
from .state_sums import changed, decided
from .units import Group, ShardedUpdate, Unit, UnitsPart

_FEWEST_ROWS = 2  # of a table


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """The description of an update.

    Attributes:
        num_groups: Groups of parameters, updated one after another.
        chunks: How each bucket of the sums is sharded; empty: replicas have whole totals.
        padding: Padding of the state, which the optimizer does not see.
    """

    tensors: Tensors
    contribution: Contribution
    num_microbatches: int
    num_groups: int = 1
    total_tensors: Sequence[Sequence[int]]
    chunks: Sequence[Chunks] = ()
    padding: StatePadding


class UpdateInputs(NamedTuple):
    """Arrays that an update reads and does not change.

    Attributes:
        totals: The totals of `Reducer.reduce`, or the replica's chunks of them.
        words: Words of other variables, of all microbatches; see `state_sums`.
        weight: The divisor of the sums.
        value: The loss, for optimizers that read it.
        is_accepted: bool, whether the update counts; None: only such are called, see `guarded`.
        where: int32[2], the replica's first granule and a zero that no compiler knows; None, as
            for `sums`: one program that decides how it rounds.
        sums: float32[S], the update's sums over whole arrays, from `exact_norms.summed`.
        rows: int32 scalars 0, 1 and so on, see `num_rows`.
    """

    totals: Any
    words: Any
    exponents_T: Any
    weight: Any
    value: Any
    is_accepted: Any = None
    where: Any = None
    sums: Any = None
    rows: Any = ()


# -- totals ---------------------------------------------------------------------------------------


def num_rows(spec: UpdateSpec) -> int:
    """Rows of the largest table, whose row numbers are arguments of the update."""
    if spec.chunks:
        return 0
    return max(
        (len(tensors) for tensors in spec.total_tensors if _is_table(spec, tensors)), default=0
    )


def _is_table(spec: UpdateSpec, tensors: Sequence[int]) -> bool:
    """Whether a total is a table of many tensors of one size.

    XLA compiles a kernel for each constant offset of a slice: 200 slices of four numbers take 13 s
    of a CPU, and 3 s where offsets are arguments.
    """
    sizes = {spec.tensors.floats[i].size for i in tensors}
    return len(tensors) >= _FEWEST_ROWS and len(sizes) == 1 and 0 not in sizes


#: From a total and its exponent to its float value.
_Value = Callable[[jax.Array, jax.Array], jax.Array]


def sums_of(
    spec: UpdateSpec, inputs: UpdateInputs, wanted: Collection[int], member: int = 0
) -> dict[int, jax.Array]:
    """The sums of tensors, by number: whole, or flat pieces of sharded ones.

    Args:
        member: The replica's number in its shard group.
    """
    return _values_of(spec, inputs, wanted, member, spec.contribution.value)


def means_of(
    spec: UpdateSpec, inputs: UpdateInputs, wanted: Collection[int], member: int
) -> dict[int, jax.Array]:
    """Gradients from their sums, rounded, so that XLA fuses nothing into the division."""
    zero = inputs.where[1]

    def mean(total: jax.Array, exponent: jax.Array) -> jax.Array:
        return rounded(divided(spec.contribution.value(total, exponent), inputs.weight, zero), zero)

    return _values_of(spec, inputs, wanted, member, mean)


def _values_of(
    spec: UpdateSpec, inputs: UpdateInputs, wanted: Collection[int], member: int, value: _Value
) -> dict[int, jax.Array]:
    totals = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in inputs.totals]
    if spec.chunks:
        pieces = _chunk_tensors(spec, totals, member)
        return {i: value(x, inputs.exponents_T[i]) for i, x in pieces.items() if i in wanted}
    return _pack_tensors(spec, inputs, totals, wanted, value)


def _chunk_tensors(
    spec: UpdateSpec, totals: Sequence[jax.Array], member: int
) -> dict[int, jax.Array]:
    floats, num = spec.tensors.floats, len(spec.tensors.params)
    left = iter(totals)
    tensors: dict[int, jax.Array] = {}
    for bucket, chunk in zip(spec.total_tensors, spec.chunks, strict=True):
        if chunk.tensors:
            tensors |= dict(zip(chunk.tensors, chunk.pieces(next(left), member), strict=True))
        others = [i for i in bucket if i >= num]
        if others:
            each = _split(next(left), [floats[i].size for i in others])
            tensors |= {i: x.reshape(floats[i].shape) for i, x in zip(others, each, strict=True)}
    return tensors


def _pack_tensors(
    spec: UpdateSpec,
    inputs: UpdateInputs,
    totals: Sequence[jax.Array],
    wanted: Collection[int],
    value: _Value,
) -> dict[int, jax.Array]:
    floats = spec.tensors.floats
    values: dict[int, jax.Array] = {}
    for x, tensors in zip(totals, spec.total_tensors, strict=True):
        if inputs.rows and _is_table(spec, tensors):
            table = x.reshape(len(tensors), -1)
            exponents = inputs.exponents_T[np.array(tensors)][:, None]
            table = jax.lax.optimization_barrier(value(table, exponents))
            for i, row in zip(tensors, inputs.rows, strict=False):
                if i in wanted:
                    values[i] = jax.lax.dynamic_index_in_dim(table, row, keepdims=False)
        else:
            each = _split(x, [floats[i].size for i in tensors])
            for i, total in zip(tensors, each, strict=True):
                if i in wanted:
                    values[i] = value(total, inputs.exponents_T[i])
    return {i: x.reshape(floats[i].shape) for i, x in values.items()}


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Split a concatenation; a single array keeps its shape."""
    return jnp.split(x.reshape(-1), np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [x]


def new_aux(
    spec: UpdateSpec, aux: Sequence[jax.Array], sums: dict[int, jax.Array], inputs: UpdateInputs
) -> list[jax.Array]:
    """The other variables after a step.

    Args:
        sums: The result of `sums_of`, by number of the tensor.
    """
    tensors, out = spec.tensors, []
    changed_by = iter(range(len(tensors.params), len(tensors.floats)))
    words = iter(inputs.words)
    for rule, x, is_summed in zip(tensors.merges, aux, tensors.is_summed, strict=True):
        if rule == "same":
            out.append(x)
        elif is_summed:
            by = sums[next(changed_by)]
            out.append(changed(x, by / spec.num_microbatches if rule == "mean" else by))
        else:
            out.append(decided(rule, x, next(words)))
    return out


# -- as the optimizer wrote it --------------------------------------------------------------------


def traced_program(
    spec: UpdateSpec,
    closed: ClosedJaxpr,
    clip_norm: float | None,
    replica: Replica,
    params: Sequence[P],
    opt_state: PyTree,
    aux: Sequence[P],
) -> Any:
    """The program of a whole update, whose compiler decides where it rounds.

    `(params, opt_state, aux, given) -> (the first three, tick)`; these three are donated.

    Args:
        closed: The update, traced without a clip.
        clip_norm: Global norm to which the gradient is clipped; None: no clip.
        opt_state: Tree of the PartitionSpecs of the optimizer's state.
        aux: PartitionSpec of each other variable.
    """
    num, of_state = len(spec.tensors.params), spec.padding.of_opt_state
    of_results = [*spec.padding.of_trained, *of_state]
    of_arguments = [*of_results, *spec.padding.of_trained, NOT_PADDED]
    update: Callable[..., list[Any]] = as_function(closed)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        sums = sums_of(spec, given, range(len(spec.tensors.floats)))
        grads = [(sums[i] / given.weight).astype(p.dtype) for i, p in enumerate(params)]
        if clip_norm is not None:
            grads = clip(grads, clip_norm)
        leaves, state_tree = jax.tree.flatten(opt_state)
        arguments = unpadded([*params, *leaves, *grads, given.value], of_arguments)
        results = padded(update(*arguments), of_results)
        others = new_aux(spec, aux, sums, given)
        before = [*params, *leaves, *aux]
        after = guarded(given.is_accepted, [*results, *others], before)
        results, others = after[: len(results)], after[len(results) :]
        state = jax.tree.unflatten(state_tree, results[num:])
        return results[:num], state, others, given.weight + 0

    run: Callable[..., Any] = hxla_update
    if spec.num_groups > 1:
        sizes = [x.size * x.dtype.itemsize for x in spec.tensors.params]
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
        compiler_options=update_options(replica.devices[0].platform, spec.contribution.form),
        out_shardings=shardings,
    )


class GroupArrays(NamedTuple):
    """The arrays that the update of a group reads.

    Attributes:
        params: By place.
        state: For each unit its leaves of the optimizer's state.
        common: Leaves of that state that no unit has.
    """

    group: Group
    params: Mapping[int, Any]
    state: Sequence[Sequence[Any]]
    common: Sequence[Any]
    inputs: UpdateInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupArithmetic:
    """The update of any group of a replica's units, as functions that are traced.

    Attributes:
        spec: The update, with the shapes of a device's shards.
        member: The number of the replica in its group of replicas.
        sharded: The update over the replica's devices; None: there is one device.
    """

    spec: UpdateSpec
    ownership: Ownership
    member: int
    sharded: ShardedUpdate | None

    @functools.cached_property
    def common(self) -> tuple[int, ...]:
        """Places of the leaves of the optimizer's state that no unit has."""
        ownership = self.ownership
        domains = ownership.update.domain_of[ownership.num_params : ownership.num_arrays]
        return tuple(k for k, d in enumerate(domains) if d is None)

    def arguments(self, read: GroupArrays) -> tuple[list[Any], UnitsPart]:
        """Arguments of the traced update, and their part of its arrays."""
        ownership, num = self.ownership, self.ownership.num_params
        group, params, state, common, inputs = read
        is_sharded = bool(self.spec.chunks)
        first = 0 if ownership.is_alone else inputs.where[0]
        part = UnitsPart(ownership, self.member, first, group)
        arguments: list[Any] = [MISSING] * len(ownership.update.closed.jaxpr.invars)
        arguments[-1] = inputs.value
        wanted = {i for unit in group for i in unit.params}
        grads = means_of(self.spec, inputs, wanted, self.member)
        for unit, arrays in zip(group, state, strict=True):
            for i in unit.params:
                grad = part.taken(unit, grads[i], is_flat=is_sharded)
                if unit.stop is None:
                    grad = grad.reshape(params[i].shape)
                arguments[i] = part.taken(unit, params[i], is_flat=ownership.cuts_params)
                arguments[ownership.num_arrays + i] = grad.astype(params[i].dtype)
            for k, x in zip(unit.leaves, arrays, strict=True):
                arguments[num + k] = part.taken(unit, x) if ownership.is_whole else x
        for k, x in zip(self.common, common, strict=True):
            arguments[num + k] = x
        return arguments, part

    def updated(self, read: GroupArrays) -> tuple[dict[int, Any], list[list[Any]], list[Any]]:
        """The new parameters of a group, its state, and the common leaves.

        Parameters to be sent are flat, and only the group's slices of them.
        """
        ownership, num = self.ownership, self.ownership.num_params
        group, params, state, _, inputs = read
        arguments, part = self.arguments(read)
        run = ownership.update.run if self.sharded is None else self.sharded.run
        made = run(arguments, part, inputs.where[1], inputs.sums)
        results: list[Any] = [
            x if x is MISSING else guarded(inputs.is_accepted, x, old.reshape(x.shape))
            for x, old in zip(made, arguments, strict=False)
        ]

        def new(unit: Unit, i: int) -> jax.Array:
            if ownership.sends_params:
                return part.with_zeros(unit.domain, results[i]).reshape(-1)  # type: ignore[no-any-return]
            return part.kept(unit, params[i], results[i])  # type: ignore[no-any-return]

        after = [
            [part.kept(unit, x, results[num + k]) for k, x in zip(unit.leaves, arrays, strict=True)]
            for unit, arrays in zip(group, state, strict=True)
        ]
        new_params = {i: new(unit, i) for unit in group for i in unit.params}
        return new_params, after, [results[num + k] for k in self.common]

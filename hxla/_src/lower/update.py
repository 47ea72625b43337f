"""What an update reads: gradients out of the totals of a step, and other variables' changes.

Most updates run unit by unit, see `units`. An update that is one program as the optimizer wrote it
is here: where sums are of floats, and where the optimizer treats arrays as a whole and every
replica updates everything.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import ClosedJaxpr, as_function
from ..jax.program_parts import balanced, in_groups
from ..jax.rounded import divided, rounded
from .chunks import Chunks
from .compile import update_options
from .contribution import Contribution, Tensors
from .microbatch import clip
from .padding import NOT_PADDED, StatePadding, padded, unpadded
from .replica import Replica
from .state_sums import changed, decided

_FEWEST_ROWS = 16  # of a table, for fewer slices are compiled as soon


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """What an update is made from.

    Attributes:
        num_groups: Parts in which parameters are updated one after another.
        of_totals: `Reducer.of_totals`.
        chunks: For each bucket of the sums how they are shared out; none: all have the whole.
        padding: Of the state: the optimizer sees arrays without it.
    """

    tensors: Tensors
    contribution: Contribution
    num_microbatches: int
    num_groups: int = 1
    of_totals: Sequence[Sequence[int]]
    chunks: Sequence[Chunks] = ()
    padding: StatePadding


class UpdateInputs(NamedTuple):
    """What an update reads and does not change.

    Attributes:
        totals: Those of `Reducer.reduce`; where replicas own parts, those of the replica's parts.
        words: Those of other variables, of all microbatches, see `state_sums`.
        weight: What the sums are divided by.
        where: int32[2], the replica's first granule and a zero that no compiler knows; None, with
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


# -- totals ---------------------------------------------------------------------------------------


def num_rows(spec: UpdateSpec) -> int:
    """Rows of the largest pack whose tensors the update cuts out by numbers that are arguments."""
    if spec.chunks:
        return 0
    return max((len(tensors) for tensors in spec.of_totals if _is_table(spec, tensors)), default=0)


def _is_table(spec: UpdateSpec, tensors: Sequence[int]) -> bool:
    """Whether a total is a table of many tensors of one size.

    XLA compiles a program of its own for a slice at each other place: 200 of four numbers take 13 s
    of a CPU, and 3 s at places that it does not know.
    """
    sizes = {spec.tensors.floats[i].size for i in tensors}
    return len(tensors) >= _FEWEST_ROWS and len(sizes) == 1 and 0 not in sizes


#: From a total and its exponents to what is wanted of it.
_Value = Callable[[jax.Array, jax.Array], jax.Array]


def sums_of(
    spec: UpdateSpec, given: UpdateInputs, wanted: Collection[int], member: int = 0
) -> dict[int, jax.Array]:
    """The sums of tensors, by number: whole, or flat pieces of those that replicas share out.

    Args:
        member: The replica's number in its group, where they do.
    """
    return _tensors(spec, given, wanted, member, spec.contribution.value)


def means_of(
    spec: UpdateSpec, given: UpdateInputs, wanted: Collection[int], member: int
) -> dict[int, jax.Array]:
    """Gradients from their sums, rounded: what follows must not join the division."""
    zero = given.where[1]

    def mean(total: jax.Array, exponent: jax.Array) -> jax.Array:
        return rounded(divided(spec.contribution.value(total, exponent), given.weight, zero), zero)

    return _tensors(spec, given, wanted, member, mean)


def _tensors(
    spec: UpdateSpec, given: UpdateInputs, wanted: Collection[int], member: int, value: _Value
) -> dict[int, jax.Array]:
    totals = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in given.totals]
    if spec.chunks:
        pieces = _of_chunks(spec, totals, member)
        return {i: value(x, given.exponents_T[i]) for i, x in pieces.items() if i in wanted}
    return _of_packs(spec, given, totals, wanted, value)


def _of_chunks(spec: UpdateSpec, totals: Sequence[jax.Array], member: int) -> dict[int, jax.Array]:
    floats, num = spec.tensors.floats, len(spec.tensors.params)
    left = iter(totals)
    found: dict[int, jax.Array] = {}
    for bucket, chunk in zip(spec.of_totals, spec.chunks, strict=True):
        if chunk.tensors:
            found |= dict(zip(chunk.tensors, chunk.pieces(next(left), member), strict=True))
        others = [i for i in bucket if i >= num]
        if others:
            each = _split(next(left), [floats[i].size for i in others])
            found |= {i: x.reshape(floats[i].shape) for i, x in zip(others, each, strict=True)}
    return found


def _of_packs(
    spec: UpdateSpec,
    given: UpdateInputs,
    totals: Sequence[jax.Array],
    wanted: Collection[int],
    value: _Value,
) -> dict[int, jax.Array]:
    floats = spec.tensors.floats
    found: dict[int, jax.Array] = {}
    for x, tensors in zip(totals, spec.of_totals, strict=True):
        if given.rows and _is_table(spec, tensors):
            table = x.reshape(len(tensors), -1)
            exponents = given.exponents_T[np.array(tensors)][:, None]
            table = jax.lax.optimization_barrier(value(table, exponents))
            for i, row in zip(tensors, given.rows, strict=False):
                if i in wanted:
                    found[i] = jax.lax.dynamic_index_in_dim(table, row, keepdims=False)
        else:
            each = _split(x, [floats[i].size for i in tensors])
            for i, own in zip(tensors, each, strict=True):
                if i in wanted:
                    found[i] = value(own, given.exponents_T[i])
    return {i: x.reshape(floats[i].shape) for i, x in found.items()}


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """The arrays that follow each other in one; a single one keeps its shape."""
    return jnp.split(x.reshape(-1), np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [x]


def new_aux(
    spec: UpdateSpec, aux: Sequence[jax.Array], sums: dict[int, jax.Array], given: UpdateInputs
) -> list[jax.Array]:
    """The other variables after a step.

    Args:
        sums: By number of the tensor, those of `sums_of`.
    """
    tensors, out = spec.tensors, []
    changed_by = iter(range(len(tensors.params), len(tensors.floats)))
    words = iter(given.words)
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
    """The program of a whole update that decides itself how it rounds.

    `(params, opt_state, aux, given) -> (the first three, tick)`; these three are donated.

    Args:
        closed: The update, traced without a clip.
        clip_norm: Global norm to which the gradient is clipped; None: not at all.
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
        found = sums_of(spec, given, range(len(spec.tensors.floats)))
        grads = [(found[i] / given.weight).astype(p.dtype) for i, p in enumerate(params)]
        if clip_norm is not None:
            grads = clip(grads, clip_norm)
        leaves, state_tree = jax.tree.flatten(opt_state)
        arguments = unpadded([*params, *leaves, *grads, given.value], of_arguments)
        results = padded(update(*arguments), of_results)
        others = new_aux(spec, aux, found, given)
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

"""The programs of a part of a chain for a call, which may run several microbatches in a loop.

All counts share one body, so no bit depends on them. What a program makes for a later one is
stacked, a row for each microbatch of the call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .bitcast_packing import BitcastPacking
from .contribution import DeviceSums

#: `(where, batch, carried, rows) -> (carried, made)`: a microbatch.
Microbatch = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class CallPrograms(NamedTuple):
    """The functions of a `SegmentPart`, for one microbatch or for a call."""

    forward: Any
    backward: Any
    gradients: Any
    loss: Any
    last_gradients: Any

    def of_several(self, per_call: int, packing: BitcastPacking | None) -> "CallPrograms":
        """The functions for a call, with the same arguments.

        Of several microbatches `where` has a fourth number, the count of microbatches to run.

        Args:
            packing: How one array has all arrays of a microbatch; None: they are several.
        """
        each = functools.partial(_each, per_call, packing)
        one = self

        def hxla_forward(
            params: Any, starts: Any, inputs: Any, aux: Any, where: Any, batch: Any
        ) -> Any:
            def run(where: Any, batch: Any, carried: Any, inputs: Any) -> tuple[Any, Any]:
                return carried, one.forward(params, starts, inputs, aux, where, batch)

            return each(run, where, batch, (), inputs)[1]

        def hxla_backward(
            params: Any,
            starts: Any,
            saved: Any,
            aux: Any,
            limbs: Any,
            peaks_T: jax.Array,
            exponents_T: jax.Array,
            where: Any,
            batch: Any,
            grads: Any,
            pending: Any,
        ) -> Any:
            def run(where: Any, batch: Any, carried: Any, rows: Any) -> tuple[Any, Any]:
                saved, *grads = rows
                read = params, starts, saved, aux, *carried, exponents_T, where, batch, *grads
                limbs, peaks_T, d_inputs = one.backward(*read)
                return (limbs, peaks_T), d_inputs

            rows = saved, grads, pending
            carried, d_inputs = each(run, where, batch, (limbs, peaks_T), rows)
            return *carried, d_inputs

        def hxla_gradients(
            params: Any,
            starts: Any,
            saved: Any,
            aux: Any,
            where: Any,
            batch: Any,
            grads: Any,
            pending: Any,
        ) -> Any:
            def run(where: Any, batch: Any, carried: Any, rows: Any) -> tuple[Any, Any]:
                saved, *grads = rows
                return carried, one.gradients(params, starts, saved, aux, where, batch, *grads)

            return each(run, where, batch, (), (saved, grads, pending))[1]

        def hxla_micro(
            params: Any,
            starts: Any,
            inputs: Any,
            aux: Any,
            sums: DeviceSums,
            exponents_T: jax.Array,
            where: Any,
            batch: Sequence[Any],
        ) -> tuple[DeviceSums, jax.Array, Any]:
            def run(where: Any, batch: Any, carried: Any, inputs: Any) -> tuple[Any, Any]:
                read = params, starts, inputs, aux, carried[0], exponents_T, where, batch
                sums, tick, d_inputs = one.loss(*read)
                return (sums, tick), d_inputs

            carried = sums, np.float32(0)
            like: Any = None if inputs else []
            (sums, tick), d_inputs = each(run, where, batch, carried, inputs, like)
            return sums, tick, d_inputs

        def hxla_last_gradients(
            params: Any,
            starts: Any,
            inputs: Any,
            aux: Any,
            sums: DeviceSums,
            where: Any,
            batch: Any,
        ) -> Any:
            def run(where: Any, batch: Any, sums: Any, inputs: Any) -> tuple[Any, Any]:
                sums, *made = one.last_gradients(params, starts, inputs, aux, sums, where, batch)
                return sums, made

            sums, made = each(run, where, batch, sums, inputs)
            return sums, *made

        return CallPrograms(
            hxla_forward, hxla_backward, hxla_gradients, hxla_micro, hxla_last_gradients
        )


def clip_of_call(clip: Any, per_call: int) -> Any:
    """The function of `join_clipped` for the microbatches of a call."""
    if per_call == 1:
        return clip

    def hxla_clip(
        limbs: Any, peaks_T: jax.Array, exponents_T: jax.Array, where: Any, *rows: Any
    ) -> Any:
        def run(where: Any, _: Any, carried: Any, rows: Any) -> tuple[Any, Any]:
            return clip(*carried, exponents_T, where, *rows), ()

        return _each(per_call, None, run, where, [], (limbs, peaks_T), rows)[0]

    return hxla_clip


def _each(
    per_call: int,
    packing: BitcastPacking | None,
    run: Microbatch,
    where: Any,
    batch: Sequence[Any],
    carried: Any,
    rows: Any,
    like: Any = None,
) -> tuple[Any, Any]:
    """The last `carried`, and the rows that microbatches made; those of no microbatch are zeros.

    Args:
        like: Shapes of what a microbatch makes; None: it is traced once more to know them.
    """
    if per_call == 1:
        return run(where, batch, carried, rows)
    step, first, keep, num = where[0], where[1], where[2], where[3]

    def at(i: Any, carried: Any) -> tuple[Any, Any]:
        def row(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

        leaves = list(map(row, batch))
        leaves = leaves if packing is None else packing.unpack(leaves[0])
        here = jnp.stack([step, first + i, jnp.where(i == 0, keep, 1)])
        return run(here, leaves, carried, jax.tree.map(row, rows))

    def body(i: jax.Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
        carried, new = at(i, both[0])
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return carried, jax.tree.map(put, both[1], new)

    if like is None:
        _, like = jax.eval_shape(at, jnp.int32(0), carried)
    made = jax.tree.map(lambda x: jnp.zeros((per_call, *x.shape), x.dtype), like)
    both: tuple[Any, Any] = jax.lax.fori_loop(0, num, body, (carried, made))
    return both

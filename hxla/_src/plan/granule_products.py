"""Products of matrices in granules, so that their bits do not depend on a mesh axis' size.

A dimension that an axis cuts has a fixed number of granules, of which each device has as many. Each
granule is a product of one shape, alone in the program. Where the dimension is contracted, partial
results are added in a fixed binary tree over granules: neighbours first, inside a device, then over
devices. Both numbers are powers of two, so the tree is the same for each number of devices.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 1
    (a fixed reduction tree, for a fixed number of leaves).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..jax.partition_invariant import ISLAND

_Letters = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GranuleProduct:
    """A `dot_general` over the devices of a mesh.

    Attributes:
        axis: The mesh axis that cuts it.
        granules: Of the dimension that it cuts.
        dims: The dimension of each operand that it cuts, or None.
    """

    mesh: Mesh
    axis: str
    granules: int
    dims: tuple[int | None, ...]

    def of(self, eqn: Any, operands: Sequence[jax.Array]) -> jax.Array:
        """The result of an equation, and its gradients in granules too."""
        letters = _letters(eqn, [x.ndim for x in operands])
        cut = next((x[d] for x, d in zip(letters, self.dims, strict=False) if d is not None), None)
        options = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
        run = functools.partial(self._contract, cut=cut, options=options)
        of_lhs, of_rhs, of_out = letters

        @jax.custom_vjp
        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return run(lhs, rhs, of=(of_lhs, of_rhs, of_out))

        def forward(lhs: jax.Array, rhs: jax.Array) -> Any:
            return product(lhs, rhs), (lhs, rhs)

        def backward(operands: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            lhs, rhs = operands
            return (
                run(cotangent, rhs, of=(of_out, of_rhs, of_lhs)),
                run(lhs, cotangent, of=(of_lhs, of_out, of_rhs)),
            )

        product.defvjp(forward, backward)
        return product(*operands)

    def _contract(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        of: tuple[_Letters, _Letters, _Letters],
        cut: int | None,
        options: dict[str, Any],
    ) -> jax.Array:
        of_lhs, of_rhs, of_out = of
        num = 1 if cut is None else self.granules // self.mesh.shape[self.axis]

        def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            parts = [
                _product(x, y, of, options)
                for x, y in zip(
                    _granules(lhs, of_lhs, cut, num), _granules(rhs, of_rhs, cut, num), strict=True
                )
            ]
            if cut is None:
                return parts[0]
            if cut in of_out:
                return jnp.concatenate(parts, of_out.index(cut))
            partial = _neighbours_first(parts)
            return _neighbours_first(list(jax.lax.all_gather(partial, self.axis)))

        def spec(letters: _Letters) -> P:
            return P(*(self.axis if x == cut else None for x in letters))

        context = jax.sharding.get_abstract_mesh()
        with jax.named_scope(ISLAND):
            return jax.shard_map(
                local,
                mesh=context if context.manual_axes else self.mesh,
                in_specs=(spec(of_lhs), spec(of_rhs)),
                out_specs=spec(of_out),
                axis_names={self.axis},
                check_vma=False,
            )(lhs, rhs)


def _letters(eqn: Any, ranks: Sequence[int]) -> tuple[_Letters, _Letters, _Letters]:
    """The indices of both operands and of the result, as an einsum has letters."""
    (contract_lhs, contract_rhs), (batch_lhs, batch_rhs) = eqn.params["dimension_numbers"]
    lhs = list(range(ranks[0]))
    rhs = [ranks[0] + d for d in range(ranks[1])]
    for a, b in zip((*contract_lhs, *batch_lhs), (*contract_rhs, *batch_rhs), strict=True):
        rhs[b] = lhs[a]
    free = [d for d in range(ranks[0]) if d not in (*contract_lhs, *batch_lhs)]
    free_rhs = [d for d in range(ranks[1]) if d not in (*contract_rhs, *batch_rhs)]
    out = (*(lhs[d] for d in (*batch_lhs, *free)), *(rhs[d] for d in free_rhs))
    return tuple(lhs), tuple(rhs), out


def _granules(x: jax.Array, letters: _Letters, cut: int | None, num: int) -> list[jax.Array]:
    return jnp.split(x, num, letters.index(cut)) if cut in letters else [x] * num


def _neighbours_first(parts: list[jax.Array]) -> jax.Array:
    """A sum as a binary tree over neighbours, of a power of two of terms."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _product(
    lhs: jax.Array,
    rhs: jax.Array,
    of: tuple[_Letters, _Letters, _Letters],
    options: dict[str, Any],
) -> jax.Array:
    """A product of row-major matrices, of which XLA fuses nothing with its surroundings."""
    of_lhs, of_rhs, of_out = of
    batch = [x for x in of_out if x in of_lhs and x in of_rhs]
    contract = [x for x in of_lhs if x in of_rhs and x not in of_out]
    rows = [x for x in of_out if x not in of_rhs]
    columns = [x for x in of_out if x not in of_lhs]
    sizes = dict(zip((*of_lhs, *of_rhs), (*lhs.shape, *rhs.shape), strict=True))

    def flat(x: jax.Array, letters: _Letters, *groups: list[int]) -> jax.Array:
        order = [letters.index(letter) for group in groups for letter in group]
        shape = [math.prod(sizes[letter] for letter in group) for group in groups]
        return x.transpose(order).reshape(shape if batch else shape[1:])

    operands = flat(lhs, of_lhs, batch, rows, contract), flat(rhs, of_rhs, batch, contract, columns)
    lhs, rhs = jax.lax.optimization_barrier(operands)
    num = len(batch) > 0
    dimensions = ((1 + num,), (num,)), ((0,) * num, (0,) * num)
    made = jax.lax.dot_general(lhs, rhs, dimensions, **options)
    made = jax.lax.optimization_barrier(made)
    order = [*batch, *rows, *columns]
    made = made.reshape([sizes[letter] for letter in order])
    return made.transpose([order.index(letter) for letter in of_out])

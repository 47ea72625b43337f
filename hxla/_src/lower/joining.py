"""The terms of gradients that join the sums of a replica.

Legend of shape suffixes: T tensors of a `Joining`.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..jax.cpu_dots import row_major
from ..jax.lookups import Rows
from .chain_spec import ChainSpec
from .contribution import largest_over, local_largest
from .microbatch import joining_uneven
from .uneven import Uneven


class Term(NamedTuple):
    """One term of the sum of a tensor.

    Attributes:
        at: Dimension and first row, if it is some rows of a stacked parameter; None: all of it.
    """

    tensor: int
    value: Any
    at: tuple[int, jax.Array] | None = None

    def added_to(self, whole: jax.Array) -> jax.Array:
        """An array of the tensor's shape with the term added."""
        if self.at is None:
            return whole + self.value  # type: ignore[no-any-return]
        dim, start = self.at
        rows = jax.lax.dynamic_slice_in_dim(whole, start, self.value.shape[dim], dim)
        return jax.lax.dynamic_update_slice_in_dim(whole, rows + self.value, start, dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining:
    """How terms join the sums of some tensors.

    Attributes:
        tensors: The tensors, sorted.
        packs: Places in `ChainSpec.packs` of their sums.
        shared: Tensors with several terms, whose sums begin at zero.
        mesh: The mesh of the replica; None: it has one device.
        uneven: The graph on its devices, if their shards are of unlike sizes.
        on_cpu: Whether to lay out arrays for CPUs.
    """

    spec: ChainSpec
    tensors: tuple[int, ...]
    packs: tuple[int, ...]
    shared: frozenset[int]
    mesh: Mesh | None
    uneven: Uneven | None
    on_cpu: bool

    def is_shared(self, pack: Sequence[int]) -> bool:
        """Whether several terms join the sums of a pack."""
        return not self.shared.isdisjoint(pack)

    def join(
        self,
        terms: Sequence[Term],
        before: Sequence[Any],
        exponents_T: jax.Array,
        keep: jax.Array,
    ) -> tuple[list[Any], jax.Array]:
        """The sums with a microbatch's terms, and the bits of their largest magnitudes."""
        spec = self.spec
        if not self.packs:
            return list(before), jnp.zeros(0, jnp.int32)
        if self.mesh is not None and self.uneven is not None:
            join = joining_uneven(spec, self.mesh, self.uneven, self._lay_out)
            return join([term.value for term in terms], before, exponents_T, keep)
        places: dict[int, list[int]] = collections.defaultdict(list)
        for i, term in enumerate(terms):
            places[term.tensor].append(i)
        packs = [spec.packs[k] for k in self.packs]
        together = []  # groups of terms that join as one array
        for pack in packs:
            joined = [i for t in pack for i in places[t]]
            together += [[i] for i in joined] if self.is_shared(pack) else [joined]
        arrays, bits = self._largest(terms, together)
        row_of = {t: i for i, t in enumerate(self.tensors)}
        out, joining = [], iter(arrays)
        for pack, old in zip(packs, before, strict=True):
            rows = np.array([row_of[t] for t in pack])
            if self.is_shared(pack):
                for i in places[pack[0]]:
                    old = self._add_to_shared(old, next(joining), terms[i].at, exponents_T[rows[0]])
            else:
                old = self._add_to_pack(old, next(joining), exponents_T, rows, keep)
            out.append(old)
        if len(terms) > len(self.tensors):
            of_tensors = [[bits[i] for i in places[t]] for t in self.tensors]
            bits = jnp.stack([functools.reduce(jnp.maximum, each) for each in of_tensors])
        return out, bits

    def _largest(
        self, terms: Sequence[Term], together: Sequence[Sequence[int]]
    ) -> tuple[list[Any], jax.Array]:
        """Terms in the layout that sums read fast, and the bits of each one's largest magnitude."""
        values = [term.value for term in terms]
        if self.mesh is None:
            return local_largest(values, self._lay_out, together)
        specs = [self.spec.specs[term.tensor] for term in terms]
        return largest_over(self.mesh, specs, self._lay_out, together)(values)

    def _lay_out(self, x: jax.Array) -> jax.Array:
        return row_major(x) if self.on_cpu else x

    def _add_to_pack(
        self, old: Any, x: Any, exponents_T: jax.Array, rows: np.ndarray, keep: jax.Array
    ) -> Any:
        """The sum of a pack with one more term; with `keep` 0 that term alone."""
        if not isinstance(x, Rows):
            exponent = exponents_T[rows[0]] if len(rows) == 1 else exponents_T[rows, None]
            return self.spec.contribution.add(old, x, exponent, keep)
        if self.on_cpu:
            old = jax.lax.cond(
                keep == 0, lambda xs: [jnp.zeros_like(x) for x in xs], lambda xs: xs, list(old)
            )
        else:  # elsewhere a branch may wait for the host
            old = [x * keep for x in old]
        return self.spec.contribution.add_rows(old, x, exponents_T[rows[0]])

    def _add_to_shared(self, old: Any, x: jax.Array, at: Any, exponent: jax.Array) -> Any:
        """A shared sum, which begins at zero, with one more term for all of it or for some rows."""
        add = self.spec.contribution.add
        if at is None:
            return add(old, x, exponent)
        dim, start = at
        rows = [jax.lax.dynamic_slice_in_dim(p, start, x.shape[dim], dim) for p in old]
        new = add(rows, x, exponent)
        pairs = zip(old, new, strict=True)
        return tuple(jax.lax.dynamic_update_slice_in_dim(p, n, start, dim) for p, n in pairs)

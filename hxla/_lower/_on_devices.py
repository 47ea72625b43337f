"""The update of a copy of several devices: each runs it on its own parts of all arrays.

What the devices of a copy cut is cut once more over the copies, as granules of each device's part.
So it is the update of a copy of one device, whose arrays are smaller; only sums over whole arrays
are added over the devices that have unlike parts.

References:
    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021, section 2 (tensor, pipeline and data parallelism together).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._plan._layout import names_of
from .._plan._ownership import Ownership
from .._plan._stage_storage import piece_shape
from ._replica import Replica
from ._update import Given, UpdateSpec


def local_part(x: jax.Array, spec: P, sizes: dict[str, int]) -> jax.Array:
    """A device's part of a whole array, inside a `shard_map`.

    Args:
        x: The array.
        spec: How it would lie.
        sizes: Of the mesh axes.
    """
    shape = piece_shape(x.shape, spec, sizes)
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            place = jax.lax.axis_index(names) * shape[dim]
            x = jax.lax.dynamic_slice_in_dim(x, place, shape[dim], dim)
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevices:
    """Runs what is written for one device on each device of a copy.

    Attributes:
        own: Who updates what.
        replica: The copy.
        params: PartitionSpec of each trained parameter.
        aux: PartitionSpec of each other variable.
        state: Tree of the PartitionSpecs of the optimizer's state, as the copy has it.
    """

    own: Ownership
    replica: Replica
    params: Sequence[P]
    aux: Sequence[P]
    state: PyTree

    def local(self, spec: UpdateSpec) -> UpdateSpec:
        """What the update is made from, with the shapes of a device's parts."""
        tensors = spec.tensors
        return dataclasses.replace(
            spec,
            tensors=dataclasses.replace(
                tensors,
                params=tuple(map(self._like, tensors.params, self.params)),
                aux=tuple(map(self._like, tensors.aux, self.aux)),
            ),
        )

    def _like(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(piece_shape(x.shape, spec, dict(self.own.axes)), x.dtype)

    def update(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`own_update_program`'s function on the arrays of the copy."""
        params, aux = self._params, list(self.aux)
        results = self.own.parts_spec, self.state, aux, P()
        return self._mapped(run, (params, self.state, aux, self._given), results)

    def group(self, run: Callable[..., Any], params: Collection[int]) -> Callable[..., Any]:
        """A function of some parameters, of flat state, of what all copies have of the state, and
        of what is given, to flat parts of parameters and of state.

        Args:
            run: The function.
            params: Numbers of the parameters.
        """
        own = {i: self._params[i] for i in params}
        lie = self.own.parts_spec
        return self._mapped(run, (own, lie, P(), self._given), (lie, lie))

    def rest(self, run: Callable[..., Any], params: Collection[int]) -> Callable[..., Any]:
        """A function of some parameters, of what groups made of others, of what all copies have of
        the state, of the other variables and of what is given.

        Args:
            run: The function.
            params: Numbers of the parameters.
        """
        own, aux, lie = {i: self._params[i] for i in params}, list(self.aux), self.own.parts_spec
        return self._mapped(run, (own, lie, P(), aux, self._given), (lie, P(), aux, P()))

    def sums(self, run: Callable[..., Any], num: int) -> Callable[..., Any]:
        """A function of the arguments of `own_arguments`, and of so many numbers more."""
        arguments = self._params, self.state, self._given
        return self._mapped(run, (*arguments, *[P()] * num), P())

    @property
    def _params(self) -> list[P]:
        """PartitionSpecs of the parameters, or of a copy's own parts of them."""
        if self.own.cuts_params:
            return [self.own.parts_spec] * len(self.params)
        return list(self.params)

    @property
    def _given(self) -> Given:
        """PartitionSpecs of what an update reads besides; what is whole is so everywhere."""
        return Given(self.own.parts_spec, *[P()] * (len(Given._fields) - 1))

    def largest(self, found: jax.Array) -> jax.Array:
        """The largest of what the devices have."""
        return jax.lax.pmax(found, tuple(name for name, _ in self.own.axes))

    def added(self, digits: jax.Array, domain: int) -> jax.Array:
        """The sum over the devices that have unlike parts of a domain's arrays."""
        names = tuple(n for part in self.own.spec(domain) for n in names_of(part))
        return jax.lax.psum(digits, names) if names else digits

    def _mapped(self, run: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self.replica.mesh, in_specs=given, out_specs=made, check_vma=False
        )
        return functools.wraps(run)(mapped)

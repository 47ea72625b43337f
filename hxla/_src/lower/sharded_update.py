"""The update of a copy of several devices: each runs it on its own parts of all arrays.

What the devices of a copy cut is cut once more over the copies, as granules of each device's part.
So it is the update of a copy of one device, whose arrays are smaller; only sums over whole arrays
are added over the devices that have unlike parts. What the optimizer treats as a whole is put
together on every device of the copy that owns it, and each keeps its own part of what is made.

References:
    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021, section 2 (tensor, pipeline and data parallelism together).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.separable_update import MISSING, Part
from ..plan.layout import names_of
from ..plan.ownership import Ownership
from ..plan.stage_storage import piece_shape
from .chunks import moved
from .replica import Replica
from .update import UpdateInputs, UpdateSpec


def local_part(x: jax.Array, spec: P, sizes: dict[str, int]) -> jax.Array:
    """A device's part of a whole array, inside a `shard_map`."""
    shape = piece_shape(x.shape, spec, sizes)
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            place = jax.lax.axis_index(names) * shape[dim]
            x = jax.lax.dynamic_slice_in_dim(x, place, shape[dim], dim)
    return x


def _whole(x: jax.Array, spec: P) -> jax.Array:
    """The other way: an array from the parts of all devices."""
    for dim, part in enumerate(spec):
        names = names_of(part)
        if names:
            gather = functools.partial(jax.lax.all_gather, axis_name=names, axis=dim, tiled=True)
            x = moved(gather, x, x.dtype)
    return x


@dataclasses.dataclass(frozen=True)
class _Some(Part):
    """Some of what a copy has.

    Attributes:
        domains: Those of which this is.
    """

    part: Part
    domains: Collection[int]

    def owns(self, domain: int) -> bool:
        """Whether it is one of them."""
        return domain in self.domains

    def has_whole(self, domain: int) -> bool:
        """As the copy."""
        return self.part.has_whole(domain)

    def piece(self, domain: int, x: Any) -> Any:
        """As the copy's."""
        return self.part.piece(domain, x)

    def own(self, domain: int, x: Any) -> Any:
        """As the copy's."""
        return self.part.own(domain, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedUpdate:
    """Runs what is written for one device on each device of a copy.

    Attributes:
        params: PartitionSpec of each trained parameter.
        aux: PartitionSpec of each other variable.
        state: Tree of the PartitionSpecs of the optimizer's state, as the copy has it.
        leaves: PartitionSpec of each leaf of that state that is not cut over the copies.
    """

    own: Ownership
    replica: Replica
    params: Sequence[P]
    aux: Sequence[P]
    state: PyTree
    leaves: Sequence[P]

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
        """
        own = {i: self._params[i] for i in params}
        lie = self.own.parts_spec
        return self._mapped(run, (own, lie, P(), self._given), (lie, lie))

    def rest(self, run: Callable[..., Any], params: Collection[int]) -> Callable[..., Any]:
        """A function of some parameters, of what groups made of others, of what all copies have of
        the state, of the other variables and of what is given.
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
    def _given(self) -> UpdateInputs:
        """PartitionSpecs of what an update reads besides; what is whole is so everywhere."""
        return UpdateInputs(self.own.parts_spec, *[P()] * (len(UpdateInputs._fields) - 1))

    def run(
        self, arguments: Sequence[Any], part: Part, zero: jax.Array, sums: jax.Array
    ) -> list[Any]:
        """The results of the traced update: the device's own part, flat, of what is whole there.

        Args:
            arguments: As a device has them, its parts perhaps flat.
            part: What the copy has, or a group of it.
            zero: See `SeparableUpdate.run`.
            sums: See `SeparableUpdate.run`.
        """
        update, wholes = self.own.update, dict(self._wholes(part))

        def made(arguments: Sequence[Any], part: Part) -> dict[int, Any]:
            found = dict(enumerate(update.run(arguments, part, zero, sums)))
            axes, own = dict(self.own.axes), dict(self._wholes(part))
            parts = {k: local_part(found[k], spec, axes).reshape(-1) for k, spec in own.items()}
            return parts or {k: x for k, x in found.items() if k not in wholes}

        found = self.each(made, arguments, part, zero)
        return [found[k] for k in range(self.own.num_arrays)]

    def each(
        self,
        run: Callable[[Sequence[Any], Part], dict[int, Any]],
        arguments: Sequence[Any],
        part: Part,
        zero: jax.Array,
    ) -> dict[int, Any]:
        """What a function makes of what is cut, and of each domain that the copy has whole.

        Each of these is a branch of its own, with which XLA fuses nothing else: so one after
        another is whole, and no bit depends on what else the copy owns.

        Args:
            run: From arguments of the traced update, and what they have, to numbered results.
            arguments: See `run`.
            part: See `run`.
            zero: See `run`.
        """
        domains, owners = self.own.update.domain_of, self.own.owners
        here = {d for d in range(len(owners)) if part.owns(d)}
        cut = {d for d in here if owners[d] is None}
        found = run(arguments, _Some(part, cut))
        for domain in sorted(here - cut):
            only = _Some(part, {domain})
            read = {
                k: x
                for k, (x, d) in enumerate(zip(arguments, domains, strict=True))
                if d in (None, domain) and x is not MISSING
            }

            def made(read: dict[int, Any], only: _Some = only) -> dict[int, Any]:
                own = [read.get(k, MISSING) for k in range(len(domains))]
                return run(self._gathered(own, only), only)

            like = jax.eval_shape(made, read)
            none = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), like)
            found |= jax.lax.cond(zero == 0, made, lambda _: none(), read)  # noqa: B023
        return found

    def _gathered(self, arguments: Sequence[Any], part: Part) -> list[Any]:
        """The arguments with the whole of what is updated as a whole; None: it is elsewhere."""
        found, num, arrays = list(arguments), self.own.num_arrays, self.own.update.closed.out_avals
        for k, spec in self._wholes(part):
            # A gradient lies as its parameter.
            for place in (k, num + k) if k < self.own.num_params else (k,):
                if found[place] is not None:
                    shape = piece_shape(arrays[k].shape, spec, dict(self.own.axes))
                    found[place] = _whole(found[place].reshape(shape), spec)
        return found

    def _wholes(self, part: Part) -> Iterator[tuple[int, P]]:
        """Numbers of the arrays that are updated as a whole, and how the devices cut them."""
        owners, domains = self.own.owners, self.own.update.domain_of
        for k, spec in enumerate((*self.params, *self.leaves)):
            domain = domains[k]
            if domain is not None and owners[domain] is not None and part.owns(domain):
                yield k, spec

    def largest(self, found: jax.Array) -> jax.Array:
        """The largest of what the devices have."""
        return jax.lax.pmax(found, tuple(name for name, _ in self.own.axes))

    def added(self, digits: jax.Array, domain: int) -> jax.Array:
        """The sum over the devices that have unlike parts of a domain's arrays."""
        if self.own.owners[domain] is not None:
            return digits  # of the whole, on each
        names = tuple(n for part in self.own.spec(domain) for n in names_of(part))
        return jax.lax.psum(digits, names) if names else digits

    def _mapped(self, run: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self.replica.mesh, in_specs=given, out_specs=made, check_vma=False
        )
        return functools.wraps(run)(mapped)

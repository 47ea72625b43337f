"""Who updates what: granules of parameters and of the optimizer's state, or the whole of some.

A tensor that may be cut anywhere is flattened and cut into granules of equal size, as many as all
shares together; each copy of the model has consecutive ones. So copies of equal shares have arrays
of equal shapes, and one program. What the optimizer treats as a whole, such as a matrix that it
orthogonalises, belongs to one copy.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..jax.jaxpr import as_function
from ..jax.separable_update import SeparableUpdate, independent
from ..model.optimizer import Optimizer
from .layout import padded_shape, to_spec
from .stage_storage import piece_shape

#: Elements: arithmetic on a single number is compiled in another way than on several.
LEAST_GRANULE = 8
SUMMED_STATE = (
    "the optimizer's sums over whole parameters, such as trust ratios, read its state, which would "
    "come to the device twice in a step"
)


@dataclasses.dataclass(frozen=True)
class Shares:
    """What each copy of a group owns; where every copy shares with every other there is one group.

    Attributes:
        granules: Of each copy of the group.
        owners: For each tensor the copy that owns the whole of it; None: it is cut.
    """

    granules: tuple[int, ...]
    owners: tuple[int | None, ...]

    @property
    def num(self) -> int:
        """Granules of all copies."""
        return sum(self.granules)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first granule of each copy."""
        return tuple(itertools.accumulate(self.granules, initial=0))[:-1]

    def at(self, places: Sequence[Sequence[int]]) -> "Shares":
        """Those of several copies together, each with the next ones.

        Args:
            places: Numbers of the copies that count as one.
        """
        place_of = {copy: p for p, copies in enumerate(places) for copy in copies}
        return Shares(
            tuple(sum(self.granules[c] for c in copies) for copies in places),
            tuple(None if owner is None else place_of[owner] for owner in self.owners),
        )

    def granule(self, size: int) -> int:
        """Elements of a granule of a tensor of so many."""
        return max(-(-size // self.num), LEAST_GRANULE)

    def own_size(self, tensor: int, size: int, copy: int) -> int:
        """Elements of a tensor that a copy holds, with what pads the last ones.

        One of a tensor that is another's: XLA keeps arrays without elements badly.
        """
        owner = self.owners[tensor]
        if owner is None:
            return self.granules[copy] * self.granule(size)
        return size if owner == copy else 1

    def piece(self, x: jax.Array, granules: int, first: Any) -> jax.Array:
        """Consecutive granules of a whole tensor, flat.

        Args:
            first: Number of the first, perhaps traced.
        """
        each = self.granule(x.size)
        flat = jnp.pad(x.reshape(-1), (0, each * self.num - x.size))
        return jax.lax.dynamic_slice(flat, (first * each,), (granules * each,))

    def taken(self, tensor: int, copy: int, x: jax.Array, first: Any) -> jax.Array:
        """What a copy has of a whole tensor, flat.

        Args:
            first: Number of the copy's first granule, perhaps traced.
        """
        owner = self.owners[tensor]
        if owner is None:
            return self.piece(x, self.granules[copy], first)
        return x.reshape(-1) if owner == copy else jnp.zeros(1, x.dtype)


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Which copy of the model updates what.

    Attributes:
        update: The update, from trained parameters and the optimizer's state to their next values.
        granules: Of each copy of a group; all groups have the same.
        owners: For each domain of the update the copy of a group that owns it; None: it is cut.
        cuts_params: Whether each copy has only its share of the parameters, as of the state.
        is_whole: Whether every copy updates everything, and keeps arrays in their own shapes.
        axes: Names and sizes of the mesh axes inside a copy: each device's part is cut then.
        specs: For each domain how its arrays lie on them; empty: there are none.
        parts: For each domain the sizes of unlike parts, see `ParameterLayout.sizes`; empty: none
            are unlike.
        place: Of the one device that programs are made for, where parts are unlike: its own have no
            padding then; None: any device runs them.
    """

    update: SeparableUpdate
    granules: tuple[int, ...]
    owners: tuple[int | None, ...]
    num_params: int
    cuts_params: bool = False
    is_whole: bool = False
    axes: tuple[tuple[str, int], ...] = ()
    specs: tuple[P, ...] = ()
    parts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    place: int | None = None

    def spec(self, domain: int) -> P:
        """How the arrays of a domain lie on the axes inside a copy."""
        return self.specs[domain] if self.specs else P()

    def local_shape(self, domain: int) -> tuple[int, ...]:
        """The shape of a device's part of the first array of a domain, as it is updated."""
        k = self.update.domain_of.index(domain)
        parts = self.parts_of(domain)
        whole = padded_shape(self.update.closed.out_avals[k].shape, parts)
        shape = list(piece_shape(whole, self.spec(domain), dict(self.axes)))
        for dim, sizes in enumerate(parts):
            if sizes and self.place is not None:
                shape[dim] = sizes[self.place]
        return tuple(shape)

    def parts_of(self, domain: int) -> tuple[tuple[int, ...], ...]:
        """For each dimension the sizes of its parts, where they are unlike; else nothing."""
        return self.parts[domain] if self.parts else ()

    @property
    def num_inner(self) -> int:
        """Devices of each copy."""
        return math.prod(size for _, size in self.axes)

    @property
    def parts_spec(self) -> P:
        """How what each device of a copy has of its own lies, one after another."""
        return to_spec([[name for name, _ in self.axes]])

    def member(self, copy: int) -> int:
        """The number in its group of one of all copies."""
        return copy % len(self.granules)

    def first(self, copy: int) -> int:
        """The first granule of one of all copies."""
        return self.shares.firsts[self.member(copy)]

    def is_counted(self, copy: int) -> bool:
        """Whether one of all copies is of the first group, what others have being the same."""
        return copy < len(self.granules)

    @property
    def is_alone(self) -> bool:
        """Whether there is one copy, which owns everything."""
        return len(self.granules) == 1

    @property
    def sends_params(self) -> bool:
        """Whether all copies have the parameters that each updates its part of."""
        return not (self.is_alone or self.cuts_params)

    @property
    def summed_state(self) -> bool:
        """Whether sums over whole arrays read leaves of the optimizer's state that have a domain,
        as trust ratios do."""
        read = self.update.read_by_sums()
        domains = self.update.domain_of
        return any(
            k in read and domains[k] is not None for k in range(self.num_params, self.num_arrays)
        )

    @functools.cached_property
    def shares(self) -> Shares:
        """Of the parameters."""
        return self._of(self.update.domain_of[: self.num_params])

    def of_leaves(
        self, is_trained: Sequence[bool], num_aux: int
    ) -> tuple[Shares, tuple[int | None, ...]]:
        """Of all parameters, then other variables, then leaves of the optimizer's state.

        Args:
            is_trained: For each parameter whether it is.

        Returns:
            The shares, and for each leaf its domain; None: all copies have the whole of it.
        """
        trained = iter(self.update.domain_of[: self.num_params])
        domains = [
            *(next(trained) if own and self.cuts_params else None for own in is_trained),
            *[None] * num_aux,
            *self.update.domain_of[self.num_params : self.num_arrays],
        ]
        return self._of(domains), tuple(domains)

    def state_specs(self, tree: PyTree) -> PyTree:
        """How what a copy of several devices has of the optimizer's state lies on them.

        Args:
            tree: Of the state, with any leaves.
        """
        domains = self.update.domain_of[self.num_params : self.num_arrays]
        specs = [P() if d is None else self.parts_spec for d in domains]
        is_leaf = lambda x: isinstance(x, P)  # noqa: E731
        return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), specs)

    @property
    def num_arrays(self) -> int:
        """Parameters and leaves of the optimizer's state."""
        return len(self.update.closed.jaxpr.outvars)

    def program_key(self, copy: int) -> Any:
        """Of all copies those of equal keys run the same programs."""
        member = self.member(copy)
        return self.granules[member], tuple(o == member for o in self.owners)

    def _of(self, domains: Sequence[int | None]) -> Shares:
        return Shares(self.granules, tuple(None if d is None else self.owners[d] for d in domains))


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's update.

    Attributes:
        update: What of it is independent.
        arrays: Shapes of what it makes anew: parameters and the optimizer's state.
    """

    update: SeparableUpdate
    arrays: Sequence[Any]
    num_params: int


def ownership(traced: TracedUpdate, granules: Sequence[int]) -> Ownership:
    """Share out an optimizer's update.

    What may be cut is cut by granules. The rest, largest first, goes to the copy that has the
    least for its granules.

    Args:
        granules: Of each copy of a group.
    """
    found, arrays = traced.update, traced.arrays
    sizes = [0] * len(found.slices)
    for domain, x in zip(found.domain_of, arrays, strict=False):
        if domain is not None:
            sizes[domain] += x.size
    owners: list[int | None] = [None] * len(sizes)
    load = [0.0] * len(granules)
    for d in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
        if found.slices[d]:
            continue
        best = min(range(len(granules)), key=lambda c: (load[c] + sizes[d]) / granules[c])
        owners[d], load[best] = best, load[best] + sizes[d]
    return Ownership(found, tuple(granules), tuple(owners), traced.num_params)


def traced_update(
    optimizer: Optimizer, params: PyTree, clip_norm: float | None = None
) -> TracedUpdate:
    """Trace an update, and find what of it is independent.

    Args:
        params: Shapes of the trained parameters.
        clip_norm: Global norm to which gradients are clipped first; None: not at all.
    """
    leaves, tree = jax.tree.flatten(params)
    state = jax.tree.leaves(optimizer.state_shapes(params))
    program, shapes = optimizer.traced(params)
    run, results = as_function(program), jax.tree.structure(shapes)
    num, num_arrays = len(leaves), len(leaves) + len(state)

    def update(*arrays: Any) -> list[Any]:
        own = jax.tree.unflatten(tree, arrays[:num])
        grads = list(arrays[num_arrays:-1])
        if clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
        made = run(*grads, *arrays[num:num_arrays], *arrays[:num], arrays[-1])
        updates, after = jax.tree.unflatten(results, made)
        return [*jax.tree.leaves(optax.apply_updates(own, updates)), *jax.tree.leaves(after)]

    value = jax.ShapeDtypeStruct((), np.float32)
    same = [*range(num), -1]
    arrays = [*leaves, *state]
    return TracedUpdate(independent(update, arrays, [*leaves, value], same), arrays, num)

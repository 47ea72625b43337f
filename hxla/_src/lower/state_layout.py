"""How every array of the state is sharded and padded: known before there is any array."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..model.functional import Functional, leaf_names
from ..model.optimizer import Optimizer
from ..plan.ownership import Ownership
from ..plan.parts import SumsForm
from .compile import update_options
from .padding import Padding, even_spec
from .replica import ReplicaArrays, StateSpecs
from .sum import Reducer
from .zero_state import ZeroState


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The arrays of a state, on all replicas.

    In these methods `k` is the place of an array in `ReplicaArrays.leaves`, and `i` that of a
    local replica.

    Attributes:
        model: The model as pure functions, with its arrays or their shapes.
        ownership: The units that each replica updates; None: each updates everything.
    """

    model: Functional
    optimizer: Optimizer
    reducer: Reducer
    specs: StateSpecs
    sums: SumsForm
    ownership: Ownership | None = None

    @functools.cached_property
    def opt_shapes(self) -> PyTree:
        """Shapes of the optimizer's state, as optax makes it."""
        return self.optimizer.state_shapes(self.model.trained)

    @functools.cached_property
    def shapes(self) -> list[Any]:
        """Shapes of the whole arrays, without padding."""
        return jax.tree.leaves((self.model.params, self.model.aux, self.opt_shapes))

    @property
    def num_params(self) -> int:
        """The number of parameters, the first arrays."""
        return len(self.specs.params)

    @property
    def first_state(self) -> int:
        """The place of the first array of the optimizer's state."""
        return len(self.specs.params) + len(self.specs.aux)

    @functools.cached_property
    def zero(self) -> ZeroState | None:
        """The state that is sharded over replicas; None: every replica has all of it."""
        if self.ownership is None:
            return None
        shares, domains = self.ownership.of_leaves(self.model.is_trained, len(self.specs.aux))
        return ZeroState(
            self.ownership, self.reducer, self.shapes, shares, domains, self.specs.leaves()
        )

    @functools.cached_property
    def shard_specs(self) -> list[P]:
        """PartitionSpec of each replica's shard of each array."""
        return self.specs.leaves() if self.zero is None else self.zero.shard_specs

    @functools.cached_property
    def even_specs(self) -> list[P]:
        """PartitionSpecs of arrays without their padding."""
        sizes, padding = dict(self.reducer.replicas[0].axes), self.specs.padding.leaves()
        each = zip(self.shapes, self.specs.leaves(), padding, strict=True)
        return [even_spec(x.shape, spec, padding, sizes) for x, spec, padding in each]

    def is_sharded(self, k: int) -> bool:
        """Whether an array is sharded over replicas."""
        return self.zero is not None and not self.zero.is_common[k]

    @property
    def program_key(self) -> Any:
        """The key of programs, besides the kinds of devices."""
        return None if self.ownership is None else self.ownership.program_key

    def names(self) -> tuple[str, ...]:
        """Names of all arrays, for messages."""
        names = leaf_names(self.model.params), leaf_names(self.model.aux)
        of_optimizer = (f"optimizer state {n}" for n in leaf_names(self.opt_shapes))
        return *names[0], *names[1], *of_optimizer

    def replica_arrays(self, leaves: Sequence[Any]) -> ReplicaArrays:
        """Arrays in the order of `ReplicaArrays.leaves`, in their three parts."""
        num, end = self.num_params, self.first_state
        opt_state = jax.tree.unflatten(jax.tree.structure(self.opt_shapes), leaves[end:])
        return ReplicaArrays(
            params=list(leaves[:num]), aux=list(leaves[num:end]), opt_state=opt_state
        )

    # -- shapes on a local replica ---------------------------------------------------------------

    def whole_like(self, i: int) -> tuple[list[Any], list[Any]]:
        """Shapes of whole parameters and other variables, for microbatches."""
        padding, like = self.specs.padding, functools.partial(self._padded_like, i)
        return (
            list(map(like, jax.tree.leaves(self.model.params), self.specs.params, padding.params)),
            list(map(like, jax.tree.leaves(self.model.aux), self.specs.aux, padding.aux)),
        )

    def like(self, i: int) -> tuple[list[Any], list[Any], Any]:
        """Shapes of the parameters, other variables and optimizer state between steps."""
        if self.zero is None:
            specs, padding = self.specs.opt_state, self.specs.padding.opt_state
            like = functools.partial(self._padded_like, i)
            return *self.whole_like(i), jax.tree.map(like, self.opt_shapes, specs, padding)
        replica = self.reducer.local[i]
        shards = self.replica_arrays(
            [
                replica.like(self.zero.like(k, replica.index), spec)
                for k, spec in enumerate(self.shard_specs)
            ]
        )
        return shards.params, shards.aux, shards.opt_state

    def _padded_like(self, i: int, x: Any, spec: P, padding: Padding) -> jax.ShapeDtypeStruct:
        return self.reducer.local[i].like(padding.like(x), spec)

    # -- shards ----------------------------------------------------------------------------------

    def first_granule(self, i: int) -> np.int32:
        """The first granule of a local replica."""
        if self.ownership is None:
            return np.int32(0)
        return np.int32(self.ownership.first(self.reducer.local[i].index))

    def shard(self, i: int, k: int, x: jax.Array, first: Any) -> jax.Array:
        """A local replica's shard of a whole array.

        Args:
            first: The replica's first granule, perhaps traced.
        """
        return x if self.zero is None else self.zero.take(k, x, self.reducer.local[i].index, first)

    def put(self, i: int, k: int, host: np.ndarray) -> jax.Array:
        """Place a local replica's shard of an array that is whole in host memory."""
        shard, replica = self.specs.padding.leaves()[k].pad(host), self.reducer.local[i]
        if self.zero is not None:
            shard = self.zero.take_on_host(k, shard, replica.index)
        return replica.put(shard, self.shard_specs[k])

    def jit(self, i: int, function: Callable[..., Any], specs: PyTree) -> Any:
        """`jax.jit` of a function whose results have PartitionSpecs on a local replica."""
        replica, is_spec = self.reducer.local[i], lambda s: isinstance(s, P)
        shardings = jax.tree.map(replica.sharding, specs, is_leaf=is_spec)
        # At most one sharded array may be whole at a time.
        options = update_options(self.reducer.local[0].devices[0].platform, self.sums)
        return jax.jit(function, out_shardings=shardings, compiler_options=options)

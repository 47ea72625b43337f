"""Several devices of a stage: where their arrays lie in a program that is manual over stages only.

XLA cuts what these devices compute, so everything that must lie somewhere is constrained: what
enters and leaves a loop, for propagation alone would be free to move it, and what crosses a
boundary, which is whole on each of them.

Legend of shape suffixes: N devices of a stage, T tensors.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._core._errors import PlanError
from .._core._types import PyTree
from .._jax._cpu_dots import row_major
from .._plan._layout import names_of
from .._plan._sharding import place_in
from ._contribution import largest, peak_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside:
    """The mesh axes inside a stage.

    Attributes:
        mesh: Of the pipeline; its first axis is that of the stages.
        axes: Names of the others; none where a stage has one device.
        on_cpu: Whether arrays are laid out as a CPU likes them.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    on_cpu: bool

    def place(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Constrain the arrays of one stage; `specs` are those over all stages."""
        if not self.axes:
            return tree
        return jax.tree.map(lambda x, s: place_in(self.mesh, x, P(*s[1:])), tree, specs)

    def whole(self, arrays: Sequence[Any]) -> list[Any]:
        """Constrain arrays to be the same on every device of a stage."""
        if not self.axes:
            return list(arrays)
        return [
            x
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else place_in(self.mesh, jnp.asarray(x), P())
            for x in arrays
        ]

    def raise_peaks(
        self,
        peaks_NT: jax.Array,
        tensors: Sequence[int],
        values: Sequence[jax.Array],
        specs: Sequence[P],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Largest magnitudes that each device saw in its own pieces: nothing is communicated.

        Args:
            peaks_NT: Bit patterns of those so far.
            tensors: Columns of `peaks_NT`.
            values: Arrays of these tensors.
            specs: How they lie, over all stages.

        Returns:
            The new peaks, and the values as sums read them fast.
        """
        if not values:
            return peaks_NT, []

        def run(
            peaks_NT: jax.Array, values: Sequence[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            peaks_T = peaks_NT[0]
            values = [row_major(x) if self.on_cpu else x for x in values]
            for tensor, x in zip(tensors, values, strict=True):
                peaks_T = peaks_T.at[tensor].max(peak_bits(largest(x)))
            return peaks_T[None], values

        if not self.axes:
            return run(peaks_NT, values)
        own = [P(*s[1:]) for s in specs]
        mapped = jax.shard_map(
            run,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(P(self.axes), own),
            out_specs=(P(self.axes), own),
            axis_names=frozenset(self.axes),
            check_vma=False,
        )
        return mapped(peaks_NT, values)  # type: ignore[no-any-return]

    def largest(self, peaks_NT: jax.Array) -> jax.Array:
        """Over all devices of a stage; inside a `shard_map` over every axis."""
        [peaks_T] = peaks_NT
        return jax.lax.pmax(peaks_T, self.axes) if self.axes else peaks_T


def map_specs(run: Callable[[P], Any], specs: PyTree) -> PyTree:
    """`run` of every PartitionSpec of a tree."""
    return jax.tree.map(run, specs, is_leaf=lambda s: isinstance(s, P))


def only(spec: P, names: Collection[str]) -> P:
    """What a spec says of these mesh axes."""
    return P(*(tuple(n for n in names_of(part) if n in names) or None for part in spec))


def check_permutes(text: str, per_stage: int) -> None:
    """Refuse a compiled program in which only some stages would come to a collective-permute.

    All devices of a program take part in one, but an action runs on its own stage only. All other
    collectives inside a stage wait for its own devices.

    Args:
        text: Of the compiled ticks.
        per_stage: Devices of a stage; those of one stage have consecutive numbers.

    Raises:
        PlanError: If there is one between devices of the same stage.
    """
    for pairs in re.findall(r"collective-permute.*?source_target_pairs=\{(\{.*?\})\}", text):
        for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs):
            if a != b and int(a) // per_stage == int(b) // per_stage:
                raise PlanError(
                    f"XLA moves arrays between devices {a} and {b} of one stage by a "
                    "collective-permute, for which all stages would have to wait: cut other "
                    "dimensions (rules, or hxla.split around less), or use stages of one device"
                )

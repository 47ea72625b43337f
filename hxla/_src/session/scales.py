"""The scales of exact sums and of the loss, on the devices of every local replica."""

from collections.abc import Sequence

import jax
import numpy as np

from ..lower import exact
from ..lower.contribution import DeviceSums, peaks_to_maxima
from ..lower.decisions import Decisions, Told
from ..lower.lower import Programs
from ..lower.store import Store
from ..model.loss_scale import ScaleState, sum_exponent
from ..plan.precision import MOST_SCALE_EXPONENT


class Scales:
    """The scales with which the next microbatches join the sums.

    The store has their values, as int32[T] exponents of T tensors. Here they are placed on devices,
    so that a step sends none.

    Attributes:
        settles: Whether a step is run again until its scales are its own.
    """

    def __init__(self, programs: Programs, store: Store):
        self._programs, self._store, self._reducer = programs, store, programs.reducer
        self._num_params = len(programs.tensors.params)
        self._placed: list[tuple[jax.Array, ...] | None] = [None] * len(self._reducer.local)
        self.settles = False

    def exponents(self, i: int) -> jax.Array:
        """Exponents of a replica's microbatches: of gradients of the loss, which may be scaled."""
        return self.on(i)[0]

    def on(self, i: int) -> tuple[jax.Array, ...]:
        """`exponents`, and if the loss is scaled the exponent of its gradients, int32[1]."""
        placed = self._placed[i]
        if placed is None:
            exponents, scale = self._store.exponents, self._store.loss_scale
            put = self._reducer.local[i].put
            if scale is None:
                placed = (put(exponents),)
            else:
                exponent = self._sum_exponent(scale)
                used = exponents - self._param_exponents(exponent)
                placed = put(used), put(np.array([exponent], np.int32))
            self._placed[i] = placed
        return placed

    def replace(self, exponents: np.ndarray) -> None:
        """Scale the next microbatches by other exponents."""
        self._store.exponents = exponents
        self._placed = [None] * len(self._placed)

    def fit(self, sums: Sequence[DeviceSums | None]) -> None:
        """Take scales that fit the sums of all processes; every process calls this."""
        peaks_T = np.max([np.asarray(s.peaks_T) for s in sums if s is not None], axis=0)
        all_peaks = np.zeros((jax.process_count(), len(peaks_T)), np.int32)
        all_peaks[jax.process_index()] = peaks_T
        maxima = self._unscaled(peaks_to_maxima(self._reducer.host.exchange(all_peaks)))
        finite = np.where(np.isfinite(maxima), maxima, 0)
        limbs = self._programs.contribution.limbs
        self.replace(exact.next_exponents(self._store.exponents, finite, limbs))

    def summed(self, told: Told, decisions: Sequence[Decisions]) -> None:
        """Take the scales that follow from a sum, which are on the devices already."""
        self._store.exponents = told.next_T
        pairs = zip(decisions, map(self.on, range(len(decisions))), strict=True)
        self._placed = [(decided.next_used_T, *scales[1:]) for decided, scales in pairs]

    def restored(self) -> None:
        """Take over the scales of a state that was loaded into the store."""
        self.replace(self._store.exponents)
        self.settles = False

    def rescale(self, *, overflowed: bool) -> None:
        """Halve, double or keep the loss scale after a step."""
        before, policy = self._store.loss_scale, self._programs.plan.precision.loss_scale
        if before is None or policy is None:
            return
        after = before.after(
            overflowed=overflowed, growth_steps=policy.growth_steps, most=MOST_SCALE_EXPONENT
        )
        self._store.rescale(after)
        if after.exponent != before.exponent:
            self._placed = [None] * len(self._placed)

    def _param_exponents(self, exponent: int) -> np.ndarray:
        """int32[T]: the exponent for gradients, 0 for changes of other variables."""
        is_param = np.arange(len(self._store.exponents)) < self._num_params
        return np.where(is_param, exponent, 0).astype(np.int32)

    def _unscaled(self, maxima: np.ndarray) -> np.ndarray:
        """Maxima of gradients from those of a scaled loss."""
        scale = self._store.loss_scale
        if scale is None:
            return maxima
        return np.ldexp(maxima, -self._param_exponents(self._sum_exponent(scale)))

    def _sum_exponent(self, scale: ScaleState) -> int:
        """The exponent of the scale of a microbatch's sum of losses and of its gradient."""
        return sum_exponent(scale.exponent, self._programs.graph.num_losses)

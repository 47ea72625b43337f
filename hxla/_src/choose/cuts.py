"""Cuts of a chain into stages that suit pipelines of any kinds: dynamic programmes."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .chain import Array, Tables


class Cutter:
    """Cuts of a chain, every boundary crossed at the speed of the fastest pair of kinds."""

    def __init__(self, t: Tables):
        self._t = t
        kinds, size = t.num_kinds, t.num_layers + 1
        # A kind of one device has no second one that it could send to.
        pairs = ~np.eye(kinds, dtype=bool) | (np.array(t.num_devices) > 1)[:, None]
        pairs &= np.outer(t.num_devices, t.num_devices) > 0
        cross = np.zeros(size)
        if pairs.any():
            cross = t.cross[:, :kinds, :kinds][:, pairs].min(axis=1)
        after = np.triu(np.ones((size, size), bool), 1)
        # [K, L+1, L+1] Seconds of a stage by its layers, with what it sends (inf: empty), and with
        # what it receives (0: empty).
        self._cost = np.where(after, t.seconds + cross, np.inf)
        self._period = np.where(after, self._cost + cross[:, None], 0.0)

    def fitting(self, max_stages: int, num_microbatches: int) -> list[bool]:
        """Whether a pipeline of one stage, of two, and so on, fits memory on any of the kinds."""

        def score(position: int) -> Array:
            fits = self._t.fits(min(position, num_microbatches))
            return np.where(fits, self._cost, np.inf).min(axis=0)

        return [bool(np.isfinite(rest[0])) for rest, _ in _suffixes(max_stages, score, np.add)]

    def pure_periods(self, max_stages: int) -> Array:
        """[K, max_stages] The least period of a pipeline of one kind (inf: it does not fit)."""
        periods = np.where(np.isfinite(self._cost), self._period, np.inf)

        def of_kind(k: int) -> list[float]:
            def score(position: int) -> Array:
                return np.where(self._t.fits(position)[k], periods[k], np.inf)

            return [float(rest[0]) for rest, _ in _suffixes(max_stages, score, np.maximum)]

        return np.array([of_kind(k) for k in range(self._t.num_kinds)])

    def even(self, num_stages: int, periods: Array) -> tuple[int, ...] | None:
        """The best cut for all kinds that can run whole pipelines of so many stages.

        It minimises the largest ratio of a stage's period to the least period of its kind.

        Args:
            periods: [K] Least period of each kind (inf: it cannot run whole pipelines).
        """
        kinds = [k for k in range(self._t.num_kinds) if np.isfinite(periods[k])]
        if not kinds:
            return None
        ratio = (self._period[kinds] / periods[kinds][:, None, None]).max(axis=0)

        def score(position: int) -> Array:
            ok = (self._t.fits(position)[kinds] & np.isfinite(self._cost[kinds])).all(axis=0)
            return np.where(ok, ratio, np.inf)

        return best_cut(num_stages, score, np.maximum)

    def mixed(
        self, num_stages: int, prices: Sequence[float], period: float, limit: float
    ) -> tuple[int, ...] | None:
        """The cut with the least fill / period + prices of kinds, of periods up to a limit."""
        price = np.array(prices)[:, None, None]
        allowed = np.where(self._period <= limit, self._cost / period + price, np.inf)

        def score(position: int) -> Array:
            return np.where(self._t.fits(position), allowed, np.inf).min(axis=0)

        return best_cut(num_stages, score, np.add)


def _suffixes(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> Iterator[tuple[Array, Array]]:
    """The least score of the last stages by their first layer: a dynamic programme.

    Args:
        score: Position from the end to [L+1, L+1], the score of a stage by its layers.
        combine: Joins the scores of stages: `np.add` or `np.maximum`.

    Yields:
        For one stage, for two, and so on: [L+1] by first layer the score, and the stage's end.
    """
    rest: Array | None = None
    for position in range(1, num_stages + 1):
        stage_scores = score(position)
        if rest is None:
            rest = np.full(len(stage_scores), np.inf)
            rest[-1] = 0.0
        total = combine(stage_scores, rest[None, :])
        rest = total.min(axis=1)
        yield rest, total.argmin(axis=1)


def best_cut(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> tuple[int, ...] | None:
    """The first layers of the stages of the least score; None: there is none.

    Args:
        score: Position from the end to [L+1, L+1], the score of a stage by its layers.
        combine: Joins the scores of stages: `np.add` or `np.maximum`.
    """
    by_stages = list(_suffixes(num_stages, score, combine))
    rest, _ = by_stages[-1]
    if not np.isfinite(rest[0]):
        return None
    cuts = [0]
    for _, after in reversed(by_stages[1:]):
        cuts.append(int(after[cuts[-1]]))
    return tuple(cuts)


def neighbours(cuts: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    """Cuts with neighbouring boundaries shifted by a layer: few of them before many."""
    for num in range(1, len(cuts)):
        for first in range(1, len(cuts) - num + 1):
            for step in (-1, 1):
                moved = (c + step * (first <= i < first + num) for i, c in enumerate(cuts))
                new = tuple(moved)
                if all(a < b for a, b in itertools.pairwise((*new, num_layers))):
                    yield new

"""The tail of a plan: the reduction and the update of its largest stage, after all microbatches."""

import dataclasses
import functools

import numpy as np

from .chain import Array, Tables
from .relaxation import subsets, suffixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tails:
    """The least tails of plans, by number of stages and of replicas.

    Attributes:
        max_stages: The most stages of a plan.
        num_copies: The fewest replicas of a plan with several.
        least: The least tail of plans with several replicas.

    Values that `dataclasses.replace` makes share what is known by number of replicas.
    """

    t: Tables
    max_stages: int
    num_copies: int = 2
    least: float = 0.0
    _known: dict[int, tuple[Array, list[float]]] = dataclasses.field(default_factory=dict)

    def by_kinds(
        self, num_stages: int, cuts: tuple[int, ...] | None = None
    ) -> list[tuple[tuple[int, ...], float, float]]:
        """Sets of kinds, with the least reduction plus update: of several replicas, and of one.

        Args:
            cuts: First layer of each stage; None: any.
        """
        t = self.t
        meeting = t.meeting if num_stages > 1 else 0.0  # of a single replica
        if num_stages == 1:
            cuts = (0,)
        if cuts is not None:
            ends = (*cuts[1:], t.num_layers)
            cases, reduce = [], t.least_reduce(self.num_copies)
            for kinds in subsets(t.num_kinds):
                # Each kind has some stage, and each stage some kind.
                least = []
                for table in (reduce, t.update):
                    rows = np.array([[table[k, a, b] for a, b in zip(cuts, ends, strict=True)]
                                    for k in kinds])  # fmt: skip
                    least.append(
                        max(
                            float(rows.min(axis=1).max()),
                            float(rows.min(axis=0).max()),
                        )
                    )
                several = max(least[0], t.meeting) + least[1]
                cases.append((kinds, max(self.least, several), meeting + least[1]))
            return cases
        update = meeting + max(self._least_update[0], self._least_update[1] / num_stages)
        several = max(self.least, self.of_copies(self.num_copies)[1][num_stages - 1], update)
        return [(tuple(range(t.num_kinds)), several, update)]

    @functools.cached_property
    def _least_update(self) -> tuple[float, float]:
        """The least seconds of the largest layer's update, and of all layers'."""
        layers = np.arange(self.t.num_layers)
        update = self.t.update[:, layers, layers + 1].min(axis=0)
        return float(update.max()), float(update.sum())

    def of_stages(self, num_stages: int) -> tuple[float, float]:
        """The least reduction plus update for so many stages: of several replicas, and of one."""
        cases = self.by_kinds(num_stages)
        return min(several for _, several, _ in cases), min(single for *_, single in cases)

    @property
    def of_all(self) -> float:
        """The least tail of one replica with any number of stages."""
        return min(self.of_stages(1)[1], self.of_stages(self.max_stages)[1])

    def of_copies(self, copies: int) -> tuple[Array, list[float]]:
        """Tails of at least `copies` replicas: [K, L+1, L+1] per stage, and the least of a plan.

        The latter by number of stages, from one.
        """
        if copies not in self._known:
            tail = self.t.least_reduce(copies) + self.t.update
            best = tail.min(axis=0)
            best = np.where(np.triu(np.ones(best.shape, bool), 1), best, np.inf)
            by_stages = suffixes(self.max_stages, lambda _: best, np.maximum)
            self._known[copies] = tail, [float(rest[0]) for rest, _ in by_stages]
        return self._known[copies]

"""What the pipelines that a cell has met run where they are packed together, and what differs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ._chain_tables import Array, Tables
from ._column_prices import ColumnPrices
from ._node_packing import NodePacking
from ._run_cells import RunCell, RunColumn, told_by_starts, told_by_wholes

_SHORT_STEP = 0.15  # where too few were met to run the global batch
_WHOLE_STEP = 0.7  # where microbatches are whole
_STEP = 0.5  # to the prices of a packing, from the best that were met


class CellPacking:
    """Pipelines of cells in nodes.

    Args:
        t: Of the chain.
        num_microbatches: Of a global batch.
        seconds: No plan that takes as long is asked about.
    """

    def __init__(self, t: Tables, num_microbatches: int, seconds: float):
        self._t, self._num_microbatches, self._seconds = t, num_microbatches, seconds
        self._nodes: dict[int, NodePacking] = {}

    def nodes(self, copies: int) -> NodePacking:
        """That hold runs of so many copies or more."""
        if copies not in self._nodes:
            t = self._t
            sizes = t.num_devices, t.num_nodes, t.copies_inside
            self._nodes[copies] = NodePacking(*sizes, copies)
        return self._nodes[copies]

    def most_copies(self, copies: tuple[int, int], num: int) -> int:
        """Of so many stages, if there are no more than the second."""
        return min(copies[1], sum(self._t.num_devices) // num)

    def prices(
        self, cell: RunCell, columns: Sequence[RunColumn], known: float
    ) -> tuple[Array, float]:
        """Prices on the way to those of a packing of some pipelines, and the time that it takes.

        Args:
            cell: Theirs; its own prices are the best so far.
            columns: The pipelines; those of other forms are let go.
            known: Seconds of a packing of fewer.
        """
        columns = cell.of_forms(columns)
        if not columns:
            return cell.prices, self._seconds
        priced = self._priced(cell, columns)
        tail, last = cell.tail[0], self._seconds - cell.tail[0]
        if cell.is_integral:
            prices, seconds = priced.integral(cell.floor - tail, min(known - tail, last))
            step = _WHOLE_STEP
        else:
            prices, seconds = priced.fractional(min(known - tail, last), last)
            step = _STEP if seconds < last else _SHORT_STEP
        return step * prices + (1 - step) * cell.prices, seconds + tail

    def lack(self, cell: RunCell, seconds: float) -> float:
        """Microbatches of the global batch that its pipelines do not run in a time."""
        columns = cell.of_forms(cell.suiting)
        if not columns:
            return float(self._num_microbatches)
        return float(self._num_microbatches - self._run(cell, columns, seconds).sum())

    def told(self, cell: RunCell) -> list[list[RunCell]]:
        """Halves of a cell by what all copies of a plan have alike and pipelines that pack do not.

        They are of one cut, and a stage of which a node has all copies is one of each of them.
        """
        columns = cell.of_forms(cell.columns)
        if not columns or len(cell.nums) > 1:
            return []
        weights = self._run(cell, columns, cell.floor)
        cut, stage = told_by_starts(columns, weights), told_by_wholes(columns, weights)
        options = []
        if cut is not None:
            num, middle = cut
            low, high = cell.windows.get(num, (cell.nums[0] - num, self._t.num_layers + 1 - num))
            windows = [{**cell.windows, num: x} for x in ((low, middle), (middle, high))]
            options.append([dataclasses.replace(cell, windows=x) for x in windows])
        if stage is not None:
            wholes = [{**cell.wholes, stage: is_whole} for is_whole in (True, False)]
            options.append([dataclasses.replace(cell, wholes=x) for x in wholes])
        return options

    def _run(self, cell: RunCell, columns: Sequence[RunColumn], seconds: float) -> Array:
        """[C] Microbatches of each pipeline in a time."""
        return self._priced(cell, columns).microbatches(
            seconds - cell.tail[0], is_integral=cell.is_integral
        )

    def _priced(self, cell: RunCell, columns: Sequence[RunColumn]) -> ColumnPrices:
        nodes, rings = self.nodes(cell.copies[0]), self._t.card_sums
        runs = [[(r.kind, r.sort, float(rings[r.layers])) for r in x.runs] for x in columns]
        return ColumnPrices(
            packing=nodes,
            used=np.array([nodes.used(own) for own in runs]),
            fill=np.array([x.fill for x in columns]),
            period=np.array([x.period for x in columns]),
            most=self.most_copies(cell.copies, cell.nums[0]),
            wanted=self._num_microbatches,
            card_seconds=cell.tail[1],
        )

"""A run's pipelines in time: what they should take, and what a step of them took."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax

from .._core._types import PyTree
from .._plan._plan import Plan
from .._report import _pipeline_report
from . import _strategy
from ._step import Engine
from ._strategy import Strategy

_REPEATS = 11  # a throttled process runs and rests in turns


class Pipelines:
    """Nothing at all in a run without stages.

    Args:
        engine: Runs them.
        strategy: Of the run.
        gather: Name and text to the texts of all processes.
    """

    def __init__(
        self, engine: Engine, strategy: Strategy, gather: Callable[[str, str], tuple[str, ...]]
    ):
        self._engine = engine
        self._strategy = strategy
        self._gather = gather
        self._predicted: dict[int, _pipeline_report.Predicted] = {}
        self._ticks: dict[int, list[list[tuple[float, float]]]] = {}

    def measure(self, batch: PyTree, counts: Sequence[int]) -> tuple[str, ...]:
        """Predict each pipeline's step from the measured times of its pieces; says what it found.

        Stages that share a process's cores would measure one another: there nothing is predicted.
        """
        stages = self._strategy.stages
        if stages is None or _strategy.stages_share_cores(self._strategy.replicas):
            return ()
        own = self._engine.measure_pipelines(batch, repeats=_REPEATS)
        texts = self._gather("pipeline times", _pipeline_report.to_text(own))
        some = next(iter(self._engine.pipelines.values()))
        lines = []
        for replica, measured in sorted(_pipeline_report.from_texts(texts).items()):
            predicted = _pipeline_report.predict(some, measured, counts[replica], stages.fractions)
            self._predicted[replica] = predicted
            lines.append(_pipeline_report.explain(replica, predicted, measured))
        return tuple(lines)

    def planned(self, plan: Plan) -> Plan:
        """The plan with the predicted step and its bound, where there are any.

        Of a pipeline, a microbatch's share of the step is not what one more would take.
        """
        if not self._predicted:
            return plan
        fixed = plan.fixed_seconds or (0.0,) * len(plan.counts)
        steps = [p.busy_seconds + fixed[r] for r, p in self._predicted.items()]
        bounds = [p.bound_seconds for p in self._predicted.values()]
        return dataclasses.replace(plan, step_seconds=max(steps), bound_seconds=max(bounds))

    def time_ticks(self, on: bool) -> None:
        """Whether the next step's ticks are timed one by one; its results are the same."""
        for pipeline in self._engine.pipelines.values():
            pipeline.timed = on and bool(self._predicted)

    def tell_ticks(self) -> None:
        """Every process learns the times of the ticks of the step that was timed."""
        if not self._predicted:
            return
        replicas = {r.index: r for r in self._strategy.replicas}
        own = {
            replica: [stage, pipeline.times]
            for replica, pipeline in self._engine.pipelines.items()
            for stage, devices in enumerate(replicas[replica].rows)
            if any(d.process_index == jax.process_index() for d in devices)
        }
        for text in self._gather("ticks", json.dumps(own)):
            for replica, (stage, times) in json.loads(text).items():
                num = len(replicas[int(replica)].rows)
                rows = self._ticks.setdefault(int(replica), [[] for _ in range(num)])
                # Clocks differ between hosts: each counts from its own first tick.
                rows[stage] = [(a - times[0][0], b - times[0][0]) for a, b in times]

    def draw(
        self, folder: pathlib.Path, names: Mapping[int, Sequence[str]]
    ) -> dict[str, pathlib.Path]:
        """Pictures of the planned and the measured steps, by heading."""
        return _pipeline_report.write(folder, self._predicted, self._ticks, names)

"""A session's pipelines in time: what they should take, and what a step of them took."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from .._jax._local_clients import is_here, share_cores
from .._lower._lower import Programs
from .._plan._plan import Plan
from .._plan._plan_parts import Prediction
from .._report import _pipeline_report
from ._step import Stepper

_REPEATS = 11  # a throttled process runs and rests in turns


class PipelineWatch:
    """Nothing at all in a session without stages.

    Args:
        stepper: Runs the pipelines.
        programs: Those that it runs.
        gather: Name and text to the texts of all processes.
    """

    def __init__(
        self,
        stepper: Stepper,
        programs: Programs,
        gather: Callable[[str, str], tuple[str, ...]],
    ):
        self._stepper = stepper
        self._pipelines = programs.pipelines
        self._replicas = programs.reducer.replicas
        self._starts = [replica.start_seconds for replica in programs.plan.replicas]
        self._gather = gather
        self._predicted: dict[int, _pipeline_report.PredictedStep] = {}
        self._ticks: dict[int, list[list[tuple[float, float]]]] = {}

    def measure(self, batch: Any, plan: Plan) -> tuple[str, ...]:
        """Predict each pipeline's step from the measured times of its pieces; says what it found.

        Stages that share a process's cores would measure one another: there nothing is predicted.
        """
        if plan.pipeline is None or share_cores(d for r in self._replicas for d in r.devices):
            return ()
        own = self._stepper.measure_pipelines(batch, repeats=_REPEATS)
        texts = self._gather("pipeline times", _pipeline_report.to_text(own))
        some = next(iter(self._pipelines.values()))
        fractions = plan.prediction.stage_fractions if plan.prediction is not None else ()
        lines = []
        for replica, times in sorted(_pipeline_report.from_texts(texts).items()):
            if not plan.counts[replica]:
                continue  # it has no step
            found = _pipeline_report.predict(some, times, plan.counts[replica], fractions)
            if found.has_times:
                self._predicted[replica] = found
            lines.append(_pipeline_report.explain(replica, found, times))
        return tuple(lines)

    def predicted(self, prediction: Prediction) -> Prediction:
        """With the step of the pipelines and its bound, where they were measured.

        Of a pipeline, a microbatch's share of the step is not what one more would take.
        """
        if not self._predicted:
            return prediction
        fixed = prediction.fixed_seconds or (0.0,) * len(self._replicas)
        steps = [self._starts[r] + p.busy_seconds + fixed[r] for r, p in self._predicted.items()]
        bounds = [p.bound_seconds for p in self._predicted.values()]
        return prediction.model_copy(
            update={"step_seconds": max(steps), "bound_seconds": max(bounds)}
        )

    def time_ticks(self, on: bool) -> None:
        """Whether the next step's ticks are timed one by one; its results are the same."""
        for pipeline in self._pipelines.values():
            pipeline.timed = on and bool(self._predicted)

    def tell_ticks(self) -> None:
        """Every process learns the times of the ticks of the step that was timed."""
        if not self._predicted:
            return
        own = {
            replica: [stage, pipeline.times]
            for replica, pipeline in self._pipelines.items()
            for stage, devices in enumerate(self._replicas[replica].rows)
            if any(is_here(d) for d in devices)
        }
        for text in self._gather("ticks", json.dumps(own)):
            for replica, (stage, times) in json.loads(text).items():
                num = len(self._replicas[int(replica)].rows)
                rows = self._ticks.setdefault(int(replica), [[] for _ in range(num)])
                # Clocks differ between hosts: each counts from its own first tick.
                rows[stage] = [(a - times[0][0], b - times[0][0]) for a, b in times]

    def draw(self, folder: pathlib.Path, plan: Plan) -> dict[str, pathlib.Path]:
        """Pictures of the planned and the measured steps, by heading."""
        names = dict(enumerate(plan.stage_names))
        return _pipeline_report.write(folder, self._predicted, self._ticks, names)

"""Ready callbacks that follow a metric of the evaluation: the best weights, and an early stop."""

import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax

from ..core.errors import ConfigError, WeightsError
from ..core.files import did_you_mean, local_path, set_aside
from ..core.keywords import check_whole_numbers
from ..jax.coordination import gather
from ..report.history import EvalRecord, scalars
from ..weights.name_map import SAME
from ..weights.safetensors import read_metadata
from ..weights.save_weights import save_file
from .callbacks import Callback
from .session import Session

Mode = Literal["max", "min"]

_FILE = "model.safetensors"
_TIMEOUT_SECONDS = 600.0


def keep_best(
    metric: str,
    *,
    mode: Literal["max", "min"] = "max",
    folder: str | os.PathLike[str] | None = None,
) -> Callback:
    """Keep the weights of the best evaluation: a callback of `hxla.train`.

    After an evaluation that is better than all before, `session.weights` are written to
    `folder/model.safetensors`, with `metric`, `value` and `step` in the file's metadata.
    `hxla.load_weights(folder, ...)` and `hxla.Job(..., weights=folder)` read it. A resumed run goes
    on from the best so far. A run that does not resume renames an earlier run's folder to
    `folder.1`. A line at the end says which step was the best.

    Args:
        metric: `loss`, or the name of a metric that the evaluation returns as one number.
        mode: Whether the largest (`max`) or the smallest (`min`) value is the best. A value that is
            not finite is never the best.
        folder: The folder to write to, which every process must see; None: `best` in `run_dir`,
            or else in `checkpoint_dir`.

    Returns:
        The callback.

    Raises:
        ConfigError: If `mode` is another word. Training raises it if there is no folder or no
            `eval_data`, or if the evaluation does not return the metric.

    Example:
        >>> import hxla, jax.numpy as jnp, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     error = model(batch["x"])[:, 0] - batch["y"]
        ...     return error**2, {"near": (abs(error) < 1).mean()}
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> best = hxla.keep_best("near", folder="best")
        >>> result = hxla.train(job, steps=4, eval_data=data, eval_every=2, callbacks=[best])
        >>> weights = hxla.load_weights("best", nnx.state(model))
        >>> weights["kernel"].shape
        (8, 1)
    """
    return KeepBest(metric, mode, folder)


def stop_early(
    metric: str,
    *,
    patience: int = 3,
    mode: Literal["max", "min"] = "min",
    min_delta: float = 0.0,
) -> Callback:
    """End training when evaluations no longer improve: a callback of `hxla.train`.

    Training ends after one more step. The count of evaluations is saved with checkpoints, so a
    resumed run ends at the same step; a run that has ended so is not resumed.

    Args:
        metric: `loss`, or the name of a metric that the evaluation returns as one number.
        patience: The number of evaluations in a row without an improvement that end training.
        mode: Whether smaller (`min`) or larger (`max`) values are better.
        min_delta: The least change that is an improvement, at least 0.

    Returns:
        The callback.

    Raises:
        ConfigError: If an argument is out of range. Training raises it if there is no `eval_data`,
            or if the evaluation does not return the metric.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.0), batch_size=8)
        >>> stop = hxla.stop_early("loss", patience=2)
        >>> result = hxla.train(job, steps=99, eval_data=data, eval_every=1, callbacks=[stop])
        >>> result.step
        4
    """
    return StopEarly(metric, patience, mode, min_delta)


class _Monitored:
    """A metric of the evaluation and which of its values are better."""

    def __init__(self, name: str, metric: str, mode: Mode):
        if mode not in ("max", "min"):
            raise ConfigError(f"{name}({metric!r}, mode={mode!r}): use 'max' or 'min'")
        self.name, self.metric, self.mode = f"{name}({metric!r})", metric, mode
        self._are_alike = False

    def of(self, record: EvalRecord) -> float:
        """The value of an evaluation."""
        values = {"loss": record.loss, **scalars(record.metrics)}
        if self.metric in values:
            return values[self.metric]
        if self.metric in record.metrics:
            raise ConfigError(f"{self.name}: this metric has a number for each example, not one")
        raise self._unknown(values)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a training without evaluations; note whether they return what steps return."""
        data, job = arguments["eval_data"], arguments["job"]
        if data is None:
            raise ConfigError(f"{self.name} needs eval_data")
        # A loss may return more for a batch that has more.
        are_known = isinstance(data, Mapping) and isinstance(job.data, Mapping)
        has_same_examples = are_known and set(data) == set(job.data)
        self._are_alike = has_same_examples and job.eval_loss is None

    def start(self, session: Session) -> None:
        """Refuse a metric that evaluations will not return."""
        if self._are_alike and self.metric not in session.metric_names:
            raise self._unknown(session.metric_names)

    def _unknown(self, names: Collection[str]) -> ConfigError:
        hint = did_you_mean(self.metric, names)
        return ConfigError(f"{self.name}: the evaluation returns {', '.join(names)}{hint}")

    def is_better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Whether a value is better than the best so far by more than a difference."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return value - best > min_delta if self.mode == "max" else best - value > min_delta


class KeepBest(Callback):
    """See `keep_best`."""

    def __init__(self, metric: str, mode: Mode, folder: str | os.PathLike[str] | None):
        self._monitored = _Monitored("keep_best", metric, mode)
        self.name = self._monitored.name
        self._folder = None if folder is None else local_path(folder, "folder", ConfigError)
        self._path = pathlib.Path()
        self._best: tuple[float, int] | None = None  # value and step

    def on_check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a training without a folder, or with another that writes to it."""
        self._monitored.check(arguments)
        folders = arguments["run_dir"], arguments["checkpoint_dir"]
        for other in arguments["callbacks"]:
            if other is self:
                break
            if isinstance(other, KeepBest) and self.folder(*folders) == other.folder(*folders):
                raise ConfigError(
                    f"{self.name} and {other.name} write to the same folder, "
                    f"{self.folder(*folders)}: pass folder= to one"
                )
        self.folder(*folders)

    def on_start(self, session: Session) -> None:
        """Take up the best of the run that is resumed, or rename that of an earlier run."""
        self._monitored.start(session)
        folder = self.folder(session.run_dir, session.checkpoint_dir)
        self._path, kept = folder / _FILE, dict[str, str]()
        if jax.process_index() == 0 and self._path.exists():
            try:
                if session.step_number:
                    kept = read_metadata(self._path)
                else:
                    aside = set_aside(folder)
                    session.log(f"the best weights of an earlier run are now in {aside}")
            except (WeightsError, OSError) as error:
                kept = {"metric": str(error)}  # every process has to refuse it
        texts = gather("best so far", json.dumps(kept), timeout_seconds=_TIMEOUT_SECONDS)
        kept = json.loads(texts[0])
        if kept and kept.get("metric") != self._monitored.metric:
            raise ConfigError(
                f"{self.name}: {self._path} was kept by another metric ({kept.get('metric')}); "
                "pass another folder"
            )
        self._best = (float(kept["value"]), int(kept["step"])) if kept else None

    def folder(self, run_dir: Any, checkpoint_dir: Any) -> pathlib.Path:
        """The absolute folder for the weights.

        Raises:
            ConfigError: If there is none.
        """
        if self._folder is not None:
            return self._folder.absolute()
        for inside in (run_dir, checkpoint_dir):
            if inside is not None:
                return local_path(inside, "folder", ConfigError).absolute() / "best"
        raise ConfigError(f"{self.name} needs a folder: pass folder=, run_dir or checkpoint_dir")

    def on_evaluation(self, record: EvalRecord, session: Session) -> None:
        """Write the weights if they are better than all before."""
        value = self._monitored.of(record)
        if self._monitored.is_better(value, self._best[0] if self._best else None):
            self._best = value, record.step
            kept = {"metric": self._monitored.metric, "value": repr(value)}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self._path, session.weights, SAME, kept | {"step": str(record.step)})

    def on_end(self, session: Session) -> None:
        """Say which step was the best."""
        if self._best is None:
            session.log(f"{self.name}: no evaluation was finite, so no weights are kept")
        else:
            value, step = self._best
            session.log(f"best {self._monitored.metric} {value:.6g} at step {step}: {self._path}")


class StopEarly(Callback):
    """See `stop_early`."""

    def __init__(self, metric: str, patience: int, mode: Mode, min_delta: float):
        self._monitored = _Monitored("stop_early", metric, mode)
        self.name = self._monitored.name
        check_whole_numbers(1, patience=patience)
        if not min_delta >= 0:
            raise ConfigError(f"{self.name}: min_delta={min_delta} must be at least 0")
        self._patience, self._min_delta = patience, min_delta
        self._key = f"stop_early {mode} {metric}"

    def _state(self, session: Session) -> dict[str, Any]:
        """The best value, its step, and the evaluations since then, saved with checkpoints."""
        return session.metadata.get(self._key, {"best": None, "step": None, "waited": 0})

    def on_check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a training without evaluations."""
        self._monitored.check(arguments)

    def on_start(self, session: Session) -> bool:
        """Say if the resumed run has ended so before."""
        self._monitored.start(session)
        state = self._state(session)
        if state["waited"] < self._patience:
            return False
        session.log(
            f"{self.name}: the run has ended at step {session.step_number}; raise patience to go on"
        )
        return True

    def on_evaluation(self, record: EvalRecord, session: Session) -> bool:
        """Count evaluations without an improvement."""
        value, state = self._monitored.of(record), self._state(session)
        if self._monitored.is_better(value, state["best"], self._min_delta):
            state = {"best": value, "step": record.step, "waited": 0}
        else:
            state = {**state, "waited": state["waited"] + 1}
        session.metadata[self._key] = state
        if state["waited"] < self._patience:
            return False
        since = "" if state["step"] is None else f" since step {state['step']}"
        session.log(
            f"{self.name}: no improvement in {state['waited']} evaluations{since}, training ends"
        )
        return True

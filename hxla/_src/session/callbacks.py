"""Callbacks of `hxla.train`: functions, or objects with methods for what they want to see.

Ready callbacks: `log_to` writes numbers to a file, TensorBoard or another tracker; `keep_best` and
`stop_early` follow a metric of the evaluation.
"""

# ruff: noqa: ARG002 - the empty methods of Callback

import contextlib
import inspect
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ..core.errors import ConfigError, WeightsError
from ..core.files import did_you_mean, local_path, nearest, set_aside
from ..core.keywords import check_whole_numbers
from ..jax.coordination import gather
from ..report.history import EvalRecord, StepRecord, named_scalars, scalars
from ..weights.name_map import SAME
from ..weights.safetensors import read_metadata
from ..weights.weights import save_file
from .session import Session


class Callback:
    """An object that sees a training: any of these methods is enough, and no base is needed.

    `hxla.train` calls the methods on every process, in the order of `callbacks`. What processes do
    together, such as `session.gather`, every process must do. Inheriting from `Callback` adds empty
    methods for the rest, which satisfies type checkers.

    A plain function is a callback too, and is called as `on_step`.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> class Losses:
        ...     def __init__(self):
        ...         self.losses = []
        ...
        ...     def on_evaluation(self, record, session):
        ...         self.losses.append((record.step, record.loss))
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> seen = Losses()
        >>> result = hxla.train(job, steps=4, eval_data=data, eval_every=2, callbacks=[seen])
        >>> [step for step, _ in seen.losses]
        [2, 4]
    """

    def on_check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what cannot work: called once, before the plan is made.

        Args:
            arguments: The arguments of `hxla.train` by name, such as `arguments["eval_data"]`.

        Raises:
            ConfigError: If the training is refused.
        """

    def on_start(self, session: Session) -> bool | None:
        """Begin: called once, before the first step of this call.

        Args:
            session: The open session; `session.step_number` is above zero if it resumed.

        Returns:
            True, on every process, if nothing is left to train; else False or None.
        """
        return None

    def on_step(self, record: StepRecord, session: Session) -> bool | None:
        """See a step: called after each one and its evaluation.

        Args:
            record: The record of the step; `record.evaluation` is that of its evaluation, or None.
            session: The session after the step.

        Returns:
            True to end training after one more step; False or None to go on.
        """
        return None

    def on_evaluation(self, record: EvalRecord, session: Session) -> bool | None:
        """See an evaluation on `eval_data`: called after `on_step` of the same step.

        Args:
            record: The record of the evaluation.
            session: The session that was evaluated.

        Returns:
            True to end training after one more step; False or None to go on.
        """
        return None

    def on_save(self, step: int, session: Session) -> None:
        """See a checkpoint: called when one was begun, at the end and on SIGTERM too.

        Args:
            step: The number of updates in the checkpoint, which is also its folder's name. Its
                files are complete before the next checkpoint, and when `hxla.train` returns.
            session: The session that was saved.
        """

    def on_end(self, session: Session) -> None:
        """End: called once after the last step, also after a stop. Errors and SIGTERM skip it.

        Args:
            session: The session with the last state.
        """

    def on_close(self) -> None:
        """Close files: called at the very end if `on_start` was, after errors and SIGTERM too.

        The session is closed by then. The last callback is closed first, and all are closed even
        if one of them fails.
        """


_CALLED_AS = {
    "on_check": "(arguments)",
    "on_start": "(session)",
    "on_step": "(record, session)",
    "on_evaluation": "(record, session)",
    "on_save": "(step, session)",
    "on_end": "(session)",
    "on_close": "()",
}
HOOKS = tuple(_CALLED_AS)


class Callbacks:
    """Checked callbacks of one training.

    Raises:
        ConfigError: For a callback that cannot be called: its name, and what to write instead.
    """

    def __init__(self, callbacks: Any):
        names = [name for name in HOOKS if callable(getattr(callbacks, name, None))]
        if callable(callbacks) or names or not isinstance(callbacks, Sequence):
            raise ConfigError(
                f"callbacks={callbacks!r} is no list: pass callbacks=[{_name_of(callbacks)}]"
            )
        self._hooks: dict[str, list[tuple[str, Callable[..., Any]]]] = {n: [] for n in HOOKS}
        for number, callback in enumerate(callbacks):
            where = f"callbacks[{number}] ({_name_of(callback)})"
            for name, method in _hooks_of(callback, where):
                self._hooks[name].append((where, method))

    def checked(self, arguments: Mapping[str, Any]) -> None:
        """Let callbacks refuse the arguments of a training."""
        self._call("on_check", arguments)

    def started(self, session: Session) -> bool:
        """Begin, and see every checkpoint from now on; returns whether nothing is left to train."""
        session.after_save.append(lambda: self._call("on_save", session.step_number, session))
        is_over = self._call("on_start", session)
        session.agree({"a callback has nothing left to train": is_over})
        return is_over

    def stepped(self, record: StepRecord, session: Session) -> None:
        """See a step and its evaluation; stops the session if a callback asks for it."""
        asks = self._call("on_step", record, session)
        if record.evaluation is not None:
            asks |= self._call("on_evaluation", record.evaluation, session)
        if asks:
            session.stop()

    def ended(self, session: Session) -> None:
        """See the end."""
        self._call("on_end", session)

    def closed_by(self, stack: contextlib.ExitStack) -> None:
        """Let a stack close all, the last one first."""
        for _, method in self._hooks["on_close"]:
            stack.callback(method)

    def _call(self, hook: str, *arguments: Any) -> bool:
        """Call a method of all callbacks; returns whether one returned True.

        Raises:
            ConfigError: If one returned anything but True, False and None.
        """
        asks = False
        for where, method in self._hooks[hook]:
            answer = method(*arguments)
            if answer is not None and not isinstance(answer, bool | np.bool_):
                raise ConfigError(
                    f"{where} returned {type(answer).__name__}: True ends training after the next "
                    "step, None or False goes on; return nothing else"
                )
            asks |= bool(answer)
        return asks


def _hooks_of(callback: Any, where: str) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of a callback and what they call."""
    if isinstance(callback, type):
        raise ConfigError(f"{where} is a class: pass an instance, {callback.__name__}(...)")
    hooks = {
        name: getattr(callback, name)
        for name in dir(callback)
        if name.startswith("on_") and callable(getattr(callback, name))
    }
    for name in hooks:
        if name not in HOOKS:
            raise ConfigError(
                f"{where} has a method {name}, which nothing calls: did you mean "
                f"{nearest(name, HOOKS)}? A callback has any of {', '.join(HOOKS)}"
            )
    if not hooks and not callable(callback):
        raise ConfigError(
            f"{where} is neither a function of (record, session) nor an object with any of the "
            f"methods {', '.join(HOOKS)}"
        )
    hooks = hooks or {"on_step": callback}
    for name, method in hooks.items():
        _check_arguments(method, name, where)
    return list(hooks.items())


def _check_arguments(method: Callable[..., Any], hook: str, where: str) -> None:
    """Refuse a function with another number of arguments before training."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of some functions of extension modules
        return
    try:
        signature.bind(*re.findall(r"\w+", _CALLED_AS[hook]))
    except TypeError:
        name = getattr(method, "__name__", type(method).__name__)
        raise ConfigError(
            f"{where}: {name}{signature} is called as {name}{_CALLED_AS[hook]}; give it these "
            "arguments"
        ) from None


def _name_of(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)


_OTHER_FILES = (".json", ".tsv", ".txt", ".log", ".html", ".parquet")


def log_to(
    target: str | os.PathLike[str] | Callable[[dict[str, float], int], object],
) -> Callback:
    """Write the numbers of each step and evaluation somewhere: a callback of `hxla.train`.

    Names are those of TensorBoard: `train/loss`, `train/learning_rate`, `eval/loss`,
    `speed/examples_per_second`, and `train/` or `eval/` before the user's metrics. Steps are
    updates done. Rank 0 alone writes. A resumed run goes on in the same file, without rows of the
    steps that it runs again. A run that does not resume renames an earlier run's file, `name.csv`
    to `name.1.csv`.

    Args:
        target: A path that ends in `.csv` or `.jsonl`, with a row for each step; another path,
            which is a folder for TensorBoard's events; or a function that is called as
            `target(metrics, step)`, such as `wandb.log` or `mlflow.log_metrics`.

    Returns:
        The callback.

    Raises:
        ConfigError: If the target is none of these, or cannot be written when training begins.

    Example:
        >>> import hxla, numpy as np, optax
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8)
        >>> steps = []
        >>> to_list = hxla.log_to(lambda metrics, step: steps.append((step, len(metrics) > 3)))
        >>> result = hxla.train(job, steps=2, callbacks=[to_list, hxla.log_to("metrics.csv")])
        >>> steps
        [(1, True), (2, True)]
    """
    if callable(target):
        try:
            inspect.signature(target).bind({}, 0)
        except TypeError as error:
            raise ConfigError(
                f"log_to({getattr(target, '__qualname__', target)}): it is called as "
                f"f(metrics, step), and {error}"
            ) from None
        except ValueError:  # without a signature
            pass
        return LogTo(lambda _: _Function(target))
    path = local_path(target, "target", ConfigError)
    if path.suffix in _OTHER_FILES:
        raise ConfigError(
            f"log_to({str(target)!r}): pass a path that ends in .csv or .jsonl, a folder for "
            "TensorBoard, or a function of (metrics, step)"
        )
    from ..report.metrics_file import CsvFile, JsonLinesFile, TensorBoard

    kinds: dict[str, Callable[..., Any]] = {".csv": CsvFile, ".jsonl": JsonLinesFile}
    make = kinds.get(path.suffix, TensorBoard)
    return LogTo(lambda session: make(path, first_step=session.step_number))


class _Function:
    """A user's function in the place of a file."""

    def __init__(self, function: Callable[[dict[str, float], int], object]):
        self._function = function
        self.earlier: pathlib.Path | None = None

    def write(self, numbers: dict[str, float], step: int) -> None:
        self._function(numbers, step)

    def close(self) -> None:
        """Nothing to close."""


class LogTo(Callback):
    """See `log_to`.

    Args:
        make: Makes the file of a session on rank 0.
    """

    def __init__(self, make: Callable[[Session], Any]):
        self._make = make
        self._file: Any = None

    def on_start(self, session: Session) -> None:
        """Open the file."""
        if jax.process_index() == 0:
            self._file = self._make(session)
            if self._file.earlier is not None:
                session.log(f"the metrics of an earlier run are now in {self._file.earlier}")

    def on_step(self, record: StepRecord, session: Session) -> None:
        """Write a step and its evaluation."""
        if self._file is not None:
            numbers = named_scalars(record)
            if record.evaluation is not None:
                numbers |= named_scalars(record.evaluation)
            self._file.write(numbers, record.step)

    def on_close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


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

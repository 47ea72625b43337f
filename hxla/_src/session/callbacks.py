"""Callbacks of `hxla.train`: functions, or objects with methods for what they want to see.

`log_to` is a ready callback: it writes numbers to a file, TensorBoard or another tracker.
"""

# ruff: noqa: ARG002 - the empty methods of Callback

import contextlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..core.files import local_path, nearest
from ..report.history import EvalRecord, StepRecord
from ..report.metrics_file import CsvFile, JsonLinesFile, TensorBoard, named_scalars
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

"""A ready callback that writes a training's numbers to a file, TensorBoard or another tracker."""

import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from ..core.errors import ConfigError
from ..core.files import local_path
from ..report.history import StepRecord
from ..report.metrics_file import CsvFile, JsonLinesFile, TensorBoard, named_scalars
from .callbacks import Callback
from .session import Session

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

    def on_step(self, record: StepRecord, session: Session) -> None:  # noqa: ARG002
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

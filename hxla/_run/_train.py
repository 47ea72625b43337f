"""`hxla.train`."""

import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import optax

from .._cluster import _job_devices as _devices
from .._cluster._mesh_file import load_cluster
from .._core._config import Config, as_config
from .._core._errors import ConfigError, LaunchError
from .._core._types import PyTree
from .._graph._factors import PATTERNS, Patterns
from .._launch.join import uninitialised_cluster
from .._lower._replicate import Reduction
from .._model._functional import Loss
from .._plan._rules import RuleSet, load_rules
from . import _dry, _setup
from ._data import as_source, num_steps
from ._loop import Callback, Result, Run


def train(
    model: Any,
    data: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    microbatch_size: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    rules: str | RuleSet | None = None,
    patterns: Patterns = PATTERNS,
    stages: int | Sequence[float] | None = None,
    split: Literal["measured", "even"] | Sequence[int] = "measured",
    reduction: Reduction = "exact",
    nonfinite: Literal["stop", "skip"] = "stop",
    shuffle: bool = True,
    num_examples: int | None = None,
    variables: PyTree | None = None,
    eval_data: Any = None,
    eval_loss: Loss | None = None,
    eval_every: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    callbacks: Sequence[Callback] = (),
    config: Config | Mapping[str, Any] | None = None,
) -> Result:
    """Train a Flax model on every device of the job; the same bits however the work is spread.

    The global batch is cut into microbatches of one shape. Each device runs as many as its
    measured speed is worth, and the gradients are summed exactly, so the trained parameters depend
    on the arguments below and on nothing else: not on the number of devices, their speeds, or how
    often work moved between them.

    Args:
        model: An `nnx.Module` instance (updated in place) or an unbound `flax.linen.Module`.
        data: A pytree of arrays, a sequence, a Grain dataset, a callable from index to example, or
            an iterable of global batches.
        loss: `loss(model, batch)`, returning a scalar (the mean over its microbatch), per-example
            losses, or `(losses, weights)`; optionally followed by a dictionary of metrics. The
            gradient is that of the global batch's mean. Linen modules come bound.
        optimizer: Any optax transformation; it sees the model's own parameter tree.
        batch_size: Examples of a global batch; never changes with the hardware.
        microbatch_size: Examples of a microbatch; measured and chosen if None.
        steps: Updates in all. Give either this or `epochs`.
        epochs: Passes over the data.
        seed: Root of sample order, dropout and Linen initialisation.
        mesh: A mesh with an axis `data` for copies of the model, and inner axes (`tensor`, ...)
            that rules or annotations cut, and `stage` for pipelines; default: every device of the
            job, used as annotated.
        rules: Rule set, or the name or file of one, that says what the inner axes cut.
        patterns: Which dimensions of an equation can be cut together; add your own with
            `hxla.PATTERNS.with_pattern`.
        stages: Cut the model into a pipeline: so many stages of work that suits their devices, or
            one number per stage, the shares of the work; how it runs: `hxla.Config.pipeline`.
        split: `measured` (counts follow the devices), `even`, or one count per device.
        reduction: `exact`, or `float` for ordinary float32 sums whose bits depend on the spread.
        nonfinite: On a gradient that is not finite, `stop` or `skip` the update.
        shuffle: Whether random-access data is shuffled anew each epoch.
        num_examples: Of a callable that is to have epochs.
        variables: Initial variables of a Linen module; initialised from `seed` if None.
        eval_data: Data to evaluate on; any kind that `data` takes but an unbounded one.
        eval_loss: Loss for evaluation; default `loss`. NNX models are in evaluation mode.
        eval_every: Steps between evaluations; default: only after the last step.
        checkpoint_dir: Folder for checkpoints. If it holds one, training resumes from it.
        checkpoint_every: Steps between checkpoints; default: only at the end and on SIGTERM.
        run_dir: Folder for `metrics.jsonl` and `report.html`; nothing is written if None.
        tensorboard: Also write TensorBoard events to `run_dir`.
        callbacks: Called on every process as `callback(record, state)` after each step; True from
            any process ends training after the next step.
        config: Further settings, see `hxla.Config`.

    Returns:
        The trained model and state, the history and the plan.

    Raises:
        ConfigError: Arguments that contradict each other or cannot be met.
        DataError: Data that is malformed or shorter than asked.
        LossError: A loss of another form.
        MeshError: Devices that cannot be used.
        PlanError: No split fits the devices.
        NonFiniteError: A gradient was not finite and `nonfinite="stop"`.
        CheckpointError: A folder that cannot be written, or a checkpoint of another run.
        SystemExit: With code 75 after SIGTERM, once a checkpoint is written.

    Example:
        >>> import jax, numpy as np, optax, hxla
        >>> from flax import nnx
        >>> data = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8.0, dtype=np.float32)}
        >>> def loss(model, batch):
        ...     return (model(batch["x"])[:, 0] - batch["y"]) ** 2
        >>> model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        >>> result = hxla.train(model, data, loss, optax.sgd(0.1), batch_size=8,
        ...                     microbatch_size=1, steps=3)
        >>> result.step
        3

    References:
        Jia et al., "Whale", USENIX ATC 2022 (load balance over unlike devices).
        Li et al., "EasyScale", SC 2023 (logical workers with an identity of their own).
    """
    settings = as_config(config)
    _check_arguments(steps, epochs, eval_every, checkpoint_every, checkpoint_dir, eval_data)
    _check_choices(
        reduction=reduction, nonfinite=nonfinite, tensorboard=tensorboard, run_dir=run_dir
    )
    alone = uninitialised_cluster()
    if alone:
        raise LaunchError(
            f"this is one of several processes ({alone}) but they have not joined: each would "
            "train a model of its own. Start the script with hxla run, or call hxla.init() before "
            "anything else uses JAX"
        )
    cluster = load_cluster(os.environ["HXLA_MESH"]) if os.environ.get("HXLA_MESH") else None
    devices = _devices.resolve(mesh, cluster, settings.cluster.visible_devices)
    num_cuts = settings.pipeline.num_micro_batch
    if num_cuts is not None:
        microbatch_size = _setup.size_of_microbatches(batch_size, num_cuts, microbatch_size)
    _setup.check_batch(batch_size, microbatch_size, 1)
    source = as_source(
        data,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        num_examples=num_examples,
        examples_per_file=settings.io.examples_per_file,
    )
    last_step = (
        steps if steps is not None else num_steps(source, batch_size=batch_size, epochs=epochs or 0)
    )
    run = Run(
        model=model,
        source=source,
        loss=loss,
        eval_loss=eval_loss or loss,
        optimizer=optimizer,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        last_step=last_step,
        seed=seed,
        devices=devices,
        mesh=mesh,
        rules=load_rules(rules) if isinstance(rules, str) else rules,
        patterns=patterns,
        stages=stages if stages is not None else settings.auto.num_stages,
        cluster=cluster,
        split=split,
        reduction=reduction,
        nonfinite=nonfinite,
        variables=variables,
        eval_data=eval_data,
        eval_every=eval_every,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        run_dir=pathlib.Path(run_dir) if run_dir is not None else None,
        tensorboard=tensorboard,
        callbacks=tuple(callbacks),
        settings=settings,
    )
    request = _dry.requested()
    if isinstance(request, _dry.PlanRequest):
        _dry.plan(request, run.job())
        raise SystemExit(0)
    with contextlib.ExitStack() as stack:
        return run.run(stack)


def _check_arguments(
    steps: int | None,
    epochs: int | None,
    eval_every: int | None,
    checkpoint_every: int | None,
    checkpoint_dir: Any,
    eval_data: Any,
) -> None:
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give either steps or epochs, not steps={steps} and epochs={epochs}")
    numbers = {
        "steps": steps,
        "epochs": epochs,
        "eval_every": eval_every,
        "checkpoint_every": checkpoint_every,
    }
    low = [f"{k}={v}" for k, v in numbers.items() if v is not None and v < 1]
    if low:
        raise ConfigError(f"{', '.join(low)} must be at least 1")
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ConfigError(f"checkpoint_every={checkpoint_every} needs a checkpoint_dir")
    if eval_every is not None and eval_data is None:
        raise ConfigError(f"eval_every={eval_every} needs eval_data")


def _check_choices(*, reduction: str, nonfinite: str, tensorboard: bool, run_dir: Any) -> None:
    if reduction not in ("exact", "float"):
        raise ConfigError(f"reduction={reduction!r}: use 'exact' or 'float'")
    if nonfinite not in ("stop", "skip"):
        raise ConfigError(f"nonfinite={nonfinite!r}: use 'stop' or 'skip'")
    if tensorboard and run_dir is None:
        raise ConfigError("tensorboard=True needs a run_dir to write to")

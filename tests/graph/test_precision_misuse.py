"""Hostile uses of precision: one clear error each, which says what to do."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.tiers import rows

DATA = {"x": np.ones((16, 4), np.float32), "y": np.ones((16, 2), np.float32)}


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def job(precision="bf16", loss=squared_error, **options):
    model = lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0))  # noqa: E731
    return hxla.Job(model, DATA, loss, optax.sgd(0.1), batch_size=8, precision=precision, **options)


def plan(*arguments, cluster=None, reduction="exact", **options):
    return job(*arguments, **options).plan(cluster, microbatch_size=1, reduction=reduction)


def train(*arguments, steps=2, folder=None, **options):
    made = job(*arguments, **options)
    own = made.plan(microbatch_size=1, mesh={"data": 8}, counts="even")
    with made.open(own, steps=steps, checkpoint_dir=folder) as session:
        for _ in session:
            pass
        return session.result()


def kepler():
    return hxla.Cluster(name="", devices=(hxla.Device(kind="Tesla K80"),) * 2)


def exceptions(**fields):
    return {"preset": "bf16", "exceptions": [fields]}


def never_finite(model, batch):
    return squared_error(model, batch) * jnp.inf


def other_precision(folder):
    train("bf16", folder=folder)
    train("fp16", folder=folder, steps=3)


def other_plan(folder):
    job("fp32").open(plan("bf16"))


CONFIG, PLAN = hxla.ConfigError, hxla.PlanError
USES = {
    "a word that is none": (lambda f: plan("half"), CONFIG, "preset: Input .* 'model', 'fp32'"),
    "a dtype that is none": (lambda f: plan({"compute": "int8"}), CONFIG, "compute: .*'int8'"),
    "a computation of 8 bits": (
        lambda f: plan("float8_e4m3fn"),
        CONFIG,
        "float8 is a dtype of products only, chosen by preset 'fp8'",
    ),
    "float8 on an A100": (
        lambda f: plan("fp8", cluster="workstation-a100-h100"),
        PLAN,
        "A100.* cannot multiply in float8_e4m3fn.*use precision='bf16' or",
    ),
    "an exception of 8 bits": (
        lambda f: plan(exceptions(path="kernel$", compute="float8_e4m3fn")),
        CONFIG,
        "float8 is a dtype of products only",
    ),
    "a key that is none": (lambda f: plan({"pramas": "x"}), CONFIG, "did you mean 'params'"),
    "a number": (lambda f: plan(16), CONFIG, "precision=16: use a word, model, fp32, tf32"),
    "a file that is not there": (lambda f: plan("none.toml"), CONFIG, "cannot be read"),
    "bfloat16 on a V100 and a P100": (
        lambda f: plan("bf16", cluster="whale-8v100-8p100"),
        PLAN,
        "Tesla V100.*, Tesla P100.* cannot multiply in bfloat16.*use precision='fp16' or",
    ),
    "bfloat16 on a T4": (
        lambda f: plan("bf16", cluster="easyscale-v100-p100-t4"),
        PLAN,
        "T4 cannot multiply in bfloat16",
    ),
    "float16 on a card that has none": (
        lambda f: plan("fp16", cluster=kepler()),
        PLAN,
        "Tesla K80 cannot multiply in float16.*use precision='fp32'",
    ),
    "an exception that matches nothing": (
        lambda f: plan(exceptions(path="haed/")),
        CONFIG,
        "no operation matches path 'haed/' in float32.*bias, kernel",
    ),
    "an exception of two sorts": (
        lambda f: plan(exceptions(path="a", scope="b")),
        CONFIG,
        "either `path` or `scope`",
    ),
    "an exception that is no pattern": (
        lambda f: plan(exceptions(path="(")),
        CONFIG,
        "is no pattern",
    ),
    "a scale that is no power of two": (
        lambda f: plan({"preset": "fp16", "initial_scale": 1000.0}),
        CONFIG,
        "initial_scale=1000: a loss scale is a power of two",
    ),
    "a scale that float16 cannot hold": (
        lambda f: plan({"preset": "fp16", "initial_scale": 2.0**-20}),
        CONFIG,
        r"a power of two from 2\^-14 to",
    ),
    "a scale that underflows": (
        lambda f: train({"preset": "fp16", "initial_scale": 0.0001220703125}, never_finite),
        hxla.NonFiniteError,
        r"the loss is scaled by 2\^-14, the least: it is not the scale that overflows",
    ),
    "a scale that grows in no steps": (
        lambda f: plan({"preset": "fp16", "growth_steps": 0}),
        CONFIG,
        "growth_steps: .*greater than or equal to 1",
    ),
    "whole numbers in the loss": (
        lambda f: plan("fp16", lambda m, b: (m(b["x"]) > 0).sum(-1)),
        hxla.LossError,
        "a loss must be real and floating, not int32",
    ),
    "float sums of a scaled loss": (
        lambda f: plan("fp16", reduction="float"),
        CONFIG,
        "needs reduction='exact'",
    ),
    "another word for nonfinite": (
        lambda f: plan(nonfinite="halve"),
        CONFIG,
        "use 'stop', 'skip' or 'scale'",
    ),
    "gradients that are rounded before exact sums": (
        lambda f: plan({"preset": "bf16", "reduction": "bfloat16"}),
        CONFIG,
        "reduction: Input should be 'float32'",
    ),
    "a checkpoint of another precision": (
        other_precision,
        hxla.CheckpointError,
        "precision: .*bfloat16.* in the checkpoint, .*float16.* asked",
    ),
    "a plan of another precision": (
        other_plan,
        PLAN,
        "precision.compute: bfloat16 in the plan, float32 in the job",
    ),
}


#: Which compile something.
TRAINED = {"a scale that underflows", "a checkpoint of another precision"}


@pytest.mark.parametrize("use", rows(USES, *(USES.keys() - TRAINED)))
def test_a_hostile_use_gets_one_clear_error(use, tmp_path):
    run, error, message = USES[use]
    with pytest.raises(error, match=f"(?s){message}"):
        run(str(tmp_path / "checkpoints"))

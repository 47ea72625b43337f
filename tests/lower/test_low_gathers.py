"""Parameters that only low products read travel in 16 bits, where each copy has a share."""

import collections
import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.blocks import WIDTH
from support.inside.choose import step_memory, workloads
from support.inside.graph import low_params, segments_at
from support.inside.job import JobContext
from support.launched import start
from support.shared_state import cluster, shared
from support.shared_state import planned as over

pytestmark = pytest.mark.usefixtures("every_program_is_cached")


def in_precision(own, precision):
    return dataclasses.replace(own, precision=precision)


def gathered_bytes(program):
    """Of the all-gathers of a compiled program, by dtype."""
    found = collections.Counter()
    for dtype, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", program.as_text()):
        size = int(np.prod([int(n) for n in shape.split(",") if n]))
        found[dtype] += size * {"u16": 2, "f32": 4}[dtype]
    return found


@pytest.mark.slow
def test_what_travels_halves():
    """All but the norms' scales and biases, and the rows of the embedding that are looked up."""
    sent, planned = {}, {}
    for word in ("fp32", "bf16"):
        own = in_precision(shared(3), word)
        with own.open(over(own, 2), steps=1) as session:
            sharded = session._programs.sharded_params
            total = collections.Counter()
            for own_units, _ in sharded._of_group:
                for u in own_units:
                    total += gathered_bytes(sharded._gathers[sharded._same[u]])
            sent[word] = total
            plan = over(own, 2)
            work = workloads(JobContext(own)).at(plan.microbatch_size)
            planned[word] = sum(step_memory(work, plan, cluster(2)).chain.gathered_bytes)
            norms = 4 * 2 * WIDTH
    assert set(sent["fp32"]) == {"f32"}
    embedding, unused = 11 * WIDTH, 3
    low = 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH) + embedding
    rest = norms + embedding + unused
    # Granules pad what is cut by less than eight elements for each array and copy.
    assert low <= sent["bf16"]["u16"] / 2 <= low + 16 * 13
    assert rest <= sent["bf16"]["f32"] / 4 <= rest + 16 * 10
    for word, total in sent.items():  # each parameter but those that no segment reads
        assert 0 <= sum(total.values()) - planned[word] <= 4 * (unused + 16 * 23), word
    assert sum(sent["bf16"].values()) < 0.55 * sum(sent["fp32"].values())


def segment_of(function, precision):
    """The one segment of a model that calls `function(x, kernel, scale)`."""

    class Net(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.eye(4))
            self.scale = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            return function(x, self.kernel[...], self.scale[...])

    data = {"x": np.ones((8, 4), np.float32)}
    own = hxla.Job(
        Net(),
        data,
        lambda m, b: m(b["x"]).mean(-1),
        optax.sgd(0.1),
        batch_size=8,
        precision=precision,
    )
    graph = own.graph(2)
    [segment] = segments_at(graph, ())
    return {graph.param_names[p]: dtype for p, dtype in low_params(graph, segment).items()}


@pytest.mark.parametrize(
    ("function", "precision", "wanted"),
    [
        (lambda x, k, s: x @ k, "bf16", {"kernel": "bfloat16"}),
        (lambda x, k, s: x @ k.T @ k.reshape(2, 2, 4).reshape(4, 4), "fp16", {"kernel": "float16"}),
        (lambda x, k, s: (x @ k) * s, "fp32", {}),
        (lambda x, k, s: x @ k + jnp.exp(k).sum(), "bf16", {}),  # float32 reads it too
        (lambda x, k, s: x @ k.astype(jnp.float16) @ k, "bf16", {}),  # and two dtypes do
        (lambda x, k, s: x @ k.astype(jnp.bfloat16), None, {"kernel": "bfloat16"}),
    ],
)
def test_only_what_is_read_in_one_low_dtype_is_low(function, precision, wanted):
    assert segment_of(function, precision) == wanted


SCRIPT = """
import jax
import optax
from flax import nnx
from support.blocks import BATCH, Layers, data, loss

import hxla


def sha256(**memory):
    return hxla.train(
        hxla.Job(
            lambda: Layers(nnx.Rngs(0), 1),
            data(),
            loss,
            optax.adamw(1e-2),
            batch_size=BATCH,
            precision="bf16",
            config={"memory": {"recompute": "boundaries", **memory}},
        ),
        microbatch_size=1, steps=2, counts="even",
    ).sha256


found = sha256(zero=1), sha256(zero=3, shares=[1, 3])
print(f"equal on rank {jax.process_index()}: {found[0] == found[1]}", flush=True)
"""


@pytest.mark.slow
def test_between_processes_low_gathers_move_no_bit(tmp_path):
    out, err = (job := start(tmp_path, SCRIPT, "-n", "2")).communicate(timeout=300)
    assert job.returncode == 0, err[-3000:]
    assert out.count("equal on rank") == out.count("True") == 2, out

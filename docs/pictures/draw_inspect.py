"""The page of an inspection, for the how-to guide: a GPT sharded over eight fake devices.

python docs/pictures/draw_inspect.py
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hxla

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1] / "examples"))
import gpt  # noqa: E402

WIDTH, HEIGHT, LAYERS, LENGTH, STEPS = 900, 1500, 12, 64, 3


def spec(path: tuple, array: jax.Array) -> P:
    """Shard matrices as Megatron does; the embeddings stay whole."""
    name = jax.tree_util.keystr(path)
    if "qkv" in name or "up" in name:
        return P(None, "tensor")
    return P("tensor") if array.ndim == 2 and ("out" in name or "down" in name) else P()


mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
model = gpt.GPT(nnx.Rngs(0), length=LENGTH, width=256, heads=4, layers=LAYERS)
graph, params, rest = nnx.split(model, nnx.Param, ...)
optimizer = optax.adam(1e-3)


@jax.jit
def train_step(params: nnx.State, opt_state: optax.OptState, text: jax.Array) -> tuple:
    """One update."""

    def loss(params: nnx.State) -> jax.Array:
        with hxla.split(4):
            return gpt.loss(nnx.merge(graph, params, rest), {"text": text})

    grads = jax.grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


state = jax.tree_util.tree_map_with_path(
    lambda path, x: jax.device_put(x, NamedSharding(mesh, spec(path, x))),
    (params, optimizer.init(params)),
)
text = np.arange(8 * (LENGTH + 1), dtype=np.int32).reshape(8, -1) % 256
text = jax.device_put(text, NamedSharding(mesh, P("data")))
step = train_step.lower(*state, text).compile()
jax.block_until_ready(step(*state, text))
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)  # the page names the profile
    page = pathlib.Path("step.html")
    with jax.profiler.trace("profile"):
        for _ in range(STEPS):
            state = jax.block_until_ready(step(*state, text))
    inspection = hxla.inspect(step, cluster="whale-8v100-8p100")
    inspection.write_html(page, title="A GPT of 12 layers over data and tensor", profile="profile")
    command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
    command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={FOLDER / 'inspect.png'}"]
    subprocess.run([*command, page.resolve().as_uri()], check=True)

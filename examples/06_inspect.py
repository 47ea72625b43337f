"""Inspect the compiled programs of an MLP that is sharded well, and of the same MLP sharded badly.

    python examples/06_inspect.py

Four fake devices on the CPU. The first form shards its weights as Megatron does, for one
all-reduce of the output, 64 x 256 x 4 = 64 KiB. The second form shards both along their rows,
so the whole hidden activation, 64 x 1024 x 4 = 256 KiB, has to be exchanged and summed.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from hxla import testing

mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
params = {
    "up": jax.ShapeDtypeStruct((256, 1024), jnp.float32),
    "down": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
}
x = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def forward(params, x):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ params["up"]) @ params["down"]


def inspect(up, down):
    cut = {"up": NamedSharding(mesh, up), "down": NamedSharding(mesh, down)}
    whole = NamedSharding(mesh, P())
    step = jax.jit(forward, in_shardings=(cut, whole), out_shardings=whole)
    return hxla.inspect(step, params, x)


good = inspect(P(None, "tensor"), P("tensor"))
print(good.text(limit=5))
testing.assert_collectives(good, all_reduce=1, all_gather=0)
testing.assert_peak_memory_below(good, "2MiB")

bad = inspect(P("tensor"), P("tensor"))
print("cut along rows instead:")
for line in good.diff(bad):
    print(f"  {line}")

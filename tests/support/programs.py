"""Programs whose collectives were worked out by hand, for the tests of inspections."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hxla

F32 = 4
BATCH, WIDTH, HIDDEN = 8, 32, 64


def mesh(**axes):
    names, sizes = tuple(axes), tuple(axes.values())
    devices = jax.devices()[: int(np.prod(sizes))]
    kinds = (AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, devices=devices, axis_types=kinds)


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(params, x):
    return (jnp.tanh(x @ params["up"]) @ params["down"] ** 1).astype(jnp.float32)


def mlp_loss(params, x):
    return (mlp(params, x) ** 2).sum()


MLP = {"up": like(WIDTH, HIDDEN), "down": like(HIDDEN, WIDTH)}


def jitted(function, where, specs, out=None, **kwargs):
    place = functools.partial(NamedSharding, where)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    named = jax.tree.map(place, specs, is_leaf=is_spec)
    if out is not None:
        kwargs["out_shardings"] = jax.tree.map(place, out, is_leaf=is_spec)
    return jax.jit(function, in_shardings=named, **kwargs)


def data():
    """Gradients of both matrices, each an array of its own or both in one collective."""
    where = mesh(data=4)
    whole = {"up": P(), "down": P()}
    step = jitted(jax.grad(mlp_loss), where, (whole, P("data")), whole)
    moved = {("all-reduce", "data", 1): 2 * WIDTH * HIDDEN * F32}
    return step, (MLP, like(BATCH, WIDTH)), moved


def tensor():
    """Megatron's MLP: one sum of the output forward, none in a forward pass besides."""
    where = mesh(tensor=4)
    cut = {"up": P(None, "tensor"), "down": P("tensor", None)}
    step = jitted(mlp, where, (cut, P()), P())
    return step, (MLP, like(BATCH, WIDTH)), {("all-reduce", "tensor", 1): BATCH * WIDTH * F32}


def fsdp():
    """Parameters stored cut over the axis that carries the batch: gathered where they are used."""

    def forward(params, x):
        gathered = jax.tree.map(lambda p: jax.lax.all_gather(p, "data", tiled=True), params)
        return mlp(gathered, x)

    where = mesh(data=4)
    cut = {"up": P("data"), "down": P("data")}
    mapped = jax.shard_map(forward, mesh=where, in_specs=(cut, P("data")), out_specs=P("data"))

    def step(params, x):
        return jax.grad(lambda p: (mapped(p, x) ** 2).sum())(params)

    matrix = WIDTH * HIDDEN * F32
    moved = {("all-gather", "data", 1): 2 * matrix, ("reduce-scatter", "data", 1): 2 * matrix}
    return jitted(step, where, (cut, P("data")), cut), (MLP, like(BATCH, WIDTH)), moved


def fsdp_and_tensor():
    """Both matrices cut over tensor and stored cut over fsdp as well; forward only."""
    where = mesh(fsdp=2, tensor=2)
    cut = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
    half = {"up": P(None, "tensor"), "down": P("tensor", None)}

    def step(params, x):
        constrain = jax.lax.with_sharding_constraint
        whole = {k: constrain(p, NamedSharding(where, half[k])) for k, p in params.items()}
        return mlp(whole, x)

    moved = {
        ("all-gather", "fsdp", 1): 2 * (WIDTH * HIDDEN // 2) * F32,
        ("all-reduce", "tensor", 1): (BATCH // 2) * WIDTH * F32,
    }
    step = jitted(step, where, (cut, P("fsdp")), P("fsdp"))
    return step, (MLP, like(BATCH, WIDTH)), moved


def pipeline():
    """Four stages, one microbatch a tick, handed on by a permute in each of seven ticks."""
    num_stages, num_micro = 4, 4

    def stages(w, xs):
        own = jax.lax.axis_index("stage")

        def tick(carry, t):
            x = jnp.where(own == 0, xs[jnp.minimum(t, num_micro - 1)], carry)
            y = jnp.tanh(x @ w[0])
            return jax.lax.ppermute(y, "stage", [(i, i + 1) for i in range(num_stages - 1)]), y

        begin = jax.lax.pcast(jnp.zeros(xs.shape[1:]), "stage", to="varying")
        return jax.lax.scan(tick, begin, jnp.arange(num_micro + num_stages - 1))[1][None]

    where = mesh(stage=4)
    step = jax.shard_map(stages, mesh=where, in_specs=(P("stage"), P()), out_specs=P("stage"))
    moved = {("collective-permute", "stage", 7): BATCH * WIDTH * F32}
    specs = (P("stage"), P())
    return (
        jitted(step, where, specs),
        (like(num_stages, WIDTH, WIDTH), like(num_micro, BATCH, WIDTH)),
        moved,
    )


def experts():
    """Tokens go to their experts and back."""

    def layer(w, x):
        sent = jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(sent @ w[0]), "expert", 0, 0, tiled=True)

    where = mesh(expert=4)
    step = jax.shard_map(
        layer, mesh=where, in_specs=(P("expert"), P("expert")), out_specs=P("expert")
    )
    moved = {("all-to-all", "expert", 1): 2 * (4 * BATCH) * WIDTH * F32}
    return (
        jitted(step, where, (P("expert"), P("expert"))),
        (like(4, WIDTH, WIDTH), like(4 * 4 * BATCH, WIDTH)),
        moved,
    )


def nested_loops():
    """A sum in a loop of three in a loop of five, over two of three axes."""

    def body(x):
        def inner(_, x):
            return jax.lax.psum(jnp.sin(x), ("a", "c")) / 4

        return jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.fori_loop(0, 3, inner, x), x)

    where = mesh(a=2, b=2, c=2)
    step = jax.shard_map(body, mesh=where, in_specs=P("b"), out_specs=P("b"), check_vma=False)
    moved = {("all-reduce", "a+c", 15): (BATCH // 2) * WIDTH * F32}
    return jitted(step, where, P("b")), (like(BATCH, WIDTH),), moved


def unknown_trips():
    """A loop until convergence: nobody knows how often its sum runs."""

    def body(x):
        return jax.lax.while_loop(
            lambda x: x[0, 0] > 1e-3, lambda x: jax.lax.psum(x, "data") * 0.1, x
        )

    where = mesh(data=4)
    step = jax.shard_map(body, mesh=where, in_specs=P(), out_specs=P(), check_vma=False)
    moved = {("all-reduce", "data", None): BATCH * WIDTH * F32}
    return jitted(step, where, P()), (like(BATCH, WIDTH),), moved


def branch():
    """A sum in one branch only."""

    def body(flag, x):
        return jax.lax.cond(flag, lambda x: jax.lax.psum(x, "data"), lambda x: x * 2.0, x)

    where = mesh(data=4)
    step = jax.shard_map(
        body, mesh=where, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    moved = {("all-reduce", "data", 1): (BATCH // 4) * WIDTH * F32}
    return (
        jitted(step, where, (P(), P("data"))),
        (like(dtype=jnp.bool_), like(BATCH, WIDTH)),
        moved,
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = nn.Dense(HIDDEN, use_bias=False, name="up")(x)
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(jnp.tanh(hidden)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return blocks(name="blocks")(x, None)[0]


def linen():
    """Three scanned blocks, cut as Megatron does: one sum a block forward."""
    where = mesh(data=2, tensor=2)
    model = Stack()
    x = like(BATCH, WIDTH)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    cut = {"up": {"kernel": P(None, None, "tensor")}, "down": {"kernel": P(None, "tensor")}}
    specs = {"params": {"blocks": cut}}
    step = jitted(model.apply, where, (specs, P("data")), P("data"))
    return step, (params, x), {("all-reduce", "tensor", 3): (BATCH // 2) * WIDTH * F32}


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def nnx_adam():
    """A whole step of Adam over data: the gradients, and nothing else that is large."""
    where = mesh(data=8)
    graph, params = nnx.split(nnx.eval_shape(lambda: Pair(nnx.Rngs(0))), nnx.Param)
    optimizer = optax.adam(1e-3)
    opt_state = jax.eval_shape(optimizer.init, params)

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: (nnx.merge(graph, p)(x) ** 2).sum())(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    whole = jax.tree.map(lambda _: P(), (params, opt_state))
    step = jitted(step, where, (*whole, P("data")), whole, donate_argnums=(0, 1))
    shapes = jax.tree.map(lambda x: like(*x.shape, dtype=x.dtype), (params, opt_state))
    moved = {("all-reduce", "data", 1): 2 * WIDTH * HIDDEN * F32}
    return step, (*shapes, like(BATCH, WIDTH)), moved


def taskgraphs():
    """hxla's annotations: features replicated, classes split, over one axis."""
    num_classes = 256

    def forward(params, x):
        with hxla.replicate():
            features = jnp.tanh(x @ params["features"])
        with hxla.split():
            logits = features @ params["classes"]
        return logits.max(axis=-1)

    where = mesh(tensor=4)
    params = {"features": like(WIDTH, HIDDEN), "classes": like(HIDDEN, num_classes)}
    cut = {"features": P(), "classes": P(None, "tensor")}
    step = jitted(forward, where, (cut, P()), P())
    return step, (params, like(BATCH, WIDTH)), {("all-reduce", "tensor", 1): BATCH * F32}


ALL = {
    program.__name__: program
    for program in (
        *(data, tensor, fsdp, fsdp_and_tensor, pipeline, experts, nested_loops, unknown_trips),
        *(branch, linen, nnx_adam, taskgraphs),
    )
}


@functools.cache
def compiled(name):
    """One of `ALL`, compiled once for all tests of a process, and what its collectives move."""
    step, args, moved = ALL[name]()
    return step.lower(*args).compile(), moved


@functools.cache
def inspected(name):
    return hxla.inspect(compiled(name)[0])

"""Training steps in plain JAX, as a good user writes them: what hxla is compared with."""

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")


def prefetched(make: Callable[[int], T], depth: int = 2) -> Iterator[T]:
    """`make(0)`, `make(1)` and so on, made ahead by a thread.

    Args:
        make: From the number of a step to its batch.
        depth: Steps ahead.
    """
    with ThreadPoolExecutor(1) as pool:
        ahead = collections.deque(pool.submit(make, n) for n in range(depth))
        for n in range(depth, 1 << 62):
            batch = ahead.popleft().result()
            ahead.append(pool.submit(make, n))
            yield batch


def summed(gradient: Callable[..., Any], params: Any, parts: Any) -> Any:
    """Sums over microbatches of the loss and its gradient, in float32, by a loop.

    Args:
        gradient: `(params, microbatch) -> (loss, gradients)`.
        params: Parameters.
        parts: Microbatches, one after another in the first dimension.
    """

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient(params, part)), None

    zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, parts)[0]


def psum(tree: Any, axis: str) -> Any:
    """One sum over devices of all arrays of a tree, as one vector."""
    flat, unflatten = ravel_pytree(tree)
    return unflatten(jax.lax.psum(flat, axis))


def data_parallel(
    gradient: Callable[..., Any],
    params: Any,
    optimizer: optax.GradientTransformation,
    data: np.ndarray,
    mesh: Mesh,
    *,
    batch_size: int,
    microbatch_size: int,
    specs: Any = None,
) -> Callable[[], float]:
    """A step over an axis `data`: a local loop over microbatches, one sum, an update.

    Args:
        gradient: Of a microbatch's mean loss: `(params, examples) -> (loss, gradients)`.
        params: Parameters to begin with.
        optimizer: As `hxla.Job` has it.
        data: Examples, read in order.
        mesh: Of all devices, those of other processes included.
        batch_size: Examples of a global batch.
        microbatch_size: Examples of a microbatch of one copy of the model.
        specs: How parameters are cut over the other axes of the mesh, which stay XLA's to use.

    Returns:
        What trains one step and returns its loss, once all of it is done.
    """
    num = batch_size // microbatch_size
    share = batch_size // jax.process_count()
    like = specs or jax.tree.map(lambda _: P(), params)
    state_like = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, params),
        like,
        transform_non_params=lambda _: P(),
    )
    cut, *shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (P("data"), like, state_like),
        is_leaf=lambda x: isinstance(x, P),
    )
    placed = jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), params, shardings[0])
    held = [placed, jax.jit(optimizer.init, out_shardings=shardings[1])(placed)]

    def local_step(params: Any, state: Any, batch: jax.Array) -> Any:
        parts = batch.reshape(-1, microbatch_size, *batch.shape[1:])
        sums = summed(gradient, params, parts)
        # Arrays that are cut would be gathered to become one vector.
        loss, grads = jax.lax.psum(sums, "data") if specs else psum(sums, "data")
        updates, state = optimizer.update(jax.tree.map(lambda g: g / num, grads), state, params)
        return optax.apply_updates(params, updates), state, loss / num

    mapped = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    run = jax.jit(mapped, donate_argnums=(0, 1), out_shardings=(*shardings, None))

    def batch_of(step: int) -> jax.Array:
        start = step * batch_size + jax.process_index() * share
        own = data[start : start + share]
        return jax.make_array_from_process_local_data(cut, own, (batch_size, *own.shape[1:]))

    batches = prefetched(batch_of)

    def step() -> float:
        *held[:], loss = run(*held, next(batches))
        jax.block_until_ready(held)
        return float(loss)

    return step

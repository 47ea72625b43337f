"""One part of a chain on shards of unlike sizes: what enters and leaves it is whole.

The gradient is that of each device's program. It runs the part again, so a part keeps its inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..graph.interpreter import Env
from ..graph.parts import ChainPart
from ..jax.cpu_dots import uncrossed
from .padding import local_shard
from .uneven import Uneven
from .uneven_collectives import Token, entered, first_token

#: `(params, inputs, given) -> results`, see `graph.parts.run_part`.
Run = Callable[[Sequence[Any], Sequence[Any], Env], list[Any]]


def run_uneven_part(uneven: Uneven, mesh: Mesh, part: ChainPart, *, on_cpu: bool) -> Run:
    """A function that runs a part on the devices of a mesh; its parameters are padded shards."""
    graph = uneven.graph
    params = [graph.param_values[p] for p in part.segment.params]
    ends = graph.result_values if part.is_last else part.outputs
    spec_of = {v: uneven.sharded.spec_of(v) for v in params}

    def local(
        values: Sequence[int], arrays: Sequence[Any], impls: Sequence[Any], token: Token
    ) -> tuple[list[Any], Token]:
        env = dict(graph.consts)
        for v, x, impl in zip(values, arrays, impls, strict=True):
            if impl is not None:
                x = jax.random.wrap_key_data(x, impl=impl)
            cut = None if v in spec_of else uneven.cut_of(v)
            if cut is not None:
                [x], token = entered([x], token, uneven.axis)
                x = local_shard(x, cut)
            env[v] = x
        return uneven.whole_results(part.segment.ops, env, token, ends, on_cpu=on_cpu)

    def run(arrays_of: Sequence[Any], inputs: Sequence[Any], given: Env) -> list[Any]:
        values = [*params, *part.inputs, *given]
        arrays = [*arrays_of, *inputs, *given.values()]
        impls = [_key_impl(x) for x in arrays]
        arrays = [
            x if impl is None else jax.random.key_data(x)
            for x, impl in zip(arrays, impls, strict=True)
        ]
        specs = [spec_of.get(v, P()) for v in values]
        is_float = [
            v not in given and jnp.issubdtype(x.dtype, jnp.inexact)
            for v, x in zip(values, arrays, strict=True)
        ]
        places = [k for k, is_one in enumerate(is_float) if is_one]

        def forward(arrays: Sequence[Any]) -> tuple[list[Any], Token]:
            return local(values, arrays, impls, first_token())

        def backward(arrays: Sequence[Any], token: Token, cotangents: Sequence[Any]) -> list[Any]:
            def floats(some: Sequence[Any], token: Token) -> list[Any]:
                replaced = dict(zip(places, some, strict=True))
                every = [replaced.get(k, x) for k, x in enumerate(arrays)]
                return _floats(local(values, every, impls, token)[0])

            def gradients(
                some: Sequence[Any], token: Token, cotangents: Sequence[Any]
            ) -> list[Any]:
                grads, last = jax.vjp(floats, some, token)[1](list(cotangents))
                # What reads them, as the largest of all devices does, waits for all collectives.
                return [
                    x + last[0].astype(x.dtype) if k < len(params) else x
                    for k, x in zip(places, grads, strict=True)
                ]

            pull = uncrossed(gradients) if on_cpu else gradients
            return pull([arrays[k] for k in places], token, cotangents)  # type: ignore[no-any-return]

        mapped = jax.shard_map(
            forward, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
        )
        call = jax.custom_vjp(lambda arrays: mapped(arrays)[0])

        def call_forward(arrays: Sequence[Any]) -> tuple[list[Any], Any]:
            results, token = mapped(arrays)
            # The program of the last part runs it twice. The second run waits for the first, or
            # XLA would merge some of their collectives on one device and others on another.
            return results, (arrays, token if part.is_last else first_token())

        def call_backward(saved: Any, cotangents: Sequence[Any]) -> tuple[list[Any]]:
            (arrays, token), back = saved, _floats(cotangents)
            grads = jax.shard_map(
                backward,
                mesh=mesh,
                in_specs=(specs, P(), [P()] * len(back)),
                out_specs=[specs[k] for k in places],
                check_vma=False,
            )(arrays, token, back)
            by_place = dict(zip(places, grads, strict=True))
            return ([by_place.get(k) for k in range(len(arrays))],)

        call.defvjp(call_forward, call_backward)
        return call(arrays)  # type: ignore[no-any-return]

    return run


def _key_impl(x: Any) -> Any:
    """The implementation of an array of random keys; None: it has no keys."""
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def _floats(arrays: Sequence[Any]) -> list[Any]:
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]

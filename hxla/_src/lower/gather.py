"""The all-gather of parameters after an update, where each replica has updated a shard.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS
from ..plan.parts import SumsForm
from .chunks import Chunks, all_gather
from .compile import compiler_options, for_each
from .sum import Reducer


def gathered_dtype(params: Sequence[Any]) -> Any:
    """Dtype in which parameters are sent: the least that represents all of their dtypes."""
    return functools.reduce(jnp.promote_types, (x.dtype for x in params))


class Gather:
    """Gathers the updated shards of parameters on all replicas.

    Args:
        reducer: The reduction, whose chunks the parameters have too.
        params: Shapes of the trained parameters.
        specs: Their PartitionSpecs over the axes inside a replica.
    """

    def __init__(self, reducer: Reducer, params: Sequence[Any], specs: Sequence[P], form: SumsForm):
        self._arrays, self._params, self._form = reducer.arrays, list(params), form
        self._specs = list(specs)
        self._buckets = [chunks for chunks in reducer.layout.chunks if chunks.tensors]
        self._programs: list[Any] = []
        self._unflat: list[list[Any]] = []
        self._under_way: list[jax.Array] = []

    def lower(self) -> list[Any]:
        """The programs of all buckets before compilation."""
        return [self._build(chunks) for chunks in self._buckets]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Use the compiled programs of `lower`."""
        self._programs = list(compiled)
        if self._arrays.over_hosts:
            self._unflat = [
                for_each(self._arrays.local, functools.partial(self._build_unflat, chunks))
                for chunks in self._buckets
            ]

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state during the gather."""
        programs = [compiled[0] for compiled in self._unflat] or self._programs
        stats = [program.memory_analysis() for program in programs]
        return max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)

    def _build(self, chunks: Chunks) -> Any:
        arrays, lengths = self._arrays, self._arrays.lengths(chunks.lengths)
        specs = [self._specs[i] for i in chunks.tensors]

        def hxla_gather(chunk: jax.Array, *old: list[jax.Array]) -> Any:
            flat = all_gather(chunk, lengths, DATA_AXIS) if len(lengths) > 1 else chunk
            return flat if arrays.over_hosts else unflat(chunks, flat, *old)

        old = [] if arrays.over_hosts else [self._old(chunks, list(map(arrays.sharding, specs)))]
        run: Any = hxla_gather
        if not arrays.is_single:
            run = jax.shard_map(
                hxla_gather,
                mesh=arrays.mesh,
                in_specs=(arrays.own_spec, *[specs for _ in old]),
                out_specs=specs if old else P(),
                check_vma=False,
            )
        sent = jax.ShapeDtypeStruct(
            (max(lengths) * len(lengths) * arrays.num_inner,),
            gathered_dtype(self._params),
            sharding=arrays.sharding(arrays.own_spec),
        )
        options = compiler_options(arrays.devices[0].platform, self._form)
        donated = () if arrays.over_hosts else (1,)
        return jax.jit(
            run, donate_argnums=donated, keep_unused=True, compiler_options=options
        ).lower(sent, *old)

    def _build_unflat(self, chunks: Chunks, i: int) -> Any:
        """The program that cuts the hosts' gathered array into parameters on a local replica."""
        replica = self._arrays.local[i]

        def hxla_unflat(flat: jax.Array, old: list[jax.Array]) -> list[jax.Array]:
            return unflat(chunks, flat, old)

        flat = jax.ShapeDtypeStruct((sum(chunks.lengths),), gathered_dtype(self._params))
        return jax.jit(
            hxla_unflat,
            donate_argnums=(1,),
            keep_unused=True,
            compiler_options=compiler_options(replica.devices[0].platform, self._form),
        ).lower(
            replica.like(flat),
            self._old(chunks, [replica.sharding(P())] * len(chunks.tensors)),
        )

    def _old(self, chunks: Chunks, shardings: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        params = [self._params[i] for i in chunks.tensors]
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(params, shardings, strict=True)
        ]

    def run(
        self, sent: Sequence[Sequence[jax.Array]], params: Sequence[Sequence[jax.Array]]
    ) -> list[list[jax.Array]]:
        """The new parameters on each local replica.

        Args:
            sent: For each local replica the chunks of its update.
            params: For each local replica the old trained parameters, which are donated.
        """
        arrays = self._arrays
        new = [list(tensors) for tensors in params]
        for k, (chunks, program) in enumerate(zip(self._buckets, self._programs, strict=True)):
            chunk = arrays.join([tensors[k] for tensors in sent], chunks.lengths)
            old = [[tensors[i] for i in chunks.tensors] for tensors in params]
            if arrays.over_hosts:
                self._under_way = [program(chunk)]
                flats = arrays.local_parts(self._under_way[0], P())
                gathered = [
                    unflat(flat, tensors)
                    for unflat, flat, tensors in zip(self._unflat[k], flats, old, strict=True)
                ]
            else:
                specs = [self._specs[i] for i in chunks.tensors]
                over_all = list(map(arrays.over_all, zip(*old, strict=True), specs))
                self._under_way = program(chunk, over_all)
                each = map(arrays.local_parts, self._under_way, specs)
                gathered = [list(parts) for parts in zip(*each, strict=True)]
            for replica_params, parts in zip(new, gathered, strict=True):
                for i, part in zip(chunks.tensors, parts, strict=True):
                    replica_params[i] = part
            if arrays.is_ring and k + 1 < len(self._programs):
                self.wait()
        return new

    def wait(self) -> None:
        """Block until parameters are gathered: Gloo mixes up collectives that are independent."""
        jax.block_until_ready(self._under_way)
        self._under_way = []


def unflat(chunks: Chunks, flat: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """The whole parameters of a bucket, from their concatenated chunks."""
    new = chunks.unflat(flat, [x.shape for x in like])
    return [x.astype(old.dtype) for x, old in zip(new, like, strict=True)]

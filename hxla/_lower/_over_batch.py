"""The first pass of a loss over the whole batch: what the second one is given of each microbatch.

Embeddings of all microbatches go through host memory to every process, and each runs the same
program of the whole batch: no bit depends on who embedded what.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._core._types import PyTree
from .._jax._jaxpr import program_text
from .._jax._local_clients import is_here
from .._model._loss import MetricColumns, as_sums
from .._model._over_batch import ToEmbed, TracedOverBatch, WithGradients
from .._plan._plan_parts import SumsForm
from ._forward import Forward
from ._host_sums import HostSums
from ._options import compiler_options, extra_bytes
from ._replica import Replica

#: A microbatch to embed: its number, what says which it is to `Forward`, its arrays.
Work = tuple[int, Any, PyTree]


class OverBatchPass:
    """Embeds microbatches on replicas, and finds what the whole batch says of its examples.

    Args:
        traced: The loss, with the shapes of a microbatch.
        forward: Embeds one.
        host: Sums over all processes.
        replica: The first local one.
        sums: The plan's.
    """

    def __init__(
        self,
        traced: TracedOverBatch,
        forward: Forward,
        host: HostSums,
        replica: Replica,
        sums: SumsForm,
    ):
        self._traced, self._forward, self._host = traced, forward, host
        self._device = next(d for d in replica.devices if is_here(d))
        self._options = compiler_options(self._device.platform, sums)
        self._compiled: dict[tuple[str, int], Any] = {}
        self.metrics: tuple[MetricColumns, ...] = ()

    # -- embeddings ------------------------------------------------------------------------------

    def embedded(
        self,
        params: Sequence[Any],
        aux: Sequence[Any],
        work: Sequence[Sequence[Work]],
        num_examples: int,
        on_exchange: Callable[[], object],
    ) -> list[np.ndarray]:
        """What `contrast` reads of so many examples: embeddings, then arrays of the batch.

        Args:
            params: For each local replica its parameters, whole.
            aux: The other variables, likewise.
            work: Microbatches of each local replica; the last of all may be shorter.
            num_examples: Of all processes.
            on_exchange: Called when the local microbatches are done, and others are waited for.
        """
        found = []
        for i, own in enumerate(work):
            for index, where, batch in own:
                run = self._forward.run(i, params[i], aux[i], where, ToEmbed(batch))
                if self._forward.is_led_here(i):
                    read = self._traced.read_of(batch)
                    found.append((index, [*jax.tree.leaves(run), *read]))
        whole = [np.zeros(x.shape, x.dtype) for x in self._traced.operands(num_examples)]
        for index, arrays in found:
            start = index * self._traced.size
            for host, x in zip(whole, arrays, strict=True):
                host[start : start + len(x)] = np.asarray(x)
        on_exchange()
        return [self._host.exchange_bits(host) for host in whole]

    # -- the whole batch -------------------------------------------------------------------------

    def gradients(self, operands: Sequence[np.ndarray]) -> tuple[PyTree, PyTree]:
        """What `contrast` returns, as rows, and the gradient of the sum of losses by embeddings.

        Args:
            operands: Of `embedded`.
        """
        return jax.device_get(self._run("gradients", operands))  # type: ignore[no-any-return]

    def row(self, operands: Sequence[np.ndarray]) -> np.ndarray:
        """The sums of a batch, as `MicrobatchSums.row` has those of a microbatch.

        Args:
            operands: Of `embedded`, or rows of them.
        """
        return np.asarray(self._run("row", operands))

    def _gradients(self, operands: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        embeddings, batch = self._traced.arguments(operands)

        def total(embeddings: PyTree) -> tuple[jax.Array, PyTree]:
            out = self._traced.loss.outputs(embeddings, batch)
            return as_sums(out, len(operands[0])).loss, out

        gradients, out = jax.grad(total, has_aux=True)(embeddings)
        return out, gradients

    def _row(self, operands: Sequence[jax.Array]) -> jax.Array:
        embeddings, batch = self._traced.arguments(operands)
        out = self._traced.loss.outputs(embeddings, batch)
        found = as_sums(out, len(operands[0]), padded_size=self._traced.batch_size)
        self.metrics = found.metrics  # the same in every trace
        return found.row

    def _run(self, name: str, operands: Sequence[Any]) -> Any:
        placed = [jax.device_put(x, self._device) for x in operands]
        return self._program(name, len(operands[0]))(placed)

    def _program(self, name: str, num_examples: int) -> Any:
        key = name, num_examples
        if key not in self._compiled:
            function = {"gradients": self._gradients, "row": self._row}[name]
            sharding = jax.sharding.SingleDeviceSharding(self._device)
            shapes = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x in self._traced.operands(num_examples)
            ]

            def hxla_over_batch(operands: Sequence[jax.Array]) -> Any:
                return function(operands)

            run = jax.jit(hxla_over_batch, compiler_options=self._options)
            self._compiled[key] = run.lower(shapes).compile()
        return self._compiled[key]

    def texts(self) -> dict[str, str]:
        """What stands for the programs, which processes compare."""
        return {"program of the whole batch": program_text(self._traced.program[0])}

    # -- a step ----------------------------------------------------------------------------------

    def compile(self, where: Any) -> None:
        """Compile what a step runs.

        Args:
            where: Says which microbatch is embedded.
        """
        self._forward.compile(where, ToEmbed(self._traced.batch))
        self._program("gradients", self._traced.batch_size)

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state."""
        own = (extra_bytes(program) for program in self._compiled.values())
        operands = sum(
            x.size * x.dtype.itemsize for x in self._traced.operands(self._traced.batch_size)
        )
        return max(self._forward.memory_bytes(), operands + max(own, default=0))

    def second(
        self,
        ids: Sequence[range],
        batches: Sequence[Sequence[PyTree]],
        found: tuple[PyTree, PyTree],
    ) -> list[list[WithGradients]]:
        """The microbatches of the second pass.

        Args:
            ids: Of each local replica.
            batches: Their arrays.
            found: Of `gradients`.
        """
        size = self._traced.size

        def rows(index: int, batch: PyTree) -> WithGradients:
            cut = functools.partial(jax.tree.map, lambda x: x[index * size : (index + 1) * size])
            return WithGradients(batch, *map(cut, found))

        return [
            [rows(index, batch) for index, batch in zip(own, arrays, strict=True)]
            for own, arrays in zip(ids, batches, strict=True)
        ]

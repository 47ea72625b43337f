"""What a traced loss asks of devices by cuDNN's fused attention."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from ..core.errors import LossError
from ..jax.fused_attention import PRIMITIVES, attention_shape
from .graph import Graph
from .operations import Op, source_of


def _attentions(ops: Sequence[Op], where: str = "") -> Iterator[tuple[Op, str]]:
    """The operations in cuDNN's attention, each with its source line or that of its caller."""
    for op in ops:
        here = source_of(op.eqn) or where
        if op.name in PRIMITIVES:
            yield op, here
        yield from _attentions(op.body, here)


def _head_dim(op: Op) -> int:
    of = attention_shape([v.aval.shape for v in op.eqn.invars], op.eqn.params)
    return max(of.head_dim, of.value_dim)


def largest_head(graph: Graph) -> int | None:
    """The size of the largest head of cuDNN's attention in a loss; None: it calls none."""
    return max((_head_dim(op) for op, _ in _attentions(graph.ops)), default=None)


def refuse_wide_attention(graph: Graph) -> None:
    """Refuse cuDNN's attention in float32.

    Raises:
        LossError: If it would compute in float32, with the source line and the remedy.
    """
    for op, where in _attentions(graph.ops):
        if op.eqn.invars[0].aval.dtype == jnp.float32:
            raise LossError(
                f"the loss calls cuDNN's attention in float32 ({where}), which has bfloat16 and "
                "float16 only: pass precision='bf16' or 'fp16', cast query, key and value in the "
                "model, or leave out implementation='cudnn'"
            )

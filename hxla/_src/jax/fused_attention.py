"""cuDNN's fused attention, traced on machines without its library or a card.

`jax.nn.dot_product_attention(implementation="cudnn")` asks the present machine for cuDNN and for
its card, and refuses float32. A plan may be for other devices, and a precision policy casts the
operands only after the trace. So hxla answers jax's questions while it traces a loss, and checks
the plan's devices and the final dtypes itself.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

cudnn: Any = fused_attention_stablehlo

FORWARD = "dot_product_attention_fwd_wrapper"
#: The primitives of cuDNN's attention and of its gradient.
PRIMITIVES = frozenset({FORWARD, "dot_product_attention_bwd_wrapper"})

_VERSION = 91300  # 9.13 has all that jax asks of a version
_is_traced = ContextVar("_is_traced", default=False)


@contextlib.contextmanager
def traced_anywhere() -> Iterator[None]:
    """Trace cuDNN's attention for any device, in float32 too."""
    _install()
    token = _is_traced.set(True)
    try:
        yield
    finally:
        _is_traced.reset(token)


@functools.cache
def _install() -> None:
    """Put hxla's answers in place; outside a trace of hxla's they are jax's own."""

    def replace(name: str, answer: Callable[..., Callable[..., Any]]) -> None:
        check = getattr(cudnn, name, None)
        if check is not None:  # another jax fails at this attention only
            setattr(cudnn, name, functools.wraps(check)(answer(check)))

    def version(check: Callable[[], int]) -> Callable[[], int]:
        is_absent = cudnn.cuda_versions is None
        return lambda: _VERSION if is_absent and _is_traced.get() else check()

    def capability(check: Callable[[str], bool]) -> Callable[[str], bool]:
        # A rule may be traced later than its loss, where a gradient is lowered.
        return lambda least: _is_traced.get() or not _has_cuda() or check(least)

    def layout(check: Callable[..., None]) -> Callable[..., None]:
        def checked(*operands: Any) -> None:
            check(*(map(_as_low, operands) if _is_traced.get() else operands))

        return checked

    def masked(number: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def large(dtype: Any) -> Any:
            is_wide = _is_traced.get() and dtype == jnp.float32
            # That of float16 is large enough, and exact in either dtype of a policy.
            return number(jnp.dtype(jnp.float16)).astype(dtype) if is_wide else number(dtype)

        return large

    replace("check_cudnn_version", version)
    replace("check_compute_capability", capability)
    replace("check_layout", layout)
    replace("get_large_negative_number", masked)


def _has_cuda() -> bool:
    return "cuda" in cudnn.xla_bridge.get_backend().platform_version


def _as_low(x: Any) -> Any:
    """A float32 operand as it is after the policy's cast, for a check of its dtype."""
    is_wide = getattr(x, "dtype", None) == jnp.float32
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if is_wide else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of a fused attention.

    Attributes:
        heads: The number of heads of the queries.
        queries: The number of positions of the queries.
        keys: The number of positions of keys and values.
        head_dim: The size of a head of queries and keys.
        value_dim: The size of a head of values.
        is_causal: Whether a position reads only those before it.
        heads_dim: The dimension of the operands that runs over heads.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    is_causal: bool
    heads_dim: int

    @property
    def flops(self) -> int:
        """The operations of a forward; the kernel skips what a causal mask leaves out.

        References:
            Dao, "FlashAttention-2", 2023, section 4.1.
        """
        every = self.batch * self.heads * self.queries * self.keys
        return 2 * every * (self.head_dim + self.value_dim) // (2 if self.is_causal else 1)


def attention_shape(shapes: Sequence[Sequence[int]], params: dict[str, Any]) -> AttentionShape:
    """The sizes of an equation of `PRIMITIVES`.

    Args:
        shapes: The shapes of its operands.
    """
    heads = 1 if params["layout"] == cudnn.AttentionLayout.BNTH.value else 2
    positions = 3 - heads
    query, key, value = shapes[:3]
    return AttentionShape(
        batch=query[0],
        heads=query[heads],
        queries=query[positions],
        keys=key[positions],
        head_dim=query[3],
        value_dim=value[3],
        is_causal="CAUSAL" in params["mask_type"].name,
        heads_dim=heads,
    )


def is_statistic(shape: Sequence[int]) -> bool:
    """Whether an operand or a result of `PRIMITIVES` is the softmax's statistics, in float32."""
    return len(shape) == 3


def split_dims(
    shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]], params: dict[str, Any]
) -> list[tuple[str, tuple[int | None, ...], tuple[int | None, ...]]]:
    """The ways to split an equation of `PRIMITIVES`: by examples, and by heads if all have as many.

    Returns:
        For each way its name and the dimension of each operand and of each result, or None.
    """
    of = attention_shape(shapes, params)
    if any(math.prod(x) for x in shapes[6:8]):  # offsets of several sequences in one row
        return []
    # The dimension by an array's rank; heads of a bias, the fourth operand and result, are others.
    ways = {"batch": (of.batch, {4: 0, 3: 0, 1: 0}, {4: 0})}
    if len({x[of.heads_dim] for x in shapes[:3]}) == 1:
        ways["heads"] = of.heads, {4: of.heads_dim, 3: 1}, {4: 1}

    def dims(arrays: Sequence[Sequence[int]], way: str) -> tuple[int | None, ...]:
        size, usual, of_bias = ways[way]
        found = [(of_bias if i == 3 else usual).get(len(x)) for i, x in enumerate(arrays)]
        return tuple(
            d if d is not None and x[d] == size else None
            for d, x in zip(found, arrays, strict=True)
        )

    return [
        (way, dims(shapes, way), dims(results, way)) for way, (size, *_) in ways.items() if size > 1
    ]

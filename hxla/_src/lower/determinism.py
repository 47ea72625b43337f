"""The determinism level of a plan's devices, and its reasons: the levels of EasyScale.

References:
    Li et al., "EasyScale", SC 2023, section 3.3 (levels D0, D1 and D2, and the scan of a model for
    operators that depend on the GPU).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.graph import Graph, leaves, shapes_of
from ..graph.precision import members
from ..jax.jaxpr import ClosedJaxpr, as_function, inner_jaxpr, inner_programs, kind_of, source_of
from ..jax.jaxpr import Literal as Constant
from ..model.plain_arrays import root_key
from ..plan.plan import Plan

_PRODUCTS = members("low") | {"experts"}
_SUMS = frozenset(
    [
        "cumlogsumexp",
        "cumprod",
        "cumsum",
        "psum",
        "psum2",
        "psum_invariant",
        "reduce_prod",
        "reduce_sum",
        "reduce_window_sum",
        "scatter-add",
        "scatter_add",
    ]
)
_MULTIPLIES = frozenset({"mul", "square"})
_ADDS = frozenset({"add", "add_any", "sub"})
_MOVES = members("view") | members("gathers") | members("joins") | {"neg", "select_n"}
# IEEE 754 defines these exactly, and all kinds of devices follow it.
_EXACT = frozenset(
    [
        "abs",
        "ceil",
        "clamp",
        "floor",
        "max",
        "min",
        "reduce_max",
        "reduce_min",
        "reduce_precision",
        "round",
        "sign",
        "random_wrap",
        "random_unwrap",
        "iota",
    ]
)
_WORDS = {
    "products": "products, whose tiles and order of additions are the card's",
    "sums": "sums, whose order is the card's",
    "functions": "functions, divisions and roots, which each backend approximates",
    "multiply-adds": "products that are added, in one rounding or two as the compiler likes",
    "others": "operations whose rounding is not known",
}
_MOST_NAMED = 3
_PROMISES = {
    "D0": "the same devices with the same counts give the same bits",
    "D1": "devices of this kind give the same bits, in any number and at any speed",
    "D2": "all kinds of devices give the same bits",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Determinism:
    """The determinism level of a plan, as `hxla.determinism` returns it.

    Attributes:
        level: `D0`: the same devices with the same counts give the same bits. `D1`: so does any
            number of replicas on devices of this kind, whatever their speeds and counts. `D2`: so
            do devices of other kinds.
        reasons: The reasons for the level, and against a higher one, in words.
    """

    level: Literal["D0", "D1", "D2"]
    reasons: tuple[str, ...]

    @property
    def promise(self) -> str:
        """What the level means, as a clause without a full stop."""
        return _PROMISES[self.level]

    @property
    def summary(self) -> str:
        """The promise in one line."""
        return f"bits: {self.promise} (details: hxla plan)"

    def __str__(self) -> str:
        return f"bits: {self.level}, " + "; ".join(self.reasons)


def determinism(graph: Graph, plan: Plan) -> Determinism:
    """Say which level of determinism a plan's devices keep, and why.

    The equations of the traced loss, and of its gradient where that decides, are searched for
    equations whose rounding depends on the kind of a device. Unknown equations count as such.

    Args:
        graph: The traced loss, `Job.graph`.
        plan: The plan: its devices, its sums and its axes.

    Returns:
        The level; `print` shows it in one line.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((4, 1024), "float32")}
        >>> graph = hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> plan = hxla.make_plan(graph, 2, batch_size=32)
        >>> hxla.determinism(graph, plan).level
        'D1'

    References:
        Li et al., "EasyScale", SC 2023, section 3.3.
    """
    kinds = sorted({device.arithmetic for device in plan.devices})
    if plan.sums.kind == "float":
        why = (
            "float sums depend on which replica adds what: "
            "reduction='exact' gives D1 on like devices"
        )
        return Determinism(level="D0", reasons=(why,))
    classes = _device_dependent(graph)
    reasons = []
    if plan.is_cut_free:
        reasons.append("replicas may be cut in any way (numerics.cut of 'any')")
    elif plan.axes:
        axes = ", ".join(axis.name for axis in plan.axes)
        reasons.append(f"only for replicas that are sharded over {axes} in the same way")
    if not classes:
        reasons.insert(0, "no operation of the gradient rounds as its device likes")
        if len(kinds) > 1:
            reasons.append("the update is made on one device for all, whose kind is to stay")
        return Determinism(level="D2", reasons=tuple(reasons))
    listed = "; ".join(f"{_WORDS[c]} ({_listed(places)})" for c, places in classes.items())
    if len(kinds) > 1:
        why = (
            f"{' and '.join(kinds)} round unlike: which of them runs which microbatch decides, so "
            "counts are to stay"
        )
        return Determinism(level="D0", reasons=(why, *reasons, f"no D2: {listed}"))
    why = f"sums are exact, so any number of {kinds[0]} devices and any counts will do"
    return Determinism(level="D1", reasons=(why, *reasons, f"no D2: {listed}"))


def _listed(places: Sequence[str]) -> str:
    each = list(dict.fromkeys(places))
    more = f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
    return ", ".join(each[:_MOST_NAMED]) + more


def _device_dependent(graph: Graph) -> dict[str, list[str]]:
    """The classes of equations whose rounding depends on the device, with names and lines.

    The backward pass is traced only if the forward pass has none.
    """
    forward = dependent(op.eqn for op in leaves(graph.ops))
    return forward or dependent(_equations(_gradient(graph).jaxpr))


def dependent(equations: Iterable[Any]) -> dict[str, list[str]]:
    """The equations whose rounding depends on the device.

    Args:
        equations: Equations in order, without inner programs.

    Returns:
        For each class, in a fixed order, the name and line of every equation.
    """
    by_class: dict[str, list[str]] = {}
    products: set[Any] = set()  # variables with a product, perhaps moved
    for eqn in equations:
        operands = [v for v in eqn.invars if not isinstance(v, Constant)]
        is_product = not products.isdisjoint(operands)
        kind = _class_of(eqn, of_product=is_product)
        name = eqn.primitive.name
        if (name in _MULTIPLIES and not _is_by_power_of_two(eqn)) or (
            is_product and (name in _MOVES or name in _MULTIPLIES)
        ):
            products.update(eqn.outvars)
        if kind is not None:
            file, _, line = source_of(eqn).rpartition("/")[2].rpartition(":")
            by_class.setdefault(kind, []).append(f"{name} {file}:{line}" if file else name)
    return {c: by_class[c] for c in _WORDS if c in by_class}


def _class_of(eqn: Any, *, of_product: bool) -> str | None:
    name = eqn.primitive.name
    if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        # Integer arithmetic and comparisons do not round.
        return None
    if name in _PRODUCTS:
        return "products"
    if name in _SUMS:
        adds = name != "reduce_sum" or eqn.invars[0].aval.size > eqn.outvars[0].aval.size
        return "sums" if adds else None
    if name in _ADDS:
        return "multiply-adds" if of_product else None
    if name in _MULTIPLIES or name in _MOVES or name in _EXACT:
        return None
    if name in members("float32") or name in members("follows"):
        return "functions"
    return "others"


def _is_by_power_of_two(eqn: Any) -> bool:
    constants: list[Any] = [v for v in eqn.invars if isinstance(v, Constant)]
    scalars = [
        np.asarray(v.val).astype(np.float64)
        for v in constants
        if not v.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.floating)
    ]
    return any(np.frexp(x)[0] in (0.5, -0.5) for x in scalars)


def calls_host(program: ClosedJaxpr) -> bool:
    """Whether a program calls functions of the user or of libraries, which may raise errors."""

    def calls(jaxpr: Any) -> bool:
        return any(
            "callback" in eqn.primitive.name
            or eqn.primitive.name == "ffi_call"
            or any(map(calls, inner_programs(eqn)))
            for eqn in jaxpr.eqns
        )

    return calls(program.jaxpr)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations without known inner programs, including those of inner programs."""
    for eqn in jaxpr.eqns:
        inner = inner_jaxpr(eqn)
        if inner is not None and kind_of(eqn) not in ("leaf", None):
            yield from _equations(inner.jaxpr)
        else:
            yield eqn


def _gradient(graph: Graph) -> Any:
    program = as_function(graph.program)

    def loss(params: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Any]:
        value, *other = program(*params, *rest)
        return value, other

    params = shapes_of(graph, graph.param_values)
    rest = [
        *shapes_of(graph, graph.aux_values),
        jax.eval_shape(root_key, 0),
        *shapes_of(graph, graph.batch_values),
    ]
    return jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params, rest)

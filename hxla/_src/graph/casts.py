"""A program run again under a precision policy: each equation in the dtype of its class.

The rule of a `custom_jvp` or `custom_vjp` is traced with the function's traced dtypes, and the
resulting program runs under the policy like any other.

Arrays that are float32 in the trace may become low; dtypes that the model sets stay. The casts are
part of the program, so gradients pass back through them: the gradient of a parameter that is cast
where it is read accumulates in float32.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from ..core.types import PyTree
from ..jax.fused_attention import PRIMITIVES as ATTENTION
from ..jax.fused_attention import is_statistic
from ..jax.jaxpr import (
    ClosedJaxpr,
    Literal,
    checkpoint_like,
    in_place_of,
    inner_jaxpr,
    kind_of,
    run_as,
    run_with,
    scan_counts,
    sources,
)
from ..model.functional import Functional, leaf_names
from .precision import class_of, float8_product, wanted_in_float32


class CastLike(Protocol):
    """See `Cast`."""

    @property
    def x(self) -> Any: ...
    @property
    def is_low(self) -> bool: ...
    def to(self, dtype: Any) -> Any: ...


C = TypeVar("C", bound=CastLike)


def run_custom(
    eqn: Any,
    operands: Sequence[C],
    wanted: Sequence[bool],
    *,
    run: Callable[[ClosedJaxpr, Sequence[C], Sequence[bool]], list[C]],
    cast: Callable[[Any, C | None], C],
) -> list[C]:
    """Run an equation with custom gradient rules under the policy, and its rules too.

    Args:
        eqn: A `custom_jvp_call` or `custom_vjp_call`.
        wanted: For each result whether it must be float32.
        run: Runs a program under the policy.
        cast: Wraps an array, with the attributes of an earlier cast or, for None, without.
    """
    closed = inner_jaxpr(eqn)
    assert closed is not None
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    is_float = [jnp.issubdtype(s.dtype, jnp.inexact) for s in shapes]
    float_places, last = [i for i, f in enumerate(is_float) if f], list[C]()

    def as_casts(arrays: Sequence[Any]) -> list[C]:
        return [cast(x, c) for x, c in zip(arrays, operands, strict=True)]

    def primal(*arrays: Any) -> list[Any]:
        last[:] = run(closed, as_casts(arrays), wanted)
        return [c.x for c in last]

    def float_call(inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        def call(*floats: Any) -> list[Any]:
            replaced = dict(zip(float_places, floats, strict=True))
            return run_with(eqn, [replaced.get(i, x) for i, x in enumerate(inputs)])

        return call

    arrays = [jnp.asarray(c.x) for c in operands]
    jax.eval_shape(primal, *arrays)  # a rule may be traced alone
    like, num = list(last), len(last)
    in_float32 = [not c.is_low for c in like]

    def as_results(outputs: Sequence[C]) -> list[Any]:
        return [
            c.to(old.x.dtype) if jnp.issubdtype(old.x.dtype, jnp.inexact) else c.x
            for c, old in zip(outputs, like, strict=True)
        ]

    def result_casts(results: Sequence[Any]) -> list[C]:
        return [cast(x, c) for x, c in zip(results, like, strict=True)]

    if eqn.primitive.name == "custom_jvp_call":

        def jvp_of_rule(*both: Any) -> Any:
            inputs, tangents = both[: len(shapes)], both[len(shapes) :]
            return jax.jvp(float_call(inputs), tuple(inputs[i] for i in float_places), tangents)

        def tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            traced = jax.make_jaxpr(jvp_of_rule)(*shapes, *(shapes[i] for i in float_places))
            tangent_casts = [cast(tangents[i], None) for i in float_places]
            outputs = run(traced, [*as_casts(primals), *tangent_casts], in_float32 * 2)
            return as_results(outputs[:num]), as_results(outputs[num:])

        with_jvp = jax.custom_jvp(lambda *xs: primal(*xs))
        with_jvp.defjvp(tangent)
        return result_casts(with_jvp(*arrays))

    tree: list[Any] = []
    residuals: list[C] = []

    def vjp_of_rule(*inputs: Any) -> list[Any]:
        out, pull = jax.vjp(float_call(inputs), *(inputs[i] for i in float_places))
        leaves, treedef = jax.tree.flatten(pull)
        tree[:] = [treedef]
        return [*out, *leaves]

    forward_program = jax.make_jaxpr(vjp_of_rule)(*shapes)
    residual_shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in forward_program.jaxpr.outvars[num:]
    ]
    out_shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    def forward(*xs: Any) -> tuple[Any, Any]:
        wants = [*in_float32, *[False] * len(residual_shapes)]
        outputs = run(forward_program, as_casts(xs), wants)
        residuals[:] = outputs[num:]
        return as_results(outputs[:num]), [c.x for c in outputs[num:]]

    def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        saved_casts = [cast(x, c) for x, c in zip(saved, residuals, strict=True)]
        back = [cast(x, None) for x in cotangents]
        # Traced late: a rule nested in the forward of another may have no derivative.
        backward_program = jax.make_jaxpr(
            lambda leaves, back: list(jax.tree.unflatten(tree[0], leaves)(list(back)))
        )(residual_shapes, out_shapes)
        grads = iter(run(backward_program, [*saved_casts, *back], [False] * len(float_places)))
        dtypes = [x.dtype for x in arrays]
        return tuple(
            next(grads).to(d) if f else None for d, f in zip(dtypes, is_float, strict=True)
        )

    with_vjp = jax.custom_vjp(lambda *xs: primal(*xs))
    with_vjp.defvjp(forward, backward)
    return result_casts(with_vjp(*arrays))


_F32 = np.dtype(np.float32)
#: Origins of a float32 array: no float32 operation, a float32 operation, or a float32 reduction to
#: fewer elements. Operands that meet such a statistic are widened to float32.
FREE, MADE, STATISTIC = 0, 1, 2
_PRODUCTS = {
    "float32": (jax.lax.Precision.HIGHEST,) * 2,
    "tf32": (jax.lax.Precision.HIGH,) * 2,
}


class CastException(Protocol):
    """See `PrecisionException`."""

    @property
    def path(self) -> str | None: ...
    @property
    def scope(self) -> str | None: ...
    @property
    def compute(self) -> str: ...


class CastPolicy(Protocol):
    """See `Precision`."""

    @property
    def is_own(self) -> bool: ...
    @property
    def params(self) -> str: ...
    @property
    def compute(self) -> str: ...
    @property
    def products(self) -> str: ...
    @property
    def buffers(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def exceptions(self) -> Sequence[CastException]: ...


@dataclasses.dataclass(frozen=True)
class Cast:
    """An array of the program, in the dtype that the policy gave it.

    Attributes:
        kind: The origin of a float32 array: `FREE`, `MADE` or `STATISTIC`.
        is_constant: Whether it depends on no argument.
        extent: The smallest nonzero and the largest magnitude of a constant; None: unknown.
        path: The path of the parameter that it is a view of, or None.
    """

    x: Any
    kind: int = FREE
    is_constant: bool = False
    extent: tuple[float, float] | None = None
    path: str | None = None
    _wide: list[Any] = dataclasses.field(default_factory=list, init=False, compare=False)

    @property
    def is_low(self) -> bool:
        """Whether it has fewer bits than float32."""
        return jnp.issubdtype(self.x.dtype, jnp.floating) and self.x.dtype.itemsize < 4

    @classmethod
    def constant(cls, x: Any, var: Any) -> "Cast":
        """The cast of a literal, or of an array that the loss closes over."""
        if not hasattr(x, "shape"):  # a Python number
            x = np.asarray(x, var.aval.dtype)
        if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
            return cls(x, is_constant=True)
        host = np.abs(np.asarray(x, np.float64))
        nonzero = host[(host > 0) & np.isfinite(host)]
        extent = (float(nonzero.min()), float(nonzero.max())) if nonzero.size else (1.0, 1.0)
        return cls(x, FREE, True, extent)

    def to(self, dtype: Any) -> Any:
        """The array in a dtype."""
        if self.x.dtype == dtype:
            return self.x
        if isinstance(self.x, np.ndarray | np.generic):
            return np.asarray(self.x).astype(dtype)
        if not (self.is_low and dtype == _F32):
            return jax.lax.convert_element_type(self.x, dtype)
        if not self._wide:  # once, so that the gradients of all readers add in float32
            self._wide.append(jax.lax.convert_element_type(self.x, dtype))
        return self._wide[0]

    def fits(self, dtype: Any) -> bool:
        """Whether a dtype represents a constant without overflow or underflow."""
        if self.extent is None:
            return True
        info = jnp.finfo(dtype)
        return self.extent[0] >= float(info.tiny) and self.extent[1] <= float(info.max)


def _is_f32(v: Any) -> bool:
    return getattr(v.aval, "dtype", None) == _F32


def _widened(cast: Cast, dtype: Any, shape: Sequence[int]) -> Any:
    """An operand in a dtype; if it is broadcast, its gradient accumulates in float32."""
    has_fewer = 0 < np.prod(cast.x.shape) < np.prod(shape)
    if has_fewer and not cast.is_constant and dtype != _F32:
        return jax.lax.convert_element_type(jnp.broadcast_to(cast.to(_F32), shape), dtype)
    return cast.to(dtype)


class Casts:
    """Runs a program under a policy.

    Attributes:
        used: Indices of the policy's exceptions that some operation matched.
    """

    def __init__(self, policy: CastPolicy):
        self.used: set[int] = set()
        self._low = jnp.dtype(policy.compute)
        self._products = _PRODUCTS.get(policy.products)
        self._is_float8 = policy.products == "float8"
        self._exceptions = [
            (re.compile(rf"(?:^|/)(?:{e.path or e.scope})"), e.path is None, jnp.dtype(e.compute))
            for e in policy.exceptions
        ]

    def run(
        self, closed: ClosedJaxpr, arguments: Sequence[Cast], results: Sequence[bool], scope: str
    ) -> list[Cast]:
        """Run a program.

        Args:
            results: For each result whether it must be float32.
            scope: The name stack around the program.
        """
        jaxpr = closed.jaxpr
        wanted = wanted_in_float32(jaxpr, results)
        env: dict[Any, Cast] = {
            v: Cast.constant(x, v) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)
        }
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> Cast:
            return Cast.constant(v.val, v) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            operands = [read(v) for v in eqn.invars]
            casts = self._equation(eqn, operands, [v in wanted for v in eqn.outvars], here)
            env.update(zip(eqn.outvars, casts, strict=True))
        return [
            Cast(c.to(_F32), MADE) if in_float32 and c.is_low and _is_f32(v) else c
            for v, in_float32 in zip(jaxpr.outvars, results, strict=True)
            for c in [read(v)]
        ]

    def _equation(
        self, eqn: Any, operands: list[Cast], wanted: list[bool], scope: str
    ) -> list[Cast]:
        name, kind = eqn.primitive.name, kind_of(eqn)
        inner = inner_jaxpr(eqn)
        with contextlib.ExitStack() as stack:
            if kind == "inlined" and inner is not None:
                stack.enter_context(in_place_of(eqn))
                return self.run(inner, operands, wanted, scope)
            run_whole = {"custom": self._custom, "remat": self._remat, "scan": self._scan}.get(
                str(kind), {"cond": self._cond, "while": self._while}.get(name)
            )
            if run_whole is not None:
                stack.enter_context(in_place_of(eqn))
                return run_whole(eqn, operands, wanted, scope)
        if not any(map(_is_f32, (*eqn.invars, *eqn.outvars))):
            return self._as_traced(eqn, operands)
        exception = self._dtype_of(operands, scope)
        low = exception or self._low
        op_class = class_of(eqn)
        if op_class == "view" or (op_class == "gathers" and not operands[0].is_low):
            return self._view(eqn, operands)
        if name in ATTENTION:
            return self._attention(eqn, operands, low)
        if op_class == "low" and all(map(_is_f32, eqn.invars)):
            reads = any(c.path is not None for c in operands)
            if self._is_float8 and exception is None and reads and name == "dot_general":
                return self._float8_product(eqn, operands)
            return self._product(eqn, operands, low)
        if op_class == "gathers":
            [gathered] = self._as_traced(eqn, operands)
            with in_place_of(eqn):
                return [Cast(gathered.to(operands[0].x.dtype))]
        if op_class in ("follows", "joins"):
            return self._follow(eqn, operands, all(wanted), low)
        return self._as_traced(eqn, operands)

    def _dtype_of(self, operands: Sequence[Cast], scope: str) -> Any:
        """The dtype of the first exception that matches, or None."""
        paths = [c.path for c in operands if c.path is not None]
        for i, (pattern, is_scope, dtype) in enumerate(self._exceptions):
            if any(pattern.search(text) for text in ([scope] if is_scope else paths)):
                self.used.add(i)
                return dtype
        return None

    # -- equations without a body ----------------------------------------------------------------

    def _as_traced(self, eqn: Any, operands: Sequence[Cast]) -> list[Cast]:
        with in_place_of(eqn):
            arrays = [
                c.to(v.aval.dtype) if c.is_low else c.x
                for c, v in zip(operands, eqn.invars, strict=True)
            ]
        kind = MADE if any(map(_is_f32, eqn.invars)) else FREE
        return [Cast(x, kind) for x in run_with(eqn, arrays)]

    def _product(self, eqn: Any, operands: Sequence[Cast], low: Any) -> list[Cast]:
        params = {"preferred_element_type": low}
        if low == _F32 and eqn.params.get("precision") is None and self._products:
            params["precision"] = self._products
        with in_place_of(eqn):
            arrays = [c.to(low) for c in operands]
        return [Cast(x) for x in run_with(eqn, arrays, **params)]

    def _attention(self, eqn: Any, operands: Sequence[Cast], low: Any) -> list[Cast]:
        with in_place_of(eqn):
            arrays = [
                c.to(_F32 if is_statistic(v.aval.shape) else low) if _is_f32(v) else c.x
                for c, v in zip(operands, eqn.invars, strict=True)
            ]
        return [Cast(x) for x in run_with(eqn, arrays)]

    def _float8_product(self, eqn: Any, operands: Sequence[Cast]) -> list[Cast]:
        with in_place_of(eqn):
            arrays = [c.x if c.path is not None else c.to(self._low) for c in operands]
            return [Cast(float8_product(eqn, arrays, self._low))]

    def _view(self, eqn: Any, operands: Sequence[Cast]) -> list[Cast]:
        first, out = operands[0], eqn.outvars[0]
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == _F32:
            if _is_f32(eqn.invars[0]):
                return [first]
            is_float = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
            return [dataclasses.replace(self._as_traced(eqn, operands)[0], kind=2 * is_float)]
        arrays = run_with(eqn, [c.x for c in operands])
        grows = np.prod(out.aval.shape) > np.prod(eqn.invars[0].aval.shape)
        several = len(arrays) == len(operands)
        casts = []
        for i, x in enumerate(arrays):
            source = operands[i] if several else first
            kind = STATISTIC if grows and source.kind == MADE else source.kind
            casts.append(dataclasses.replace(source, x=x, kind=kind))
        return casts

    def _follow(self, eqn: Any, operands: Sequence[Cast], is_wanted: bool, low: Any) -> list[Cast]:
        shape = eqn.outvars[0].aval.shape if class_of(eqn) == "follows" else ()
        floats = [c for c, v in zip(operands, eqn.invars, strict=True) if _is_f32(v)]
        lows = any(c.is_low for c in floats)
        made = [c for c in floats if not c.is_low and c.kind == MADE]
        smaller = any(np.prod(c.x.shape) < np.prod(shape) for c in made)
        statistic = smaller or any(not c.is_low and c.kind == STATISTIC for c in floats)
        fits = all(c.fits(low) for c in floats if not c.is_low)
        is_low = lows and not is_wanted and not statistic and fits and low != _F32
        dtype = low if is_low else _F32
        with in_place_of(eqn):
            arrays = [
                (_widened(c, dtype, shape) if is_low else c.to(_F32)) if _is_f32(v) else c.x
                for c, v in zip(operands, eqn.invars, strict=True)
            ]
        kind = FREE
        if not is_low and (lows or made or statistic):
            kind = STATISTIC if statistic and not lows and (smaller or not made) else MADE
        constant = all(c.is_constant for c in operands)
        return [Cast(x, kind, constant) for x in run_with(eqn, arrays)]

    # -- equations that run programs -------------------------------------------------------------

    def _body(
        self, closed: ClosedJaxpr, operands: Sequence[Cast], results: Sequence[bool], scope: str
    ) -> tuple[Callable[..., list[Any]], list[Cast]]:
        """A program as a function of arrays, and the casts of its latest results."""
        last: list[Cast] = []

        def run(*arrays: Any) -> list[Any]:
            casts = [dataclasses.replace(c, x=x) for c, x in zip(operands, arrays, strict=True)]
            last[:] = self.run(closed, casts, results, scope)
            return [c.x for c in last]

        return run, last

    def _custom(self, eqn: Any, operands: list[Cast], wanted: list[bool], scope: str) -> list[Cast]:
        return run_custom(
            eqn,
            operands,
            wanted,
            run=lambda closed, casts, results: self.run(closed, casts, results, scope),
            cast=lambda x, c: Cast(x) if c is None else dataclasses.replace(c, x=x),
        )

    def _remat(self, eqn: Any, operands: list[Cast], wanted: list[bool], scope: str) -> list[Cast]:
        inner = inner_jaxpr(eqn)
        assert inner is not None
        run, last = self._body(inner, operands, wanted, scope)
        arrays = checkpoint_like(eqn, run)(*(c.x for c in operands))
        return [dataclasses.replace(c, x=x) for c, x in zip(last, arrays, strict=True)]

    def _scan(self, eqn: Any, operands: list[Cast], wanted: list[bool], scope: str) -> list[Cast]:
        inner = inner_jaxpr(eqn)
        assert inner is not None
        num_consts, num_carry = scan_counts(eqn)
        first = num_consts + num_carry
        # A carry that starts as a constant, such as zeros, is a sum: in float32.
        is_low = [
            _is_f32(v) and not c.is_constant and c.kind != STATISTIC
            for v, c in zip(eqn.invars[num_consts:first], operands[num_consts:first], strict=True)
        ]
        slices = [
            dataclasses.replace(c, x=jax.ShapeDtypeStruct(c.x.shape[1:], c.x.dtype))
            for c in operands[first:]
        ]
        while True:
            carry = [
                self._carried(c, v, low)
                for c, v, low in zip(
                    operands[num_consts:first], eqn.invars[num_consts:first], is_low, strict=True
                )
            ]
            body_operands = [*operands[:num_consts], *carry, *slices]
            results = [not low for low in is_low] + wanted[num_carry:]
            run, last = self._body(inner, body_operands, results, scope)
            jax.eval_shape(
                run, *(jax.ShapeDtypeStruct(c.x.shape, c.x.dtype) for c in body_operands)
            )
            stays = [low and c.is_low for low, c in zip(is_low, last, strict=False)]
            if stays == is_low:
                break
            is_low = stays

        def step(carried: Any, xs: Any) -> Any:
            out = run(*(c.x for c in operands[:num_consts]), *carried, *xs)
            return out[:num_carry], out[num_carry:]

        params = eqn.params
        ends, ys = jax.lax.scan(
            step,
            [c.x for c in carry],
            [c.x for c in operands[first:]],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        kinds = [dataclasses.replace(c, kind=min(c.kind, MADE)) for c in last]
        return [
            dataclasses.replace(c, x=x, is_constant=False, extent=None)
            for c, x in zip(kinds, [*ends, *ys], strict=True)
        ]

    def _carried(self, c: Cast, v: Any, is_low: bool) -> Cast:
        if not _is_f32(v):
            return dataclasses.replace(c, is_constant=False, extent=None)
        return Cast(jnp.asarray(c.to(self._low if is_low else _F32)), FREE if is_low else STATISTIC)

    def _while(self, eqn: Any, operands: list[Cast], _wanted: list[bool], scope: str) -> list[Cast]:
        params, num = eqn.params, len(eqn.outvars)
        start, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = [self._carried(c, v, False) for c, v in zip(operands, eqn.invars, strict=True)][
            last:
        ]
        test, _ = self._body(params["cond_jaxpr"], [*operands[:start], *carry], [False], scope)
        body, _ = self._body(
            params["body_jaxpr"], [*operands[start:last], *carry], [True] * num, scope
        )
        arrays = [c.x for c in operands]
        # Under `vmap` each row has a condition, and stays as it is once its own loop has ended.
        rows = params["cond_jaxpr"].out_avals[0].shape

        def goes_on(carried: list[jax.Array]) -> jax.Array:
            return test(*arrays[:start], *carried)[0]

        def run(carried: list[jax.Array]) -> list[jax.Array]:
            made = body(*arrays[start:last], *carried)
            if not rows:
                return made
            going = goes_on(carried)
            return [
                jnp.where(jnp.expand_dims(going, range(going.ndim, new.ndim)), new, old)
                for old, new in zip(carried, made, strict=True)
            ]

        any_goes_on = (lambda carried: goes_on(carried).any()) if rows else goes_on
        ends = jax.lax.while_loop(any_goes_on, run, [c.x for c in carry])
        return [Cast(x, MADE) for x in ends]

    def _cond(self, eqn: Any, operands: list[Cast], wanted: list[bool], scope: str) -> list[Cast]:
        bodies = [
            self._body(branch, operands[1:], wanted, scope) for branch in eqn.params["branches"]
        ]
        shapes = [jax.ShapeDtypeStruct(c.x.shape, c.x.dtype) for c in operands[1:]]
        for run, _ in bodies:
            jax.eval_shape(run, *shapes)
        like = [
            max(casts, key=lambda c: not c.is_low)
            for casts in zip(*(b[1] for b in bodies), strict=True)
        ]
        dtypes = [c.x.dtype for c in like]

        def branch(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            return lambda *operands: [
                Cast(x).to(d) if jnp.issubdtype(d, jnp.floating) else x
                for x, d in zip(run(*operands), dtypes, strict=True)
            ]

        arrays = [jnp.asarray(c.x) for c in operands[1:]]
        results = jax.lax.switch(operands[0].x, [branch(run) for run, _ in bodies], *arrays)
        return [Cast(x, min(c.kind, MADE)) for x, c in zip(results, like, strict=True)]


_Call = Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Any, PyTree]]


class PrecisionCalls:
    """Makes the calls of a model compute under a policy."""

    def __init__(self, model: Functional, policy: CastPolicy):
        self._policy = policy
        self._names = leaf_names(model.params)
        self._num_aux = len(jax.tree.leaves(model.aux))
        self.model = model
        self._casts: Casts | None = None
        if not policy.is_own:
            self._casts = Casts(policy)
            train, evaluate = self._with_policy(model.train), self._with_policy(model.evaluate)
            self.model = dataclasses.replace(model, train=train, evaluate=evaluate)

    def _with_policy(self, call: _Call) -> _Call:
        return run_as(call, self._run)

    def _run(self, closed: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
        assert self._casts is not None
        num, num_aux = len(self._names), self._num_aux
        casts = [Cast(x) for x in arguments]
        for i, name in enumerate(self._names):
            casts[i] = Cast(_rounded(arguments[i], self._policy.params), path=name)
        for i in range(num, num + num_aux):
            casts[i] = Cast(_rounded(arguments[i], self._policy.buffers))
        outs = closed.jaxpr.outvars
        results = self._casts.run(closed, casts, [True] * len(outs), "")
        arrays = [
            c.to(v.aval.dtype) if jnp.issubdtype(v.aval.dtype, jnp.floating) else c.x
            for c, v in zip(results, outs, strict=True)
        ]
        num_out = len(arrays) - num_aux
        arrays[:num_out] = [_rounded(x, self._policy.output) for x in arrays[:num_out]]
        # Variables that a call leaves unchanged were rounded only where they are read.
        known = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for i, source in enumerate(sources(closed)):
            if source is not None:
                arrays[i] = known.setdefault(source, arrays[i])
        return arrays

    def check_used(self) -> None:
        """Refuse exceptions that no operation of the calls so far matched.

        Raises:
            ConfigError: With each of them, and some parameter paths.
        """
        used = set() if self._casts is None else self._casts.used
        unused = [str(e) for i, e in enumerate(self._policy.exceptions) if i not in used]
        if unused:
            shown = ", ".join(self._names[:6]) + ", ..." * (len(self._names) > 6)
            raise ConfigError(
                f"precision.exceptions: no operation matches {'; '.join(unused)}. A path must "
                f"occur in that of a parameter ({shown}), a scope in the names of jax.named_scope, "
                "TaskGraphs or Linen modules; leave out exceptions for another model"
            )


def _rounded(x: Any, dtype: str) -> Any:
    """An array rounded to a dtype and cast back."""
    if dtype in ("model", "float32") or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if x.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return x
    return jax.lax.convert_element_type(jax.lax.convert_element_type(x, dtype), x.dtype)

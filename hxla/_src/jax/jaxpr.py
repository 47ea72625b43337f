"""All of jax's program representation that hxla uses, in one place.

A model written for `pmap` or `shard_map` averages over an axis such as `batch`. Here it runs on one
microbatch, so the axis has one member.

Results are followed to the arguments that they equal, or depend on.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend import core
from jax.interpreters import partial_eval

from .digest import fingerprint

ClosedJaxpr = core.ClosedJaxpr
Literal = core.Literal


def inner_jaxpr(eqn: Any) -> ClosedJaxpr | None:
    """The program inside an equation, if it has exactly one."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        if isinstance(inner, core.ClosedJaxpr):
            return inner
        if isinstance(inner, core.Jaxpr):
            return core.ClosedJaxpr(inner, ())
    return None


def inner_programs(eqn: Any) -> Iterator[core.Jaxpr]:
    """All programs inside an equation, branches and loops included."""
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, core.ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, core.Jaxpr):
                yield x


# fmt: off
_KINDS = {
    "inlined": {"call", "closed_call", "core_call", "jit", "pjit", "xla_metadata_call"},
    "custom": {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"},
    "remat": {"checkpoint", "remat", "remat2"},
    "scan": {"scan"},
    "leaf": {
        "composite", "cond", "custom_linear_solve", "custom_partitioning", "custom_vmap_call",
        "linear_call", "pallas_call", "reduce", "reduce_window", "remat_opt", "run_state",
        "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub",
        "scatter_add", "select_and_scatter", "shard_map", "while",
    },
}
# fmt: on


def kind_of(eqn: Any) -> str | None:
    """How an equation runs its inner programs.

    Returns:
        `inlined` (its program replaces it), `custom` (it has custom gradient rules), `remat`,
        `scan`, or `leaf` (it has no program, or runs as a whole). None for an unknown primitive
        with inner programs, whose use of them is unknown.
    """
    name = eqn.primitive.name
    known = next((kind for kind, names in _KINDS.items() if name in names), None)
    if known not in (None, "leaf"):
        return known if inner_jaxpr(eqn) is not None else None
    has_programs = next(inner_programs(eqn), None) is not None
    return None if has_programs and known is None else "leaf"


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried operands of a scan; slices follow."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from jax 0.12 on
    return len(consts), len(carry)


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A program as a function of its arguments; equations keep their name stacks."""
    return core.jaxpr_as_fun(closed)  # type: ignore[no-any-return]


def run_as(
    function: Callable[..., Any], run: Callable[[ClosedJaxpr, list[Any]], Sequence[Any]]
) -> Callable[..., Any]:
    """The same function of trees of arrays, with its program run by `run`."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = run(closed, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wrapped


def run_jaxpr(jaxpr: Any, arguments: Iterable[Any]) -> list[Any]:
    """Run a program without constants."""
    return list(as_function(ClosedJaxpr(jaxpr, ()))(*arguments))


def program_text(program: Any) -> str:
    """A program as text, without addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(program))


def with_results(closed: ClosedJaxpr, num: int) -> ClosedJaxpr:
    """A program with only its first `num` results."""
    jaxpr = closed.jaxpr
    if len(jaxpr.outvars) == num:
        return closed
    info = debug_info(len(jaxpr.invars), num)
    outvars = list(jaxpr.outvars[:num])
    return ClosedJaxpr(jaxpr.replace(outvars=outvars, debug_info=info), closed.consts)


def with_inner(eqn: Any, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Any:
    """An equation with each of its inner programs changed; any other unchanged."""
    if eqn.primitive.name not in ("jit", "pjit", "scan", "while", "cond", "checkpoint", "remat2"):
        return eqn

    def changed(value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return change(value)
        if isinstance(value, core.Jaxpr):
            return change(core.ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, tuple) and any(isinstance(v, core.ClosedJaxpr) for v in value):
            new = tuple(map(changed, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value

    params = {key: changed(value) for key, value in eqn.params.items()}
    same = all(params[key] is eqn.params[key] for key in params)
    return eqn if same else eqn.replace(params=params)


def splice(eqn: Any, function: Callable[..., Any]) -> list[Any]:
    """The equations of a function of arrays, in place of an equation.

    If a result of the function is an argument or a constant, or two are equal, the equation stays.
    """
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    traced = jax.make_jaxpr(function)(*shapes).jaxpr
    made = {v for e in traced.eqns for v in e.outvars}
    results = variables(traced.outvars)
    if traced.constvars or len(results) < len(eqn.outvars) or not made.issuperset(results):
        return [eqn]
    names = dict(zip(traced.invars, eqn.invars, strict=True))
    names |= dict(zip(traced.outvars, eqn.outvars, strict=True))

    return [renamed(e, names, source_info=eqn.source_info, ctx=eqn.ctx) for e in traced.eqns]


def renamed(eqn: Any, names: Mapping[Any, Any], **others: Any) -> Any:
    """An equation with variables replaced by `names`, and other fields by `others`."""
    replaced = {
        side: [v if isinstance(v, Literal) else names.get(v, v) for v in getattr(eqn, side)]
        for side in ("invars", "outvars")
    }
    return eqn.replace(**replaced, **others)


def with_source_of(eqn: Any, other: Any) -> Any:
    """Another equation that messages locate where this one is in the user's code."""
    info = other.source_info.replace(traceback=eqn.source_info.traceback)
    return other.replace(source_info=info)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program with its jitted functions inlined."""
    equations = []
    for eqn in closed.jaxpr.eqns:
        inner = inner_jaxpr(eqn) if eqn.primitive.name in ("jit", "pjit") else None
        equations += [eqn] if inner is None else splice(eqn, as_function(inlined(inner)))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def variables(values: Iterable[Any]) -> dict[Any, None]:
    """The variables among variables and literals, each once, in order."""
    return dict.fromkeys(v for v in values if not isinstance(v, Literal))


def backward_slice(
    equations: Sequence[Any], wanted: Iterable[Any], known: Container[Any] = ()
) -> list[Any]:
    """The equations, in order, that the wanted variables depend on.

    Args:
        known: Variables whose equations are not needed.
    """
    needed = {v for v in variables(wanted) if v not in known}
    needed_equations = []
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            needed_equations.append(eqn)
            needed.update(v for v in variables(eqn.invars) if v not in known)
    return needed_equations[::-1]


def part(
    jaxpr: Any,
    wanted: Sequence[Any],
    known: Container[Any] = (),
    inputs: Sequence[Any] | None = None,
) -> Any:
    """The program that computes some variables of a program.

    Args:
        known: See `backward_slice`.
        inputs: The arguments; None: all variables that it reads, constants of `jaxpr` included.
    """
    equations = backward_slice(jaxpr.eqns, wanted, known)
    if inputs is None:
        made = {v for eqn in equations for v in eqn.outvars if v not in known}
        read = variables(v for side in (*(e.invars for e in equations), wanted) for v in side)
        inputs = [v for v in read if v not in made]
    return core.Jaxpr(
        (),
        list(inputs),
        list(wanted),
        equations,
        frozenset().union(*(e.effects for e in equations)),
        debug_info=debug_info(len(inputs), len(wanted)),
    )


# Computing an element takes about as long as storing and loading it (exp, tanh on a CPU, measured).
# fmt: off
_CHEAP = frozenset({
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "div", "eq", "erf", "exp", "expand_dims", "ge", "gt", "integer_pow", "iota", "is_finite",
    "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "reshape",
    "rsqrt", "select_n", "sharding_constraint", "sign", "slice", "split", "sqrt", "square",
    "squeeze", "sub", "tanh", "transpose", "unstack", "xor",
})
# fmt: on
#: Those of `_CHEAP` that XLA calls expensive.
_SLOW = frozenset(
    {
        "div",
        "erf",
        "exp",
        "integer_pow",
        "log",
        "logistic",
        "rsqrt",
        "sqrt",
        "tanh",
    }
)


#: Element-wise primitives.
# fmt: off
BY_ELEMENT = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos",
    "div", "eq", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
    "optimization_barrier", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})
# fmt: on


def is_cheap(eqn: Any) -> bool:
    """Whether running an equation again costs hardly more than keeping its results."""
    inner = inner_jaxpr(eqn)
    if inner is not None:
        return eqn.primitive.name in ("jit", "pjit") and all(map(is_cheap, inner.jaxpr.eqns))
    return eqn.primitive.name in _CHEAP


def is_fused(eqn: Any) -> bool:
    """Whether XLA recomputes an equation's results for each reader instead of keeping them.

    Its fusion does so for element-wise work other than divisions, roots and the like.
    """
    inner = inner_jaxpr(eqn)
    if inner is not None:
        return eqn.primitive.name in ("jit", "pjit") and all(map(is_fused, inner.jaxpr.eqns))
    return eqn.primitive.name in _CHEAP - _SLOW


def run_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run one equation again, with its name stack and context."""
    values = {
        var: x for var, x in zip(eqn.invars, operands, strict=True) if not isinstance(var, Literal)
    }
    info = debug_info(len(values), len(eqn.outvars))
    alone = core.Jaxpr((), list(values), eqn.outvars, [eqn], eqn.effects, debug_info=info)
    return run_jaxpr(alone, values.values())


def run_with(eqn: Any, operands: Sequence[Any], **params: Any) -> list[Any]:
    """`run_equation` with operands and literals of other dtypes, and with other params."""
    if any(isinstance(v, Literal) for v in eqn.invars):
        eqn = eqn.replace(invars=fresh(tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)))
    return run_equation(eqn.replace(params=eqn.params | params) if params else eqn, operands)


@functools.cache
def fresh(shapes: Sequence[tuple[Any, Any]]) -> list[Any]:
    """New variables of these shapes and dtypes."""
    avals = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return list(jax.make_jaxpr(lambda *xs: xs)(*avals).jaxpr.invars)


@contextlib.contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """Trace with the name stack and the source line of an equation."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack):
        yield


def scopes_around(eqn: Any) -> tuple[str, bool]:
    """The scopes around an equation, and whether it belongs to a backward pass."""
    parts = eqn.source_info.name_stack.stack
    transforms = [p.name for p in parts if isinstance(p, source_info_util.Transform)]
    scopes = [p.name for p in parts if isinstance(p, source_info_util.Scope)]
    return "/".join(scopes), "transpose" in transforms


def source_of(eqn: Any) -> str:
    """The file and line of the user's code of an equation, or an empty string."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    for frame in traceback.frames:
        name = frame.file_name
        if "/site-packages/" not in name and "/hxla/_" not in name and "<" not in name:
            return f"{name}:{frame.line_num}"
    return ""


def is_of_jax(eqn: Any) -> bool:
    """Whether an equation runs a jitted function of jax itself, such as `jnp.where`."""
    inner = inner_jaxpr(eqn) if kind_of(eqn) == "inlined" else None
    file = "" if inner is None else inner.jaxpr.debug_info.func_filename or ""
    return "/jax/_src/" in file.replace("\\", "/")


@functools.cache
def debug_info(num_inputs: int, num_outputs: int) -> Any:
    """Debug info with empty names: messages name the source line of the equation."""
    info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    return info._replace(arg_names=("",) * num_inputs, result_paths=("",) * num_outputs)


def checkpoint_like(eqn: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the rematerialisation of a `checkpoint` equation."""
    return jax.checkpoint(
        function,
        prevent_cse=eqn.params.get("prevent_cse", True),
        policy=eqn.params.get("policy"),
    )


Result = TypeVar("Result")

_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")


def unbound_axis(error: BaseException) -> str | None:
    """The axis name of an unbound-axis error; None: another error."""
    match = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    return match[1] if match else None


def naming_axes(trace: Callable[[], Result], names: list[str]) -> Result:
    """The result of `trace`, with all unbound axes added to `names`.

    Args:
        trace: Runs `with_axes(function, names)` without other side effects; it is called again for
            each unbound axis.
        names: The bound axes; changed in place.
    """
    while True:
        try:
            return trace()
        except NameError as error:
            name = unbound_axis(error)
            if name is None or name in names:
                raise
            names.append(name)


def with_axes(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The same function, which returns trees of arrays, inside axes of one member."""
    for name in names:
        function = _with_axis(function, name)
    return function


def _with_axis(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    # No argument is mapped, but the axis index is, and with it all results.
    alone = jax.vmap(function, in_axes=None, out_axes=0, axis_name=name, axis_size=1)
    return lambda *arguments: jax.tree.map(lambda x: x[0], alone(*arguments))


_KEEPS = frozenset({"copy", "copy_p", "optimization_barrier"})
#: Primitives that move or scale elements, and the operands that a route passes; None: all.
_ON_A_ROUTE: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        (
            *("add", "add_any", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p"),
            *("convert_element_type", "expand_dims", "max", "min", "mul", "neg", "rev", "reshape"),
            *("optimization_barrier", "reduce_precision", "slice", "squeeze", "sub", "transpose"),
            *("and", "or", "xor", "not"),
        )
    ),
    **dict.fromkeys(("div", "dynamic_slice", "gather"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), (0,)),
}


def sources(closed: ClosedJaxpr) -> list[Any]:
    """The argument or equation result that each result of a program equals, unchanged.

    Returns:
        Variables of the program; None for a literal.
    """
    source: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        for var, k in zip(eqn.outvars, _operands_kept(eqn), strict=True):
            if k is not None and not isinstance(operand := eqn.invars[k], Literal):
                source[var] = source.get(operand, operand)
    return [None if isinstance(v, Literal) else source.get(v, v) for v in closed.jaxpr.outvars]


def passed_through(closed: ClosedJaxpr) -> list[int | None]:
    """The index of the argument that each result of a program equals, or None."""
    place: dict[Any, int | None] = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    return [None if v is None else place.get(v) for v in sources(closed)]


def _operands_kept(eqn: Any) -> Sequence[int | None]:
    """The index of the operand that each result of an equation equals, or None."""
    name, none = eqn.primitive.name, [None] * len(eqn.outvars)
    if name in _KEEPS:
        return range(len(eqn.outvars))
    if name in ("convert_element_type", "reshape"):
        first, made = eqn.invars[0].aval, eqn.outvars[0].aval
        return [0] if (made.shape, made.dtype) == (first.shape, first.dtype) else none
    if name == "cond":
        each = [passed_through(branch) for branch in eqn.params["branches"]]
        kept = [ks[0] if len(set(ks)) == 1 else None for ks in zip(*each, strict=True)]
        return [None if k is None else k + 1 for k in kept]  # the first operand is the branch index
    if name == "while":
        num_consts = eqn.params["body_nconsts"]
        kept = passed_through(eqn.params["body_jaxpr"])
        start = eqn.params["cond_nconsts"] + num_consts
        return [start + i if k == num_consts + i else None for i, k in enumerate(kept)]
    inner, kind = inner_jaxpr(eqn), kind_of(eqn)
    if inner is None or kind in ("leaf", None):
        return none
    kept = passed_through(inner)
    if kind != "scan":
        return kept
    num_consts, num_carry = scan_counts(eqn)
    carried = [k if k == num_consts + i else None for i, k in enumerate(kept[:num_carry])]
    slices = [None if k is None or k < num_consts + num_carry else k for k in kept[num_carry:]]
    return [*carried, *slices]


class Needed(NamedTuple):
    """The dependences of one result of a program.

    Attributes:
        text: Its equations, and a hash of their constants.
        arguments: Indices of the arguments that it reads.
    """

    text: str
    arguments: frozenset[int]


def needed_for(closed: ClosedJaxpr, result: int) -> Needed:
    """The equations, constants and arguments of one result of a program."""
    jaxpr = closed.jaxpr
    # First without other equations: those with effects would keep what they read.
    sliced = part(jaxpr, [jaxpr.outvars[result]])
    needed, used = partial_eval.dce_jaxpr(sliced, [True])
    read = list(itertools.compress(sliced.invars, used))
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    used_arrays = [np.asarray(consts[v]) for v in read if v in consts]
    arguments = frozenset(places[v] for v in read if v in places)
    return Needed(f"{program_text(needed)} {fingerprint(used_arrays)}", arguments)


def read_arguments(closed: ClosedJaxpr) -> frozenset[int]:
    """Indices of the arguments that some result of a program depends on."""
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return frozenset(i for i, is_used in enumerate(used) if is_used)


def routes(closed: ClosedJaxpr, result: int) -> dict[int, frozenset[str]]:
    """The arguments whose elements a result contains, moved, selected or scaled.

    Returns:
        For each argument, by index, the names of all operations on its routes to the result.
    """
    jaxpr = closed.jaxpr
    names: dict[Any, frozenset[str]] = {}

    def reach(var: Any, new: frozenset[str]) -> None:
        if not isinstance(var, Literal):
            names[var] = names.get(var, frozenset()) | new

    reach(jaxpr.outvars[result], frozenset())
    for eqn in reversed(jaxpr.eqns):
        for k, var in enumerate(eqn.outvars):
            if var not in names:
                continue
            for i, step in _steps(eqn, k).items():
                reach(eqn.invars[i], names[var] | step)
    return {i: names[v] for i, v in enumerate(jaxpr.invars) if v in names}


def _steps(eqn: Any, result: int) -> dict[int, frozenset[str]]:
    """The operands of an equation that a route passes, with the operations on it."""
    name, inner = eqn.primitive.name, inner_jaxpr(eqn)
    if inner is not None and kind_of(eqn) in ("inlined", "remat", "custom"):
        return routes(inner, result)
    step, every = frozenset({name}), range(len(eqn.invars))
    if name == "select_n":
        return dict.fromkeys(every[1:], step)
    if name not in _ON_A_ROUTE:
        return {}
    if name == "optimization_barrier":
        return {result: step}
    places = _ON_A_ROUTE[name]
    return dict.fromkeys(every if places is None else places, step)

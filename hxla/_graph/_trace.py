"""From a loss to a `Graph`: one trace, every equation with its TaskGraph.

References:
    Whale, USENIX ATC 2022, section 3.1.2 (TaskGraphs) and 3.3 (the default strategy).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core._errors import AnnotationError, LossError
from .._core._types import PyTree
from .._jax._absent_sharding import brief_absence
from .._jax._axis_names import naming_axes, with_axes
from .._jax._digest import digests, joined
from .._jax._jaxpr import ClosedJaxpr, with_results
from .._jax._result_sources import sources
from .._model._annotations import Strategy
from .._model._called_loss import Loss
from .._model._functional import Functional, functional, leaf_names
from .._model._loss import MetricColumns, as_sums
from .._model._loss_scale import scaled_loss
from .._model._plain_arrays import root_key
from .._model._writes import CallWrites, refuse_writes
from ._factors import PATTERNS, Patterns
from ._graph import Graph
from ._mixing import mixing
from ._state_rules import by_dtype
from ._tracer import Tracer


def trace(
    model: Any,
    loss: Loss,
    batch: PyTree,
    *,
    variables: PyTree | None = None,
    seed: int = 0,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
) -> Graph:
    """Trace a loss and group its equations into TaskGraphs.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, and an NNX model may come from
    `nnx.eval_shape`, so a model can be traced at a size that no device here could hold.

    Args:
        model: An `nnx.Module` or an unbound `flax.linen.Module`.
        loss: The loss `loss(model, batch)`, as for `Job`.
        batch: One microbatch, arrays or shapes with examples in the leading dimension.
        variables: The variables of a Linen module, arrays or shapes; None: those of its
            initialisation.
        seed: The seed of that initialisation.
        default: The annotation, `hxla.replicate(...)` or `hxla.split(...)`, of what no scope
            covers. None: what applies parameters is replicated over all devices, and anything else
            joins the TaskGraph that made its inputs.
        patterns: The ways in which equations can be cut; add your own with
            `hxla.PATTERNS.with_pattern`.

    Returns:
        The graph; `print` shows its TaskGraphs.

    Raises:
        AnnotationError: If scopes overlap, `default` is no annotation, or an equation runs programs
            in a way hxla does not know.
        ConfigError: If `model` is no Flax module, or the loss cannot be called as `Job` does.
        LossError: If the loss returns something else than `Job` takes, depends on no parameter, or
            closes over a random key.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 1024), "float32")}
        >>> graph = hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> graph.task_graphs[0].param_bytes
        16793600

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1.2 (TaskGraphs).
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch)
    flat = functional(model, loss, loss, variables=variables, seed=seed, example=example)
    return trace_functional(flat, example, default=default, patterns=patterns)


@brief_absence()
def trace_functional(
    model: Functional,
    batch: PyTree,
    *,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
) -> Graph:
    """`trace` for a model that is functional already.

    Raises:
        LossError: If the loss changes which variables the model has, or returns something else
            than documented.
    """
    num_examples = jax.tree.leaves(batch)[0].shape[0]
    metrics: list[MetricColumns] = []
    num_losses = [1]
    axes: list[str] = []
    written: list[str] = []

    def run(params: PyTree, aux: PyTree, key: jax.Array, batch: PyTree) -> Any:
        out, new_aux = model.train(params, aux, key, batch)
        written[:] = []
        before_after: list[Any] = []
        if isinstance(out, CallWrites):
            written[:], before_after, out = out.names, [*out.before, *out.after], out.out
        sums = as_sums(out, num_examples)
        metrics[:], num_losses[:] = sums.metrics, [sums.num_losses]
        _check_aux(aux, new_aux)
        return scaled_loss(sums.loss, sums.num_losses, aux), sums.row, new_aux, before_after

    def checked(closed: ClosedJaxpr) -> ClosedJaxpr:
        num = len(written)
        own = sources(closed)[len(closed.jaxpr.outvars) - 2 * num :]
        pairs = zip(written, own[:num], own[num:], strict=True)
        refuse_writes(*(f"the parameter {name}" for name, a, b in pairs if a is None or a is not b))
        return with_results(closed, len(closed.jaxpr.outvars) - 2 * num)

    graph = naming_axes(
        lambda: trace_sums(
            with_axes(run, axes),
            model.params,
            model.aux,
            batch,
            logical=model.logical,
            default=default,
            patterns=patterns,
            checked=checked,
        ),
        axes,
    )
    _check_depends(graph)
    mixes, normalizes = mixing(graph)
    return dataclasses.replace(
        graph,
        metrics=tuple(metrics),
        num_losses=num_losses[0],
        bound_axes=tuple(axes),
        mixes=mixes,
        normalizes=normalizes,
    )


def loss_digest(graph: Graph) -> str:
    """A digest of a traced loss: of its sums and the new values of variables, not of its metrics.

    Args:
        graph: As `trace_functional` made it.
    """
    jaxpr = graph.program.jaxpr
    loss, sums, *aux = jaxpr.outvars
    made_of = {v: eqn.invars for eqn in jaxpr.eqns for v in eqn.outvars}
    if sums.aval.shape != (2,) and made_of[sums][0].aval.shape == (2,):
        sums = made_of[sums][0]  # before metrics are joined to it
    return joined([loss, sums, *aux], digests(graph.program))


def _check_aux(before: PyTree, after: PyTree) -> None:
    if str(jax.tree.structure(before)) == str(jax.tree.structure(after)):
        return
    old, new = leaf_names(before), leaf_names(after)
    made, gone = [sorted(set(a) - set(b)) for a, b in ((new, old), (old, new))]
    lines = [
        f"  {what} {name}" for what, names in (("new:", made), ("gone:", gone)) for name in names
    ]
    remedy = "create every variable when the model is made"
    if isinstance(after, nnx.State):
        remedy += "; what is sown for the loss to read is of a type derived from nnx.Intermediate"
    raise LossError(
        "\n".join(("the loss changed the structure of the model's variables:", *lines, remedy))
    )


def _check_depends(graph: Graph) -> None:
    loss = graph.result_values[0]
    if not isinstance(loss, int) or not graph.values[loss].differentiable:
        raise LossError(
            "the loss does not depend on any parameter of the model that it is given, so nothing "
            "would be trained: call the model that is its first argument, and neither another one "
            "from outside nor what was computed before"
        )


def trace_sums(
    run: Callable[..., Any],
    params: PyTree,
    aux: PyTree,
    batch: PyTree,
    *,
    logical: Sequence[Sequence[str | None] | None] | None = None,
    default: Strategy | None = None,
    patterns: Patterns = PATTERNS,
    checked: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
) -> Graph:
    """Trace `run(params, aux, key, batch)`, whose first result is differentiated.

    Args:
        run: Traced once.
        params: Arrays or shapes that gradients are taken for.
        aux: Other variables.
        batch: Examples in the leading dimension.
        logical: Names of each parameter's dimensions.
        default: Annotation of what no scope covers.
        patterns: Which dimensions can be cut together.
        checked: Checks the program, and leaves out what is only for that.
    """
    if default is not None and not isinstance(default, Strategy):
        raise AnnotationError(
            f"default={default!r}: pass hxla.replicate(...), hxla.split(...) or None"
        )
    key = jax.eval_shape(root_key, 0)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, aux, key, batch)
    )
    closed = checked(jax.make_jaxpr(run)(*shapes))
    counts = [len(jax.tree.leaves(tree)) for tree in shapes]
    graph = Tracer(closed, counts, leaf_names(params), default, patterns).graph()
    return dataclasses.replace(graph, param_logical=logical, merges=by_dtype(graph))

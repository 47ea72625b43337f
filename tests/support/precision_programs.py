"""Traced losses under a policy of precision, and their gradients' programs."""

import jax

from support import families, scanned_models
from support.inside.graph import PrecisionCalls, trace_functional
from support.inside.jax import as_function
from support.inside.model import functional
from support.inside.plan import as_precision


def every_equation(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else (value,):
                if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                    yield from every_equation(getattr(x, "jaxpr", x))


def under(model, loss, batch, precision):
    """A model's calls, and its loss traced, under a policy."""
    plain = functional(model, loss, loss, variables=None, seed=0, example=batch)
    calls = PrecisionCalls(plain, as_precision(precision))
    return calls, trace_functional(calls.model, batch)


def gradient_program(graph):
    """Forward and backward of a traced loss."""
    program, num = as_function(graph.program), len(graph.param_values)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.program.jaxpr.invars]

    def gradient(params, *rest):
        return jax.grad(lambda own: program(*own, *rest)[0])(params)

    return jax.make_jaxpr(gradient)(shapes[:num], *shapes[num:]), gradient, shapes, num


def scanned():
    return scanned_models.LinenNet(dropout=0.1), scanned_models.loss, scanned_models.data()


MODELS = {**families.FAMILIES, "scanned": scanned}


def shapes_only(name, rows=2):
    """A model's shapes, its loss and a small batch: nothing is compiled."""
    model, loss, batch = scanned() if name == "scanned" else families.shapes_only(name)
    return model, loss, jax.tree.map(lambda x: x[:rows], batch)

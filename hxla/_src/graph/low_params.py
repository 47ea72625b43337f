"""Parameters that a segment reads in 16 bits only: they may be gathered in 16 bits.

A cast rounds element by element, so it gives the same bits before an all-gather and after.
"""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from ..jax.jaxpr import scan_counts
from .graph import Graph, params_of
from .operations import Op
from .segments import Segment

#: Primitives that move elements and keep all bits.
_VIEWS = frozenset(
    {"broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "reshape", "rev", "slice"}
    | {"split", "squeeze", "transpose", "unstack"}
)
_LOW = frozenset({"bfloat16", "float16"})


def low_params(graph: Graph, segment: Segment) -> dict[int, str]:
    """The float32 parameters that a segment reads only through casts to one 16-bit dtype.

    Returns:
        The dtype of each such parameter, by parameter index.
    """
    param_of = params_of(graph)
    read = {
        graph.param_values[entry]: param_of[entry]
        for entry in segment.params
        if graph.values[graph.param_values[entry]].dtype == jnp.float32
    }
    dtypes: dict[int, set[str]] = {p: set() for p in read.values()}
    leaving = {v for v in (*segment.outputs, *graph.result_values) if isinstance(v, int)}
    _collect_dtypes(segment.ops, read, leaving, dtypes)
    only = {p: next(iter(names)) for p, names in dtypes.items() if len(names) == 1}
    return {p: dtype for p, dtype in only.items() if dtype in _LOW}


def _collect_dtypes(
    ops: Sequence[Op], read: dict[int, int], leaving: Iterable[int], dtypes: dict[int, set[str]]
) -> None:
    """Add the dtypes in which operations read parameters to `dtypes`.

    Args:
        read: Values with the unrounded elements of a parameter, and the parameter's index.
        leaving: Values that are read outside `ops`, in an unknown dtype.
        dtypes: Dtype names by parameter index; changed in place.
    """
    read = dict(read)
    for op in ops:
        places = [k for k, v in enumerate(op.inputs) if isinstance(v, int) and v in read]
        body_read: dict[int, int] = {}
        for k in places:
            param = read[op.inputs[k]]
            if op.name == "convert_element_type":
                new = jnp.dtype(op.eqn.params["new_dtype"]).name
                if new == "float32":
                    read[op.outputs[0]] = param
                else:
                    dtypes[param].add(new)
            elif op.name in _VIEWS and k == 0:
                read |= dict.fromkeys(op.outputs, param)
            elif op.kind == "remat" or (op.kind == "scan" and not _is_carried(op, k)):
                body_read[op.body_inputs[k]] = param
            else:
                dtypes[param].add("float32")
        if body_read:
            body_leaving = [v for v in op.body_outputs if isinstance(v, int)]
            _collect_dtypes(op.body, body_read, body_leaving, dtypes)
    for v in leaving:
        if v in read:
            dtypes[read[v]].add("float32")


def _is_carried(op: Op, k: int) -> bool:
    """Whether an operand of a scan is carried."""
    num_consts, num_carry = scan_counts(op.eqn)
    return num_consts <= k < num_consts + num_carry

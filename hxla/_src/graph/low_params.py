"""Parameters that some operations read in a low precision only: they may travel in it.

A cast rounds each element by itself, so it is the same before a parameter is gathered and after.
"""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from ..jax.jaxpr import scan_counts
from .graph import Graph, params_of
from .operations import Op
from .segments import Segment

#: They move elements and keep all bits.
_VIEWS = frozenset(
    {"broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "reshape", "rev", "slice"}
    | {"split", "squeeze", "transpose", "unstack"}
)
_LOW = frozenset({"bfloat16", "float16"})


def low_params(graph: Graph, segment: Segment) -> dict[int, str]:
    """The float32 parameters of which a segment reads nothing but casts to one dtype of 16 bits.

    Returns:
        For each such parameter, by its number, the dtype.
    """
    param_of = params_of(graph)
    read = {
        graph.param_values[entry]: param_of[entry]
        for entry in segment.params
        if graph.values[graph.param_values[entry]].dtype == jnp.float32
    }
    dtypes: dict[int, set[str]] = {p: set() for p in read.values()}
    leaving = {v for v in (*segment.outputs, *graph.result_values) if isinstance(v, int)}
    _read_by(segment.ops, read, leaving, dtypes)
    found = {p: next(iter(own)) for p, own in dtypes.items() if len(own) == 1}
    return {p: dtype for p, dtype in found.items() if dtype in _LOW}


def _read_by(
    ops: Sequence[Op], read: dict[int, int], leaving: Iterable[int], dtypes: dict[int, set[str]]
) -> None:
    """Note the dtypes in which operations read parameters.

    Args:
        ops: In order.
        read: Values that have a parameter's own elements, with its number.
        leaving: Values that others read, who knows how.
        dtypes: For each parameter what was found.
    """
    read = dict(read)
    for op in ops:
        places = [k for k, v in enumerate(op.inputs) if isinstance(v, int) and v in read]
        inside: dict[int, int] = {}
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
                inside[op.body_inputs[k]] = param
            else:
                dtypes[param].add("float32")
        if inside:
            own = [v for v in op.body_outputs if isinstance(v, int)]
            _read_by(op.body, inside, own, dtypes)
    for v in leaving:
        if v in read:
            dtypes[read[v]].add("float32")


def _is_carried(op: Op, k: int) -> bool:
    """Whether an operand of a scan is what its first iteration changes."""
    num_consts, num_carry = scan_counts(op.eqn)
    return num_consts <= k < num_consts + num_carry

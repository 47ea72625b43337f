"""A digest of what a traced program computes: of its equations and constants, and nothing else.

Names of functions, lines of source, equations that a result does not need and the order of those
that are independent do not count. Rules of gradients of one's own are functions of Python, whose
bodies cannot be seen.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_NAMES = frozenset({"name", "name_and_src_info", "debug_info"})


def digests(closed: core.ClosedJaxpr) -> dict[Any, bytes]:
    """For each variable of a program the digest of what it is computed of."""
    found: dict[Any, bytes] = {}
    for i, v in enumerate(closed.jaxpr.invars):
        found[v] = _hash("argument", i, str(v.aval))
    for v, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        found[v] = _hash("constant", _value(constant))
    for eqn in closed.jaxpr.eqns:
        params = {k: _value(v) for k, v in eqn.params.items() if k not in _OF_NAMES}
        operands = [_operand(v, found) for v in eqn.invars]
        own = _hash(eqn.primitive.name, sorted(params.items()), operands)
        for i, v in enumerate(eqn.outvars):
            found[v] = _hash(own, i, str(v.aval))
    return found


def program_digest(closed: core.ClosedJaxpr) -> str:
    """The digest of all results of a program, 16 hexadecimal digits."""
    return joined(closed.jaxpr.outvars, digests(closed))


def joined(variables: Sequence[Any], found: Mapping[Any, bytes]) -> str:
    """The digest of some variables of a program, 16 hexadecimal digits.

    Args:
        found: What `digests` gave.
    """
    return _hash([_operand(v, found) for v in variables]).hex()[:16]


def _operand(v: Any, found: Mapping[Any, bytes]) -> Any:
    if isinstance(v, core.Literal):
        return ["literal", str(v.aval), _value(v.val)]
    return found[v]


def _value(x: Any) -> Any:
    """A parameter or a constant as something whose `repr` is the same in every process."""
    if isinstance(x, core.Jaxpr):
        x = core.ClosedJaxpr(x, ())
    if isinstance(x, core.ClosedJaxpr):
        return program_digest(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return ["key", str(x.dtype), _value(jax.random.key_data(x))]
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return [str(x.dtype), x.shape]
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        array = np.ascontiguousarray(x)
        content = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
        return [str(x.dtype), array.shape, content]
    if isinstance(x, Mapping):
        return sorted((str(key), _value(value)) for key, value in x.items())
    if type(x) in (tuple, list):
        return [_value(y) for y in x]
    if isinstance(x, set | frozenset):
        return sorted(repr(_value(y)) for y in x)
    if callable(x) and not isinstance(x, type):
        return "a function"
    return _ADDRESS.sub("", repr(x))


def _hash(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()

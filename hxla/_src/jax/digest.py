"""Digests of traced programs, and fingerprints of arrays.

A program is digested by its equations and constants, and nothing else: not by names of functions,
source lines, unused equations and the order of independent equations. Custom gradient rules are
Python functions, whose bodies it cannot read.

A fingerprint is a hash of the bits of a tree of arrays.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..core.types import PyTree

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAME_PARAMS = frozenset({"name", "name_and_src_info", "debug_info"})


def digests(closed: core.ClosedJaxpr) -> dict[Any, bytes]:
    """The digest of each variable of a program."""
    digest_of: dict[Any, bytes] = {}
    for i, v in enumerate(closed.jaxpr.invars):
        digest_of[v] = _hash("argument", i, str(v.aval))
    for v, constant in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        digest_of[v] = _hash("constant", _value(constant))
    for eqn in closed.jaxpr.eqns:
        params = {k: _value(v) for k, v in eqn.params.items() if k not in _NAME_PARAMS}
        operands = [_operand(v, digest_of) for v in eqn.invars]
        digest = _hash(eqn.primitive.name, sorted(params.items()), operands)
        for i, v in enumerate(eqn.outvars):
            digest_of[v] = _hash(digest, i, str(v.aval))
    return digest_of


def program_digest(closed: core.ClosedJaxpr) -> str:
    """The digest of all results of a program, 16 hexadecimal digits."""
    return joined(closed.jaxpr.outvars, digests(closed))


def joined(variables: Sequence[Any], digest_of: Mapping[Any, bytes]) -> str:
    """The digest of some variables of a program, 16 hexadecimal digits.

    Args:
        digest_of: A result of `digests`.
    """
    return _hash([_operand(v, digest_of) for v in variables]).hex()[:16]


def _operand(v: Any, digest_of: Mapping[Any, bytes]) -> Any:
    if isinstance(v, core.Literal):
        return ["literal", str(v.aval), _value(v.val)]
    return digest_of[v]


def _value(x: Any) -> Any:
    """A param or a constant as a value whose `repr` is the same in every process."""
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


def fingerprint(tree: PyTree, gather: Callable[[Any], Any] = np.asarray) -> str:
    """Hash the shapes, dtypes and bytes of all leaves in order, by SHA-256.

    Args:
        tree: Any pytree of arrays.
        gather: A function that makes an array whole: `Session.gather` if it is sharded over
            processes.

    Returns:
        64 hexadecimal digits, equal only for trees that are equal to the last bit.

    Example:
        >>> import hxla, numpy as np
        >>> one, two = np.zeros(3, np.float32), -np.zeros(3, np.float32)
        >>> bool((one == two).all()), hxla.fingerprint(one) == hxla.fingerprint(two)
        (True, False)
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(gather(leaf))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()

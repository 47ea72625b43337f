"""What a copy of the model has of the arrays of an update."""

from typing import Any

import jax.numpy as jnp

from .._jax._independent import Part
from .._plan._ownership import Ownership
from ._on_devices import local_part


class OwnPart(Part):
    """What a copy has.

    Args:
        own: Who updates what.
        copy: Number of the copy.
        first: Of its first granule, perhaps traced.
    """

    def __init__(self, own: Ownership, copy: int, first: Any):
        self._own, self._copy, self._first = own, copy, first
        self._shares, self._granules = own.shares, own.granules[copy]
        self._sizes: dict[int, int] = {}  # of the whole arrays of each domain that is cut
        for v, d in zip(own.update.closed.jaxpr.outvars, own.update.domain_of, strict=False):
            if d is not None:
                self._sizes[d] = own.local_size(d, v.aval.shape)

    def owns(self, domain: int) -> bool:
        """Whether it has a domain, or a slice of it."""
        return self._own.owners[domain] in (None, self._copy)

    def has_whole(self, domain: int) -> bool:
        """Never: arrays that are cut are flat, also where one copy has all granules."""
        return False

    def cuts(self, k: int) -> bool:
        """Whether one of the update's arrays is cut."""
        domain = self._own.update.domain_of[k]
        return domain is not None and self._own.owners[domain] is None

    def of(self, k: int, x: Any) -> Any:
        """What it has of one of the update's arrays, given the whole."""
        return self._shares.piece(x, self._granules, self._first) if self.cuts(k) else x

    def piece(self, domain: int, x: Any) -> Any:
        """Its slice of a whole array."""
        if self._own.axes:
            x = local_part(x, self._own.spec(domain), dict(self._own.axes))
        return self._shares.piece(x, self._granules, self._first)

    def own(self, domain: int, x: Any) -> Any:
        """Its slice with zeros where it is padding."""
        size = self._sizes[domain]
        places = self._first * self._shares.granule(size) + jnp.arange(x.size)
        return jnp.where(places < size, x, jnp.zeros((), x.dtype))

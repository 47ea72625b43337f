"""A block: consecutive equations that each device runs on its own part, of its true size.

Between two collectives the devices of an uneven split need nothing of each other, so all that they
cut there is one function of local arrays, compiled for each of the few sizes that occur. A device
takes its own branch. Arrays enter and leave padded to the largest part, for SPMD knows one shape;
what the backward keeps crosses in the same way: the fewest bytes from which it needs no more than
element-wise work again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax._jaxpr import ClosedJaxpr
from .._jax._min_cut import Halves, halve
from ._across import narrow, widen

#: A dimension and for each size class the size of the part in it; None for a whole array.
Width = tuple[int, tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What devices do between two collectives.

    Attributes:
        run: `(size class, offsets, inputs) -> results` on arrays of true sizes.
        inputs: How the inputs are cut.
        is_differentiable: For each input whether a gradient flows back through it.
        results: How the results are cut.
        num_classes: The distinct sizes of devices.
        own_class: That of the one device that the program is for; None: any device runs it.
        lay_out: How an array is laid out before it is padded: a CPU is slow at both at once.
    """

    run: Callable[[int, Any, Sequence[Any]], list[Any]]
    inputs: tuple[Width, ...]
    is_differentiable: tuple[bool, ...]
    results: tuple[Width, ...]
    num_classes: int
    own_class: int | None
    lay_out: Callable[[Any], Any]

    def __call__(self, size_class: Any, offsets: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results on this device, padded.

        Args:
            size_class: Of this device, int32.
            offsets: Where its parts begin.
            inputs: Padded.
        """
        is_float = self._float_results(offsets, inputs)
        halves = self._halves(offsets, inputs, is_float)
        kept = [tuple(own.kept[k].shape for own in halves) for k in range(len(halves[0].kept))]
        widths = list(itertools.compress(self.results, is_float))
        of_grads = list(itertools.compress(self.inputs, self.is_differentiable))

        def forward(size_class: Any, offsets: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
                    own = _narrowed(c, inputs, self.inputs)
                    found, held = halves[c].run_early([offsets, *own])
                    wide = [_as_wide(x, shapes) for x, shapes in zip(held, kept, strict=True)]
                    return self._widened(found, self.results), wide

                return run

            return self._switch(branch, size_class, offsets, inputs)

        def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[None, None, list[Any]]:
            size_class, offsets, inputs, held = saved
            floats = list(itertools.compress(cotangents, is_float))

            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Any, held: Any, floats: Any) -> list[Any]:
                    own = _narrowed(c, inputs, self.inputs)
                    back = _narrowed(c, floats, widths)
                    narrow = [_of_shape(x, s[c]) for x, s in zip(held, kept, strict=True)]
                    found = halves[c].run_late([offsets, *own, *back], narrow)
                    return self._widened(found, of_grads)

                return run

            found = iter(self._switch(branch, size_class, offsets, inputs, held, floats))
            return None, None, [next(found) if d else None for d in self.is_differentiable]

        call = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])

        def call_forward(*arguments: Any) -> tuple[Any, Any]:
            results, held = forward(*arguments)
            return results, (*arguments, held)

        call.defvjp(call_forward, backward)
        return call(size_class, offsets, list(inputs))  # type: ignore[no-any-return]

    def _switch(self, branch: Callable[[int], Any], size_class: Any, *operands: Any) -> Any:
        if self.own_class is not None or self.num_classes == 1:
            return branch(self.own_class or 0)(*operands)
        return jax.lax.switch(size_class, [branch(c) for c in range(self.num_classes)], *operands)

    def _widened(self, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
        return [
            x if width is None else widen(self.lay_out(x), width[0], max(width[1]))
            for x, width in zip(arrays, widths, strict=True)
        ]

    # -- tracing ---------------------------------------------------------------------------------

    def _shapes(self, c: int, inputs: Sequence[Any]) -> list[Any]:
        """Of the inputs of a class."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        return [
            x if width is None else _with_size(x, width[0], width[1][c])
            for x, width in zip(shapes, self.inputs, strict=True)
        ]

    def _results(self, c: int, offsets: Any, inputs: Sequence[Any]) -> list[Any]:
        run = functools.partial(self.run, c)
        return jax.eval_shape(run, offsets, self._shapes(c, inputs))  # type: ignore[no-any-return]

    def _float_results(self, offsets: Any, inputs: Sequence[Any]) -> list[bool]:
        return [jnp.issubdtype(x.dtype, jnp.inexact) for x in self._results(0, offsets, inputs)]

    def _halves(
        self, offsets: Any, inputs: Sequence[Any], is_float: Sequence[bool]
    ) -> list[Halves]:
        """Forward and backward of each class, between which the same is kept."""
        programs = [self._program(c, offsets, inputs, is_float) for c in range(self.num_classes)]
        num = 1 + len(inputs)
        late = range(num, num + sum(is_float))
        first = halve(programs[0], len(self.results), only_late=late)
        words = [[eqn.primitive.name for eqn in p.jaxpr.eqns] for p in programs]
        # A size of one may be traced in another way; then the backward begins with the inputs.
        places = first.places if all(own == words[0] for own in words) else ()
        return [halve(p, len(self.results), only_late=late, places=places) for p in programs]

    def _program(
        self, c: int, offsets: Any, inputs: Sequence[Any], is_float: Sequence[bool]
    ) -> ClosedJaxpr:
        """`(offsets, *inputs, *cotangents) -> (*results, *gradients)` of a class."""
        num = len(inputs)

        def run(offsets: Any, *arguments: Any) -> list[Any]:
            given, cotangents = arguments[:num], arguments[num:]

            def forward(own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                rest = iter(own)
                every = [
                    next(rest) if d else x
                    for x, d in zip(given, self.is_differentiable, strict=True)
                ]
                results = self.run(c, offsets, every)
                return list(itertools.compress(results, is_float)), results

            own = list(itertools.compress(given, self.is_differentiable))
            _, back, results = jax.vjp(forward, own, has_aux=True)
            [gradients] = back(list(cotangents))
            return [*results, *gradients]

        results = self._results(c, offsets, inputs)
        back = itertools.compress(results, is_float)
        return jax.make_jaxpr(run)(offsets, *self._shapes(c, inputs), *back)


def _narrowed(c: int, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
    return [
        x if width is None else narrow(x, width[0], width[1][c])
        for x, width in zip(arrays, widths, strict=True)
    ]


def _as_wide(x: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """As large as in any class."""
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        x = widen(x, dim, max(sizes))
    return x


def _of_shape(x: Any, shape: tuple[int, ...]) -> Any:
    for dim, size in enumerate(shape):
        x = narrow(x, dim, size)
    return x


def _with_size(x: Any, dim: int, size: int) -> Any:
    shape = tuple(size if d == dim else n for d, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)

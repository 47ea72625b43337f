"""The operations of an uneven split's devices between two collectives.

There the devices are independent, so their sharded operations are one *block*: a function of local
arrays, compiled for each of the few sizes that occur. A device runs the branch of its size, so half
the units are half the work. Arrays enter and leave a block padded to the largest shard, for SPMD
has one shape. So do residuals: the fewest bytes from which the backward repeats only element-wise
work.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jax.jaxpr import ClosedJaxpr
from ..jax.min_cut import Halves, halve
from .padding import Cut, narrow, widen
from .uneven_collectives import Token, all_gather, reduce_scatter

#: A dimension and for each size class the size of its shard; None for a whole array.
Width = tuple[int, tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The operations of devices between two collectives.

    Attributes:
        run: `(size class, offsets, inputs) -> results` on arrays of true sizes.
        inputs: How the inputs are cut.
        gathers: How an input is cut that enters whole; None: it enters as it is. Its shard is the
            residual, and the backward gathers it again.
        is_differentiable: For each input whether a gradient flows back through it.
        results: How the results are cut.
        num_classes: The distinct sizes of devices.
        only_class: Class of the one device that runs the program; None: any device runs it.
        lay_out: Lays an array out before it is padded: a CPU is slow at both at once.
    """

    run: Callable[[int, Any, Sequence[Any]], list[Any]]
    inputs: tuple[Width, ...]
    gathers: tuple[Cut | None, ...]
    is_differentiable: tuple[bool, ...]
    results: tuple[Width, ...]
    num_classes: int
    only_class: int | None
    lay_out: Callable[[Any], Any]

    def __call__(
        self, size_class: Any, offsets: Any, inputs: Sequence[Any], token: Token
    ) -> tuple[list[Any], Token]:
        """The results on this device, padded, and the token of its last collective.

        Args:
            size_class: Class of this device, int32.
        """
        entering = [*map(_entering, inputs, self.gathers)]
        is_float = self._float_results(offsets, entering)
        halves = self._halves(offsets, entering, is_float)
        kept = [tuple(half.kept[k].shape for half in halves) for k in range(len(halves[0].kept))]
        widths = list(itertools.compress(self.results, is_float))
        places, cuts = self._cuts
        of_grads = list(itertools.compress(self.inputs, self.is_differentiable))

        def forward(
            size_class: Any, offsets: Any, inputs: Sequence[Any], token: Token
        ) -> tuple[Any, Any, Token]:
            whole, token = self._whole(inputs, token)

            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
                    narrowed = _narrowed(c, inputs, self.inputs)
                    results, residuals = halves[c].run_early([offsets, *narrowed])
                    wide = [_widest(x, shapes) for x, shapes in zip(residuals, kept, strict=True)]
                    return self._widened(results, self.results), wide

                return run

            return *self._switch(branch, size_class, offsets, whole), token

        def backward(saved: Any, back: Any) -> tuple[None, None, list[Any], Token]:
            (size_class, offsets, inputs, residuals, token), (cotangents, of_token) = saved, back
            whole, token = self._whole(inputs, token + of_token)
            floats = list(itertools.compress(cotangents, is_float))

            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Any, residuals: Any, floats: Any) -> list[Any]:
                    narrowed = _narrowed(c, inputs, self.inputs)
                    back = _narrowed(c, floats, widths)
                    narrow = [_narrow_to(x, s[c]) for x, s in zip(residuals, kept, strict=True)]
                    gradients = halves[c].run_late([offsets, *narrowed, *back], narrow)
                    return self._widened(gradients, of_grads)

                return run

            made = iter(self._switch(branch, size_class, offsets, whole, residuals, floats))
            grads: list[Any] = [next(made) if d else None for d in self.is_differentiable]
            shards, token = reduce_scatter([grads[k] for k in places], cuts, token)
            of_shard = dict(zip(places, shards, strict=True))
            return None, None, [of_shard.get(k, x) for k, x in enumerate(grads)], token

        call = jax.custom_vjp(lambda *arguments: forward(*arguments)[::2])

        def call_forward(*arguments: Any) -> tuple[Any, Any]:
            results, residuals, token = forward(*arguments)
            return (results, token), (*arguments[:-1], residuals, token)

        call.defvjp(call_forward, backward)
        return call(size_class, offsets, list(inputs), token)  # type: ignore[no-any-return]

    @property
    def _cuts(self) -> tuple[list[int], list[Cut]]:
        """The inputs that are gathered, and how each is cut."""
        known = [(k, cut) for k, cut in enumerate(self.gathers) if cut is not None]
        return [k for k, _ in known], [cut for _, cut in known]

    def _whole(self, inputs: Sequence[Any], token: Token) -> tuple[list[Any], Token]:
        """The inputs as they enter."""
        places, cuts = self._cuts
        wholes, token = all_gather([inputs[k] for k in places], cuts, token)
        of_whole = dict(zip(places, wholes, strict=True))
        return [of_whole.get(k, x) for k, x in enumerate(inputs)], token

    def _switch(self, branch: Callable[[int], Any], size_class: Any, *operands: Any) -> Any:
        if self.only_class is not None or self.num_classes == 1:
            return branch(self.only_class or 0)(*operands)
        return jax.lax.switch(size_class, [branch(c) for c in range(self.num_classes)], *operands)

    def _widened(self, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
        return [
            x if width is None else widen(self.lay_out(x), width[0], max(width[1]))
            for x, width in zip(arrays, widths, strict=True)
        ]

    # -- tracing ---------------------------------------------------------------------------------

    def _shapes(self, c: int, inputs: Sequence[Any]) -> list[Any]:
        """Shapes of the inputs of a class."""
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
        """Forward and backward of each class, with the same residuals."""
        programs = [self._program(c, offsets, inputs, is_float) for c in range(self.num_classes)]
        num = 1 + len(inputs)
        late = range(num, num + sum(is_float))
        first = halve(programs[0], len(self.results), only_late=late)
        words = [[eqn.primitive.name for eqn in p.jaxpr.eqns] for p in programs]
        # A size of one may be traced in another way; then the inputs are the residuals.
        places = first.places if all(names == words[0] for names in words) else ()
        return [halve(p, len(self.results), only_late=late, places=places) for p in programs]

    def _program(
        self, c: int, offsets: Any, inputs: Sequence[Any], is_float: Sequence[bool]
    ) -> ClosedJaxpr:
        """`(offsets, *inputs, *cotangents) -> (*results, *gradients)` of a class."""
        num = len(inputs)

        def run(offsets: Any, *arguments: Any) -> list[Any]:
            primals, cotangents = arguments[:num], arguments[num:]

            def forward(floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                rest = iter(floats)
                every = [
                    next(rest) if d else x
                    for x, d in zip(primals, self.is_differentiable, strict=True)
                ]
                results = self.run(c, offsets, every)
                return list(itertools.compress(results, is_float)), results

            floats = list(itertools.compress(primals, self.is_differentiable))
            _, back, results = jax.vjp(forward, floats, has_aux=True)
            [gradients] = back(list(cotangents))
            return [*results, *gradients]

        results = self._results(c, offsets, inputs)
        back = itertools.compress(results, is_float)
        return jax.make_jaxpr(run)(offsets, *self._shapes(c, inputs), *back)


def _entering(x: Any, cut: Cut | None) -> Any:
    """The shape and dtype of an input where it enters."""
    return x if cut is None else _with_size(x, cut.dim, sum(cut.sizes))


def _narrowed(c: int, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
    return [
        x if width is None else narrow(x, width[0], width[1][c])
        for x, width in zip(arrays, widths, strict=True)
    ]


def _widest(x: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """An array widened to the largest shape of any class."""
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        x = widen(x, dim, max(sizes))
    return x


def _narrow_to(x: Any, shape: tuple[int, ...]) -> Any:
    for dim, size in enumerate(shape):
        x = narrow(x, dim, size)
    return x


def _with_size(x: Any, dim: int, size: int) -> Any:
    shape = tuple(size if d == dim else n for d, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)

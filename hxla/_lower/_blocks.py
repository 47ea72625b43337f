"""A block: consecutive equations that each device runs on its own part, of its true size.

Between two collectives the devices of an uneven split need nothing of each other, so all that they
cut there is one function of local arrays, compiled for each of the few sizes that occur. A device
takes its own branch. Arrays enter and leave padded to the largest part, for SPMD knows one shape;
what the backward keeps crosses in the same way, so that nothing is computed twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax._jaxpr import ClosedJaxpr, Literal, as_function
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
    """

    run: Callable[[int, Any, Sequence[Any]], list[Any]]
    inputs: tuple[Width, ...]
    is_differentiable: tuple[bool, ...]
    results: tuple[Width, ...]
    num_classes: int

    def __call__(self, size_class: Any, offsets: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results on this device, padded.

        Args:
            size_class: Of this device, int32.
            offsets: Where its parts begin.
            inputs: Padded.
        """
        traced = [self._traced(c, offsets, inputs) for c in range(self.num_classes)]
        saved = _Saved.of(traced)

        def forward(size_class: Any, offsets: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
                    own = self._narrowed(c, inputs, self.inputs)
                    found = as_function(traced[c].program)(offsets, *own)
                    num = len(self.results)
                    return self._widened(found[:num], self.results), saved.padded(found[num:])

                return run

            return self._switch(branch, size_class, offsets, inputs)

        def backward(kept: Any, cotangents: Sequence[Any]) -> tuple[None, None, list[Any]]:
            size_class, offsets, inputs, held = kept
            floats = [cotangents[i] for i in traced[0].float_results]
            widths = [self.results[i] for i in traced[0].float_results]

            def branch(c: int) -> Callable[..., Any]:
                def run(offsets: Any, inputs: Any, held: Any, floats: Any) -> list[Any]:
                    own = self._narrowed(c, inputs, self.inputs)
                    leaves = saved.restored(c, [offsets, *own], held)
                    back = jax.tree.unflatten(traced[c].tree, leaves)
                    found = back(self._narrowed(c, floats, widths))
                    places = [i for i, d in enumerate(self.is_differentiable) if d]
                    return self._widened(found, [self.inputs[i] for i in places])

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
        branches = [branch(c) for c in range(self.num_classes)]
        if len(branches) == 1:
            return branches[0](*operands)
        return jax.lax.switch(size_class, branches, *operands)

    def _narrowed(self, c: int, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
        return [
            x if width is None else narrow(x, width[0], width[1][c])
            for x, width in zip(arrays, widths, strict=True)
        ]

    def _widened(self, arrays: Sequence[Any], widths: Sequence[Width]) -> list[Any]:
        return [
            x if width is None else widen(x, width[0], max(width[1]))
            for x, width in zip(arrays, widths, strict=True)
        ]

    def _traced(self, c: int, offsets: Any, inputs: Sequence[Any]) -> "_Traced":
        told: dict[str, Any] = {}

        def forward(offsets: Any, *inputs: Any) -> list[Any]:
            def run(own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                given = iter(own)
                every = [
                    next(given) if d else x
                    for x, d in zip(inputs, self.is_differentiable, strict=True)
                ]
                results = self.run(c, offsets, every)
                is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
                told["floats"] = tuple(i for i, f in enumerate(is_float) if f)
                return [x for x, f in zip(results, is_float, strict=True) if f], [
                    x for x, f in zip(results, is_float, strict=True) if not f
                ]

            own = [x for x, d in zip(inputs, self.is_differentiable, strict=True) if d]
            floats, back, others = jax.vjp(run, own, has_aux=True)
            leaves, told["tree"] = jax.tree.flatten(lambda_of(back))
            each = iter(floats), iter(others)
            num = len(floats) + len(others)
            results = [next(each[0 if i in told["floats"] else 1]) for i in range(num)]
            return [*results, *leaves]

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        own = [
            x if width is None else _with_size(x, width[0], width[1][c])
            for x, width in zip(shapes, self.inputs, strict=True)
        ]
        program = jax.make_jaxpr(forward)(offsets, *own)
        return _Traced(
            program=program,
            num_results=len(self.results),
            tree=told["tree"],
            float_results=told["floats"],
        )


def lambda_of(back: Any) -> Any:
    """The backward of one list of arguments as that list's cotangents."""
    return jax.tree_util.Partial(_first, back)


def _first(back: Any, cotangents: Any) -> Any:
    [found] = back(cotangents)
    return found


def _with_size(x: Any, dim: int, size: int) -> Any:
    shape = tuple(size if d == dim else n for d, n in enumerate(x.shape))
    return jax.ShapeDtypeStruct(shape, x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """A block for one size class.

    Attributes:
        program: `(offsets, *inputs) -> results, then what the backward needs`.
        num_results: Of the first.
        tree: Of the backward, whose leaves are the second.
        float_results: Places of the results that have cotangents.
    """

    program: ClosedJaxpr
    num_results: int
    tree: Any
    float_results: tuple[int, ...]

    def sources(self) -> tuple[tuple[str, int], ...]:
        """Of each leaf of the backward: an input, a result of the forward, or the same as a leaf.

        A weight that the backward reads is an input: it is not kept a second time.
        """
        jaxpr = self.program.jaxpr
        places = {v: ("input", i) for i, v in enumerate(jaxpr.invars)}
        found = []
        for j, v in enumerate(jaxpr.outvars[self.num_results :]):
            if isinstance(v, Literal):
                found.append(("saved", j))
                continue
            found.append(places.setdefault(v, ("saved", j)))
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Saved:
    """What the backward needs, in the same shapes on every device.

    Attributes:
        sources: See `_Traced.sources`.
        kept: Numbers of the leaves that are kept.
        shapes: For each class, of those.
    """

    sources: tuple[tuple[str, int], ...]
    kept: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, traced: Sequence[_Traced]) -> "_Saved":
        """What classes keep, which is the same but for sizes."""
        sources = {own.sources() for own in traced}
        assert len(sources) == 1, "size classes are traced alike"
        [one] = sources
        kept = tuple(dict.fromkeys(j for kind, j in one if kind == "saved"))
        shapes = [
            tuple(tuple(t.program.out_avals[t.num_results + j].shape) for j in kept) for t in traced
        ]
        return cls(sources=one, kept=kept, shapes=tuple(shapes))

    def padded(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that are kept, as large as in any class."""
        out = []
        for k, j in enumerate(self.kept):
            x = jnp.asarray(leaves[j])
            for dim, sizes in enumerate(zip(*(own[k] for own in self.shapes), strict=True)):
                x = widen(x, dim, max(sizes))
            out.append(x)
        return out

    def restored(self, c: int, inputs: Sequence[Any], held: Sequence[Any]) -> list[Any]:
        """All leaves in a class."""
        own = {}
        for k, j in enumerate(self.kept):
            x = held[k]
            for dim, size in enumerate(self.shapes[c][k]):
                x = narrow(x, dim, size)
            own[j] = x
        return [inputs[j] if kind == "input" else own[j] for kind, j in self.sources]

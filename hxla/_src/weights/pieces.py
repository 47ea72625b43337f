"""An array of a model as pieces of a file's tensors: stacked, joined, cut, transposed.

Everything is a view of the file's bytes, so a slice of the array reads or writes only its bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType

import numpy as np

from .name_map import TensorName, file_patterns, model_pattern

Index = tuple[slice, ...]
#: Ends in an ellipsis, so that a single element is also a view.
Place = tuple[slice | int | EllipsisType, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """The part of an array that is in one tensor.

    Attributes:
        array_shape: Of the piece, in the array's dimensions without a stacked one.
        dims: For each dimension of the tensor the dimensions of `array_shape` that form it.
        part: If the piece is part of the tensor: dimension, number of the part, number of parts.
        axis: The array's dimension along which pieces are joined or stacked; None: one piece.
        start: Of the piece along `axis`.
        is_stacked: Whether the piece is one entry of `axis` and lacks this dimension.
    """

    tensor: str
    shape: tuple[int, ...]
    array_shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    part: tuple[int, int, int] | None
    axis: int | None = None
    start: int = 0
    is_stacked: bool = False

    def within(self, stored: np.ndarray) -> np.ndarray:
        """The piece as a view of its stored tensor."""
        if self.part is not None:
            dim, i, num = self.part
            size = self.shape[dim] // num
            cut = [slice(None)] * stored.ndim
            cut[dim] = slice(i * size, (i + 1) * size)
            stored = stored[tuple(cut)]
        order = [d for group in self.dims for d in group]
        split = stored.reshape([self.array_shape[d] for d in order])
        assert not split.size or np.may_share_memory(split, stored)  # a write to a copy is lost
        return split.transpose(np.argsort(order))

    def overlap(self, index: Index) -> tuple[Place, Place] | None:
        """The place in a block of the array, and the part of the piece there; None: disjoint."""
        everything: Place = (*(slice(None),) * len(index), ...)
        if self.axis is None:
            return everything, (*index, ...)
        wanted = index[self.axis]
        size = 1 if self.is_stacked else self.array_shape[self.axis]
        low, high = max(wanted.start, self.start), min(wanted.stop, self.start + size)
        if low >= high:
            return None
        place, part = list(everything), list[slice | int | EllipsisType]((*index, ...))
        if self.is_stacked:
            place[self.axis] = low - wanted.start
            del part[self.axis]
        else:
            place[self.axis] = slice(low - wanted.start, high - wanted.start)
            part[self.axis] = slice(low - self.start, high - self.start)
        return tuple(place), tuple(part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieced:
    """An array of a model and its pieces.

    Attributes:
        name: The array's path in the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[TensorPiece, ...]

    def parts(
        self, block: np.ndarray, index: Index, view: Callable[[str], np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Views of a block of the array, each with the view of a tensor for it.

        Args:
            index: Of the block in the array.
            view: From the name of a tensor to the tensor.
        """
        for piece in self.pieces:
            overlap = piece.overlap(index)
            if overlap is not None:
                place, part = overlap
                yield block[place], piece.within(view(piece.tensor))[part]

    def read(self, index: Sequence[slice], view: Callable[[str], np.ndarray]) -> np.ndarray:
        """A new block of the array, in the model's dtype."""
        whole = normal(index, self.shape)
        block = np.empty([s.stop - s.start for s in whole], self.dtype)
        for part, stored in self.parts(block, whole, view):
            part[...] = stored.astype(self.dtype)
        return block

    def write(
        self, block: np.ndarray, index: Sequence[slice], view: Callable[[str], np.ndarray]
    ) -> None:
        """Write a block of the array to the file."""
        for part, stored in self.parts(block, normal(index, self.shape), view):
            stored[...] = part


def normal(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Slices with explicit ends."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def pieced(name: str, shape: tuple[int, ...], dtype: np.dtype, rule: TensorName) -> Pieced:
    """The pieces of an array by the rule that matches its name.

    Raises:
        ValueError: If the rule does not fit the array's shape.
    """
    bound = model_pattern(rule).match(name)
    assert bound is not None
    first = file_patterns(rule)[0]
    for word, dim in (("stack", rule.stack), ("join", rule.join)):
        if dim is not None and dim >= len(shape):
            raise ValueError(f"{word} = {dim}, but the array has {len(shape)} dimensions")
    if rule.stack is not None:
        [key] = first.placeholders - model_pattern(rule).placeholders
        rest = shape[: rule.stack] + shape[rule.stack + 1 :]
        starts, axis = list(range(shape[rule.stack])), rule.stack
        names = [first.fill({**bound, key: str(i)}) for i in starts]
        shapes = [rest] * len(names)
    elif rule.join is not None:
        sizes = _joined_sizes(shape[rule.join], rule.shares or (1,) * len(rule.file))
        names = [p.fill(bound) for p in file_patterns(rule)]
        shapes = [(*shape[: rule.join], n, *shape[rule.join + 1 :]) for n in sizes]
        starts, axis = [sum(sizes[:i]) for i in range(len(sizes))], rule.join
    else:
        names, shapes, starts, axis = [first.fill(bound)], [shape], [0], None
    pieces = tuple(
        _piece(tensor, piece_shape, rule, axis=axis, start=start)
        for tensor, piece_shape, start in zip(names, shapes, starts, strict=True)
    )
    return Pieced(name=name, shape=shape, dtype=dtype, pieces=pieces)


def _joined_sizes(size: int, shares: Sequence[int]) -> list[int]:
    unit, rest = divmod(size, sum(shares))
    if rest:
        raise ValueError(f"size {size} does not divide into shares of {list(shares)}")
    return [unit * share for share in shares]


def _piece(
    tensor: str, shape: tuple[int, ...], rule: TensorName, *, axis: int | None, start: int
) -> TensorPiece:
    dims = rule.dims if rule.dims is not None else tuple((d,) for d in range(len(shape)))
    if sorted(d for group in dims for d in group) != list(range(len(shape))):
        raise ValueError(f"dims = {rule.written_dims}, but {len(shape)} dimensions")
    stored = [math.prod(shape[d] for d in group) for group in dims]
    if rule.part is not None:
        dim, _, num = rule.part
        if dim >= len(stored):
            raise ValueError(f"part cuts dimension {dim}, but the tensor has {len(stored)}")
        stored[dim] *= num
    return TensorPiece(
        tensor=tensor,
        shape=tuple(stored),
        array_shape=shape,
        dims=dims,
        part=rule.part,
        axis=axis,
        start=start,
        is_stacked=rule.stack is not None,
    )

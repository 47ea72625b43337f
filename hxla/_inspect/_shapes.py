"""Shapes as HLO text writes them, and their bytes."""

import functools
import math
import re

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


def element_bits(dtype: str) -> int:
    """Bits of an element: 16 for `bf16`, 8 for `f8e4m3fn`; 0 for what is no array."""
    number = re.match(r"[a-z]+(\d+)", dtype)
    if number:
        return int(number[1])
    return 8 if dtype == "pred" else 0


def split_outside(text: str, separator: str) -> list[str]:
    """Pieces of a text between separators that stand outside all brackets."""
    out, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth <= 0:
            out.append(text[start:i])
            start = i + 1
    return [*out, text[start:]]


@functools.lru_cache(maxsize=65536)
def tuple_elements(shape: str) -> tuple[str, ...]:
    """Outermost elements of a tuple; the shape itself if it is none."""
    if not shape.startswith("("):
        return (shape,)
    pieces = split_outside(_COMMENT.sub("", shape[1:].rpartition(")")[0]), ",")
    return tuple(stripped for piece in pieces if (stripped := piece.strip()))


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtype and dimensions of every array of a shape, tuples flattened."""
    found = _ARRAY.findall(shape)
    return tuple(
        (dtype, tuple(int(n.strip(" <=?") or 0) for n in dims.split(",") if n.strip()))
        for dtype, dims in found
    )


def first(shape: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and dimensions of the first array of a shape; of what holds none, a token's."""
    found = arrays(shape)
    return found[0] if found else ("token", ())


@functools.lru_cache(maxsize=65536)
def shape_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without padding of layouts."""
    return sum(-(-element_bits(dtype) * math.prod(dims) // 8) for dtype, dims in arrays(shape))


@functools.lru_cache(maxsize=65536)
def is_scalar(shape: str) -> bool:
    """Whether no array of a shape has a dimension."""
    return all(not dims for _, dims in arrays(shape))


@functools.lru_cache(maxsize=65536)
def shape_text(shape: str) -> str:
    """Without layouts: `f32[8,16]`, `(f32[8], s32[])`."""
    names = [array_text(*array) for array in arrays(shape)]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def array_text(dtype: str, dims: tuple[int, ...]) -> str:
    """`f32[8,16]`."""
    return f"{dtype}[{','.join(map(str, dims))}]"

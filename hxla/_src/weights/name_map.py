"""Maps from the arrays of a model to the tensors of weight files.

`{n}` stands for the rest of one component of a path (`blocks/{n}/up`, `Dense_{n}`), and `{path*}`
for any number of whole components. Regular expressions are not used, since a short one can take
longer than training.

An array of a model is pieces of a file's tensors: stacked, joined, cut, transposed. Everything is a
view of the file's bytes, so a slice of the array reads or writes only its bytes.
"""

import dataclasses
import functools
import math
import string
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import pydantic

from ..core import files
from ..core.errors import ConfigError

#: The value of each placeholder: one text, or components.
Bound = Mapping[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class NamePattern:
    """A pattern of names."""

    text: str
    separator: str

    def __post_init__(self) -> None:
        """Refuse ambiguous patterns with a ValueError."""
        several = [part for part in self._parts if part[1].endswith("*")]
        if len(several) > 1:
            raise ValueError(f"{self.text!r} has two placeholders for several components; use one")
        if any(before or after for before, _, after in several):
            raise ValueError(f"{self.text!r}: {{...*}} stands for whole components")

    @functools.cached_property
    def _parts(self) -> tuple[tuple[str, str, str], ...]:
        """For each component the text before its placeholder, the placeholder, the text after."""
        return tuple(_part(text, self.text) for text in self.text.split(self.separator))

    @property
    def placeholders(self) -> frozenset[str]:
        """The placeholders' names, with a star for several components."""
        return frozenset(name for _, name, _ in self._parts if name)

    def match(self, name: str) -> Bound | None:
        """The placeholders' values in a name, or None if it does not match."""
        parts, components = self._parts, name.split(self.separator)
        star = next((i for i, part in enumerate(parts) if part[1].endswith("*")), None)
        if star is None and len(parts) != len(components):
            return None
        if len(components) < len(parts) - 1:
            return None
        bound: dict[str, str | tuple[str, ...]] = {}
        if star is not None:
            end = len(components) - (len(parts) - star - 1)
            bound[parts[star][1]] = tuple(components[star:end])
            parts = parts[:star] + parts[star + 1 :]
            components = components[:star] + components[end:]
        for (before, key, after), text in zip(parts, components, strict=True):
            if not key:
                if text != before:
                    return None
                continue
            if len(text) <= len(before) + len(after):
                return None
            if not (text.startswith(before) and text.endswith(after)):
                return None
            value = text[len(before) : len(text) - len(after)]
            if bound.setdefault(key, value) != value:
                return None
        return bound

    def fill(self, bound: Bound) -> str:
        """The name with the placeholders replaced."""
        out: list[str] = []
        for before, key, after in self._parts:
            value = bound[key] if key else ""
            out += value if isinstance(value, tuple) else [f"{before}{value}{after}"]
        return self.separator.join(out)


@functools.cache
def pattern(text: str, separator: str) -> NamePattern:
    """The pattern of a text, cached since each is matched with every array of a model."""
    return NamePattern(text, separator)


def _part(text: str, whole: str) -> tuple[str, str, str]:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{whole!r} is no pattern: {error}") from None
    before, key, after = "", "", ""
    for literal, field, spec, conversion in parsed:
        if key and field is not None:
            raise ValueError(f"{whole!r} has two placeholders in one component; use one")
        before, after = (before, literal) if key else (before + literal, after)
        if field is None:
            continue
        if spec or conversion or not field.removesuffix("*").isidentifier():
            raise ValueError(f"{whole!r}: {{{field}}} is no placeholder; write {{n}} or {{path*}}")
        key = field
    return before, key, after


_LARGEST_FILE = 1 << 20  # bytes
#: Between the components of a name in a model, and in a file.
MODEL_SEPARATOR, FILE_SEPARATOR = "/", "."


class TensorName(pydantic.BaseModel):
    """One rule: the tensors of a file that form an array of the model.

    Attributes:
        model: The pattern of the array's path in the model, `blocks/{n}/up/kernel`.
        file: The pattern of the tensor's name in the file, `h.{n}.mlp.up.weight`, or several whose
            tensors are joined. A placeholder that only `file` has counts from 0: see `stack`.
        rank: The number of dimensions that the array must have; None: any.
        dims: For each dimension of the file's tensor, the array's dimension or dimensions that form
            it; None: the same. PyTorch's linear layers need `[1, 0]`.
        stack: The array's dimension along which tensors are stacked, as in a scan over layers: one
            for each number of the placeholder that only `file` has. `dims` then leave this
            dimension out.
        join: The array's dimension along which the tensors of several `file` are concatenated.
        shares: The ratio of their sizes in that dimension; by default all are equal.
        part: If the array is one of equal parts of a tensor: the tensor's dimension that is cut,
            the number of the part, counted from 0, and the number of parts.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model: str
    file: tuple[str, ...] = pydantic.Field(min_length=1)
    rank: int | None = pydantic.Field(None, ge=0, strict=True)
    dims: tuple[tuple[pydantic.StrictInt, ...], ...] | None = None
    stack: int | None = pydantic.Field(None, ge=0, strict=True)
    join: int | None = pydantic.Field(None, ge=0, strict=True)
    shares: tuple[pydantic.StrictInt, ...] = ()
    part: tuple[pydantic.StrictInt, pydantic.StrictInt, pydantic.StrictInt] | None = None

    @pydantic.field_validator("model")
    @classmethod
    def _is_pattern(cls, text: str) -> str:
        pattern(text, MODEL_SEPARATOR)
        return text

    @pydantic.field_validator("file", mode="before")
    @classmethod
    def _is_one_or_several(cls, file: Any) -> Any:
        return (file,) if isinstance(file, str) else file

    @pydantic.field_validator("dims", mode="before")
    @classmethod
    def _as_in_a_file(cls, dims: Any) -> Any:
        """Entries may be one dimension as a number."""
        if not isinstance(dims, list | tuple):
            return dims
        return tuple(tuple(d) if isinstance(d, list | tuple) else (d,) for d in dims)

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "TensorName":
        known = model_pattern(self).placeholders
        new = [p.placeholders - known for p in file_patterns(self)]
        if any(n != new[0] for n in new) or len(new[0]) > 1 or any(n.endswith("*") for n in new[0]):
            raise ValueError(f"{list(self.file)} have placeholders that {self.model!r} lacks")
        if (self.stack is None) != (not new[0]):
            raise ValueError(
                "`stack` and a placeholder that only `file` has need each other: "
                f"stack = {self.stack}, placeholders {sorted(new[0])}"
            )
        if (self.join is None) != (len(self.file) == 1):
            raise ValueError(
                f"`join` is required for several files and refused for one, here {len(self.file)}"
            )
        if self.shares and len(self.shares) != len(self.file):
            raise ValueError(f"{len(self.shares)} shares for {len(self.file)} files")
        if self.stack is not None and self.join is not None:
            raise ValueError("an array is either stacked or joined, not both")
        if any(share < 1 for share in self.shares):
            raise ValueError(f"shares {list(self.shares)} are at least 1 each")
        if self.dims is not None:
            flat = sorted(d for group in self.dims for d in group)
            if flat != list(range(len(flat))):
                raise ValueError(f"dims {self.written_dims} do not name each dimension once")
        if self.part is not None and not (self.part[0] >= 0 and 0 <= self.part[1] < self.part[2]):
            raise ValueError(f"part {list(self.part)}: parts and dimensions are counted from 0")
        return self

    @property
    def written_dims(self) -> list[Any]:
        """The dims as a map's file writes them."""
        return [d[0] if len(d) == 1 else list(d) for d in self.dims or ()]

    def __str__(self) -> str:
        return f"{self.model!r} <- {' + '.join(map(repr, self.file))}"


def model_pattern(rule: TensorName) -> NamePattern:
    """The pattern of a rule's paths in the model."""
    return pattern(rule.model, MODEL_SEPARATOR)


def file_patterns(rule: TensorName) -> tuple[NamePattern, ...]:
    """The patterns of a rule's tensor names in the file."""
    return tuple(pattern(text, FILE_SEPARATOR) for text in rule.file)


class NameMap(pydantic.BaseModel):
    """Rules in order: the first that matches an array of the model decides.

    Attributes:
        name: The name of the map.
        description: The files and models that it is for.
        format: The `format` in a written file's metadata; transformers reads files of `pt`.
        tensors: The rules in order; a file has one table `tensor` for each.
        fresh: Patterns of arrays of the model that no file has: they keep their initial values.
        unused: Patterns of tensors in a file that the model does not have.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    format: str = "flax"
    tensors: tuple[TensorName, ...] = pydantic.Field(
        min_length=1, validation_alias=pydantic.AliasChoices("tensor", "tensors")
    )
    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @pydantic.field_validator("fresh")
    @classmethod
    def _are_paths(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(pattern(text, MODEL_SEPARATOR).text for text in patterns)

    @pydantic.field_validator("unused")
    @classmethod
    def _are_names(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(pattern(text, FILE_SEPARATOR).text for text in patterns)

    def is_fresh(self, path: str) -> bool:
        """Say whether an array of the model keeps its initial values.

        Args:
            path: The array's path in the model.

        Returns:
            Whether a pattern of `fresh` matches.
        """
        return any(pattern(text, MODEL_SEPARATOR).match(path) is not None for text in self.fresh)

    def is_unused(self, name: str) -> bool:
        """Say whether a tensor is one that the model does not have.

        Args:
            name: The tensor's name in the file.

        Returns:
            Whether a pattern of `unused` matches.
        """
        return any(pattern(text, FILE_SEPARATOR).match(name) is not None for text in self.unused)

    def rule_of(self, path: str, rank: int) -> TensorName | None:
        """Find the rule for an array of the model.

        Args:
            path: The array's path in the model.
            rank: The number of its dimensions.

        Returns:
            The first rule that matches, or None.
        """
        for rule in self.tensors:
            if rule.rank in (None, rank) and model_pattern(rule).match(path) is not None:
                return rule
        return None


#: The same names, components joined by dots: the default.
SAME = NameMap(name="same", tensors=(TensorName(model="{path*}", file=("{path*}",)),))


def as_names(names: "str | NameMap | None") -> NameMap:
    """The map of a name or file; `SAME` for None."""
    return SAME if names is None else load_names(names) if isinstance(names, str) else names


def load_names(name_or_path: str) -> NameMap:
    """Read a map of names.

    Args:
        name_or_path: The name of a built-in map (`torch`, `llama-maxtext`, ...) or the path of
            a TOML file.

    Returns:
        The map.

    Raises:
        ConfigError: If there is no such map, or it has unknown keys or wrong values, all at once.

    Example:
        >>> import hxla
        >>> hxla.load_names("torch").rule_of("head/kernel", 2).written_dims
        [1, 0]
    """
    path = files.find("names", name_or_path)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ConfigError(f"names {path}: the file is larger than {_LARGEST_FILE} bytes")
        return NameMap.model_validate(tomllib.loads(text.decode("utf-8")))
    except pydantic.ValidationError as error:
        lines = [f"  {_place(e['loc'])}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"names {path} have errors:\n" + "\n".join(lines)) from None
    except (ValueError, RecursionError) as error:  # from TOML
        raise ConfigError(f"names {path}: {error}") from None


def _place(parts: Sequence[int | str]) -> str:
    return ".".join(map(str, parts))


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

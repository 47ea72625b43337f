"""Existing weights: the tensors of files matched with a model's arrays, all faults at once."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError, WeightsError
from ..core.files import meant, nearest
from ..core.types import PyTree
from ..model.functional import leaf_names
from .name_map import FILE_SEPARATOR, MODEL_SEPARATOR, NameMap, Pieced, as_names, pattern, pieced
from .safetensors import Stored, files_of

#: From the slices of a block of an array to the block.
Read = Callable[[tuple[slice, ...]], np.ndarray]
Gather = Callable[[str, str], tuple[str, ...]]

_SHOWN = 20  # faults of each kind


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights in files, with which training begins: `hxla.Job(..., weights=...)`.

    Args:
        path: A `.safetensors` file, the index of several (`model.safetensors.index.json`), or the
            folder of either.
        names: The map from the model's names to those of the files, or the name or file of one.
            None: the same names, components joined by dots.
        cast: Whether floating-point tensors of another dtype are cast to the model's; otherwise
            they are refused.
        fresh: Patterns of arrays of the model that the files do not have, such as
            `"{path*}/lora_a"`: they keep their initial values. `{path*}` stands for any number of
            components of a path, and `{n}` for the rest of one.
        unused: Patterns of tensors in the files that the model does not have, such as
            `"lm_head.{path*}"`.

    Raises:
        ConfigError: If a pattern is malformed.

    Example:
        >>> import hxla
        >>> hxla.Weights("llama/", names="torch", fresh=["{path*}/lora_a", "{path*}/lora_b"]).fresh
        ('{path*}/lora_a', '{path*}/lora_b')
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    names: str | NameMap | None = None
    cast: bool = False
    fresh: str | Sequence[str] = ()
    unused: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, separator in (("fresh", MODEL_SEPARATOR), ("unused", FILE_SEPARATOR)):
            given = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given)
            try:
                for text in patterns:
                    pattern(text, separator)
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(f"hxla.Weights(..., {name}={given!r}): {error}") from None
            object.__setattr__(self, name, patterns)


def as_weights(weights: "str | os.PathLike[str] | Weights") -> Weights:
    """The weights, or those at a path."""
    return weights if isinstance(weights, Weights) else Weights(weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """An array of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, tree: PyTree) -> "tuple[Wanted, ...]":
        """The arrays of a tree, or their shapes, in its order.

        The parameters of Linen's variables are named without their collection, as plans name them.
        """
        names: Sequence[str] = leaf_names(tree)
        if isinstance(tree, dict) and "params" in tree:
            names = [name.removeprefix("params/") for name in names]
        return tuple(
            cls(name=name, shape=tuple(x.shape), dtype=x.dtype)
            for name, x in zip(names, map(_array, jax.tree.leaves(tree)), strict=True)
        )


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x)


def filled(shape: Sequence[int], sharding: jax.sharding.Sharding, read: Read) -> jax.Array:
    """An array whose shards on this process's devices are read."""
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: read(index or ()))


def open_weights(
    weights: Weights,
    wanted: Sequence[Wanted],
    gather: Gather = lambda _, text: (text,),
) -> list[Read | None]:
    """For each array of the model a reader of its blocks; None where the map calls it fresh.

    Args:
        gather: Name and text to the texts of all processes.

    Raises:
        WeightsError: If a file is damaged, processes see different files, or names, shapes and
            dtypes do not match the model: all faults at once.
        ConfigError: If the map of names has errors.
    """
    names, problem = _names_of(weights), ""
    stored: dict[str, Stored] = {}
    try:
        stored = files_of(pathlib.Path(weights.path).expanduser())
    except WeightsError as error:
        problem = str(error)
    texts = gather("weights", f"{_digest(stored)} {problem}")
    _check_same_files(weights.path, [text.split(" ", 1) for text in texts])
    arrays, faults = _matched(names, wanted, stored, cast=weights.cast)
    faults += _without_match("fresh", weights.fresh, MODEL_SEPARATOR, [w.name for w in wanted])
    faults += _without_match("unused", weights.unused, FILE_SEPARATOR, list(stored))
    if faults:
        raise WeightsError(
            f"{weights.path} does not match the model with the names {names.name!r}:\n"
            + "\n".join(faults)
        )

    def view(name: str) -> np.ndarray:
        return stored[name].view()

    def reader(array: Pieced) -> Read:
        return lambda index: array.read(index, view)

    return [None if array is None else reader(array) for array in arrays]


def _names_of(weights: Weights) -> NameMap:
    """The map of names with the fresh and unused names that are given besides."""
    names = as_names(weights.names)
    fresh, unused = (*names.fresh, *weights.fresh), (*names.unused, *weights.unused)
    return names.model_copy(update={"fresh": fresh, "unused": unused})


def _without_match(
    what: str, patterns: Sequence[str], separator: str, names: Sequence[str]
) -> Iterator[str]:
    """Faults of patterns that match no name, each with the nearest one."""
    for text in patterns:
        if not any(pattern(text, separator).match(name) is not None for name in names):
            hint = f"; the nearest is {nearest(text, names)!r}" if names else ""
            yield (
                f"{what}: {text!r} matches nothing{hint}. A pattern stands for a whole name: "
                f"'{{path*}}{separator}{text.split(separator)[-1]}' ends so"
            )


def _digest(stored: Mapping[str, Stored]) -> str:
    """Hash of names, shapes and offsets; the data is too large to read on every process."""
    table = [(n, s.shape, str(s.dtype), s.begin) for n, s in sorted(stored.items())]
    return hashlib.sha256(repr(table).encode()).hexdigest()[:16]


def _check_same_files(path: Any, rows: Sequence[Sequence[str]]) -> None:
    """Refuse files that differ between processes, from each one's digest and problem."""
    problems = {rank: problem for rank, (_, problem) in enumerate(rows) if problem}
    if problems:
        texts = dict.fromkeys(problems.values())
        ranks = f" (on processes {', '.join(map(str, problems))})" if len(rows) > 1 else ""
        raise WeightsError("\n".join(texts) + ranks)
    other = [str(rank) for rank, row in enumerate(rows) if row[0] != rows[0][0]]
    if other:
        raise WeightsError(
            f"{path} has other tensors on process {', '.join(other)} than on process 0: every "
            "process must see the same files"
        )


def _matched(
    names: NameMap, wanted: Sequence[Wanted], stored: dict[str, Stored], *, cast: bool
) -> tuple[list[Pieced | None], list[str]]:
    """The pieces of each array, and all faults.

    Complex tensors in `stored` become pairs of real numbers where the model has pairs.
    """
    arrays: list[Pieced | None] = []
    unnamed, misfit, missing, shapes, dtypes = [], [], [], [], []
    used: set[str] = set()
    for array in wanted:
        arrays.append(None)
        if names.is_fresh(array.name):
            continue
        rule = names.rule_of(array.name, len(array.shape))
        label = f"{array.name} {array.dtype}{list(array.shape)}"
        if rule is None:
            unnamed.append(f"  {label}")
            continue
        try:
            pieces = pieced(array.name, array.shape, array.dtype, rule)
        except ValueError as error:
            misfit.append(f"  {label}, rule {rule}: {error}")
            continue
        arrays[-1] = pieces
        for piece in pieces.pieces:
            used.add(piece.tensor)
            tensor = stored.get(piece.tensor)
            if tensor is None:
                missing.append(f"  {piece.tensor} for {label}")
                continue
            tensor = stored[piece.tensor] = _as_real_or_complex(tensor, piece.shape, array.dtype)
            if tensor.shape != piece.shape:
                shapes.append(
                    f"  {piece.tensor}: {list(tensor.shape)} in the file, {list(piece.shape)} "
                    f"needed for {label} by the rule {rule}"
                )
            elif tensor.dtype != array.dtype and not (cast and _can_cast(tensor, array)):
                dtypes.append(f"  {piece.tensor}: {tensor.dtype} in the file, needed for {label}")
    unexpected = [n for n in stored if n not in used and not names.is_unused(n)]
    near = meant(missing[0].split()[0], unexpected) if missing else None
    hint = f" (the file has {near}, which no rule uses)" if near else ""
    faults = [
        *_listed("no rule for arrays of the model; add one, or name them in `fresh`", unnamed),
        *_listed("rules that do not fit the array", misfit),
        *_listed(f"missing in the file{hint}", missing),
        *_listed(
            "in the file, but used by no rule; add a rule, or name them in `unused`",
            [f"  {n} {stored[n].dtype}{list(stored[n].shape)}" for n in unexpected],
        ),
        *_listed("of another shape; a rule's `dims`, `part`, `join` and `stack` change it", shapes),
        *_listed(
            "of another dtype; hxla.Weights(..., cast=True) casts among real floating-point dtypes",
            dtypes,
        ),
    ]
    return arrays, faults


def _as_real_or_complex(tensor: Stored, shape: tuple[int, ...], dtype: Any) -> Stored:
    """A complex tensor as pairs of real numbers, or pairs as complex, if the model has these.

    Trained complex parameters are pairs in a last dimension of two; the bytes are the same.
    """
    whole, half = np.dtype(np.complex64), np.dtype(np.float32)
    is_wanted_complex = jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)
    if tensor.dtype == whole and not is_wanted_complex and shape == (*tensor.shape, 2):
        return dataclasses.replace(tensor, shape=shape, dtype=half)
    if tensor.dtype == half and is_wanted_complex and tensor.shape == (*shape, 2):
        return dataclasses.replace(tensor, shape=shape, dtype=whole)
    return tensor


def _can_cast(tensor: Stored, array: Wanted) -> bool:
    floating = jax.numpy.floating
    return all(jax.numpy.issubdtype(x.dtype, floating) for x in (tensor, array))


def _listed(head: str, faults: Sequence[str]) -> Iterator[str]:
    if faults:
        yield f"{head}:"
        yield from faults[:_SHOWN]
        if len(faults) > _SHOWN:
            yield f"  and {len(faults) - _SHOWN} more"

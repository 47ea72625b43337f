"""Weights that exist: which tensors of a file fill which arrays of a model, all faults at once."""

import dataclasses
import difflib
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import WeightsError
from ..core.types import PyTree
from ..model.functional import leaf_names
from .name_map import NameMap, as_names
from .pieces import Pieced, pieced
from .safetensors import Stored, files_of

#: Reads a block of an array, of which it is given the slices.
Read = Callable[[tuple[slice, ...]], np.ndarray]
Gather = Callable[[str, str], tuple[str, ...]]

_SHOWN = 20  # faults of each kind


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights in files that training begins with: `hxla.Job(..., weights=...)`.

    Args:
        path: A `.safetensors` file, the index of several (`model.safetensors.index.json`), or the
            folder of either.
        names: The map from the model's names to those of the files, or the name or file of one.
            None: the same names, components joined by dots.
        cast: Whether floating-point tensors of another dtype are cast to the model's; else they
            are refused.

    Example:
        >>> import hxla
        >>> hxla.Weights("llama/", names="torch", cast=True).cast
        True
    """

    path: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    names: str | NameMap | None = None
    cast: bool = False


def as_weights(weights: "str | os.PathLike[str] | Weights") -> Weights:
    """Weights that may be given by their path."""
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
    """An array of which each device of this process is given what is read for its slices."""
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: read(index or ()))


def open_weights(
    weights: Weights,
    wanted: Sequence[Wanted],
    gather: Gather = lambda _, text: (text,),
) -> list[Read | None]:
    """For each array what reads blocks of it; None where the map says that it is fresh.

    Args:
        wanted: The arrays of the model.
        gather: Name and text to the texts of all processes.

    Raises:
        WeightsError: If a file is damaged, processes see different files, or names, shapes and
            dtypes do not suit the model: all faults at once.
        ConfigError: If the map of names has errors.
    """
    names, problem = as_names(weights.names), ""
    stored: dict[str, Stored] = {}
    try:
        stored = files_of(pathlib.Path(weights.path).expanduser())
    except WeightsError as error:
        problem = str(error)
    said = gather("weights", f"{_digest(stored)} {problem}")
    _refuse_other_files(weights.path, [text.split(" ", 1) for text in said])
    found, faults = _matched(names, wanted, stored, cast=weights.cast)
    if faults:
        raise WeightsError(
            f"{weights.path} does not suit the model by the names {names.name!r}:\n"
            + "\n".join(faults)
        )

    def view(name: str) -> np.ndarray:
        return stored[name].view()

    def reader(array: Pieced) -> Read:
        return lambda index: array.read(index, view)

    return [None if array is None else reader(array) for array in found]


def _digest(stored: Mapping[str, Stored]) -> str:
    """Of names, shapes and places: what lies there is too much to read on every process."""
    table = [(n, s.shape, str(s.dtype), s.begin) for n, s in sorted(stored.items())]
    return hashlib.sha256(repr(table).encode()).hexdigest()[:16]


def _refuse_other_files(path: Any, said: Sequence[Sequence[str]]) -> None:
    problems = {rank: problem for rank, (_, problem) in enumerate(said) if problem}
    if problems:
        texts = dict.fromkeys(problems.values())
        ranks = f" (on processes {', '.join(map(str, problems))})" if len(said) > 1 else ""
        raise WeightsError("\n".join(texts) + ranks)
    other = [str(rank) for rank, row in enumerate(said) if row[0] != said[0][0]]
    if other:
        raise WeightsError(
            f"{path} holds other tensors on process {', '.join(other)} than on process 0: every "
            "process must see the same files"
        )


def _matched(
    names: NameMap, wanted: Sequence[Wanted], stored: dict[str, Stored], *, cast: bool
) -> tuple[list[Pieced | None], list[str]]:
    """What makes each array, and all that is wrong with it.

    Complex tensors in `stored` become pairs of real numbers where the model has those.
    """
    found: list[Pieced | None] = []
    unnamed, misfit, missing, shapes, dtypes = [], [], [], [], []
    used: set[str] = set()
    for array in wanted:
        found.append(None)
        if names.is_fresh(array.name):
            continue
        rule = names.rule_of(array.name, len(array.shape))
        own = f"{array.name} {array.dtype}{list(array.shape)}"
        if rule is None:
            unnamed.append(f"  {own}")
            continue
        try:
            pieces = pieced(array.name, array.shape, array.dtype, rule)
        except ValueError as error:
            misfit.append(f"  {own}, rule {rule}: {error}")
            continue
        found[-1] = pieces
        for piece in pieces.pieces:
            used.add(piece.tensor)
            tensor = stored.get(piece.tensor)
            if tensor is None:
                missing.append(f"  {piece.tensor} for {own}")
                continue
            tensor = stored[piece.tensor] = _in_parts(tensor, piece.shape, array.dtype)
            if tensor.shape != piece.shape:
                shapes.append(
                    f"  {piece.tensor}: {list(tensor.shape)} in the file, {list(piece.shape)} "
                    f"needed for {own} by the rule {rule}"
                )
            elif tensor.dtype != array.dtype and not (cast and _can_cast(tensor, array)):
                dtypes.append(f"  {piece.tensor}: {tensor.dtype} in the file, needed for {own}")
    unexpected = [n for n in stored if n not in used and not names.is_unused(n)]
    near = difflib.get_close_matches(missing[0].split()[0], unexpected[:1000], 1) if missing else []
    hint = f" ({near[0]} is there and has no place)" if near else ""
    faults = [
        *_listed("no rule for arrays of the model; add one, or name them in `fresh`", unnamed),
        *_listed("rules that do not suit the array", misfit),
        *_listed(f"missing in the file{hint}", missing),
        *_listed(
            "in the file, with no place in the model; add a rule, or name them in `unused`",
            [f"  {n} {stored[n].dtype}{list(stored[n].shape)}" for n in unexpected],
        ),
        *_listed("of another shape; a rule's `dims`, `part`, `join` and `stack` change it", shapes),
        *_listed(
            "of another dtype; hxla.Weights(..., cast=True) casts among real floating-point dtypes",
            dtypes,
        ),
    ]
    return found, faults


def _in_parts(tensor: Stored, shape: tuple[int, ...], dtype: Any) -> Stored:
    """A tensor with each complex number as a pair of real ones, or back, if so it is wanted.

    Trained complex parameters are such pairs, in a last dimension of two; bytes are the same.
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

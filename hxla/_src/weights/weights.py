"""Existing weights: the tensors of files matched with a model's arrays, all faults at once.

`load_weights` and `save_weights` serve outside of training: safetensors, and folders that plain
Flax reads. Every process writes its shards into one file; nothing is gathered.
"""

import dataclasses
import hashlib
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from ..core.errors import ConfigError, WeightsError
from ..core.files import local_path, meant, nearest
from ..core.types import PyTree
from ..jax.coordination import gather
from ..model.functional import leaf_names
from ..model.variables import entries_of
from .name_map import FILE_SEPARATOR, MODEL_SEPARATOR, NameMap, Pieced, as_names, pattern, pieced
from .safetensors import Stored, files_of, make_file, read_header, unsupported_dtypes

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


_OTHERS = "_hxla_other_variables"  # an attribute of a session's state.params
_MOST_NAMES = 3
_MARK = "_CHECKPOINT_METADATA"  # a file that Orbax writes into each of its folders
_TIMEOUT_SECONDS = 600.0  # for the slowest process to write its slices


def _gather(what: str, text: str) -> tuple[str, ...]:
    return gather(what, text, timeout_seconds=_TIMEOUT_SECONDS)


def note_other_variables(state: Any) -> None:
    """Note an `hxla.State`'s other variables on its parameters, for a warning when saved alone."""
    others = [name for _, name, value in entries_of(state.aux) if not _is_stream(value)]
    if others and hasattr(state.params, "__dict__"):
        vars(state.params)[_OTHERS] = others


def weights_of(tree: PyTree) -> PyTree:
    """The weights of an `hxla.State` or of a tree of variables: all but random streams."""
    if {"params", "aux", "opt_state"} <= set(getattr(tree, "__dict__", ())):
        is_nnx = isinstance(tree.params, nnx.State)
        tree = nnx.merge_state(tree.params, tree.aux) if is_nnx else _of_linen(tree)
    if isinstance(tree, nnx.State):
        return nnx.filter_state(tree, nnx.Not(nnx.RngState))
    return tree


def _of_linen(state: Any) -> PyTree:
    return {"params": state.params, **state.aux}


def _arrays_of(model: Any) -> PyTree:
    """The arrays of a model without random streams, or a tree unchanged."""
    if isinstance(model, nn.Module):
        raise WeightsError(
            "a Linen module has no arrays: pass its variables, result.state and not result.model"
        )
    if isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Not(nnx.RngState))
    if others := getattr(model, "__dict__", {}).get(_OTHERS):
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        warnings.warn(
            f"session.state.params are written without the model's other variables, "
            f"{', '.join(others[:_MOST_NAMES])}{more}: pass session.weights to write both",
            stacklevel=3,
        )
    return weights_of(model)


def load_weights(weights: str | os.PathLike[str] | Weights, like: PyTree) -> PyTree:
    """Read weights from safetensors files, each array directly into its sharding.

    To train from weights, pass them to `hxla.Job(..., weights=...)`, which shards them by its plan.

    Args:
        weights: The file, index or folder, or an `hxla.Weights` that also maps names.
        like: The tree to fill: an `nnx.State`, Linen's variables, or any other tree of arrays or
            `jax.ShapeDtypeStruct`. Where a leaf has a sharding, the result has it too, and only the
            slices of this process's devices are read.

    Returns:
        A tree like `like`. Arrays that the map calls `fresh` are taken from `like`.

    Raises:
        WeightsError: If a file is damaged, or names, shapes and dtypes do not match `like`: all
            faults at once.
        ConfigError: If the map of names has errors.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        >>> hxla.save_weights("model.safetensors", model)
        >>> other = nnx.Linear(8, 2, rngs=nnx.Rngs(1))
        >>> nnx.update(other, hxla.load_weights("model.safetensors", nnx.state(other)))
        >>> bool((model.kernel[...] == other.kernel[...]).all())
        True
    """
    if isinstance(like, nnx.Module):
        raise WeightsError(
            "load_weights fills a tree: nnx.update(model, hxla.load_weights(path, "
            "nnx.state(model)))"
        )
    wanted = jax.tree.map(lambda x: None if _is_stream(x) else x, like, is_leaf=_is_stream)
    leaves, treedef = jax.tree.flatten(wanted)
    readers = open_weights(as_weights(weights), Wanted.of(wanted), _gather)
    loaded = jax.tree.unflatten(treedef, map(_read, leaves, readers))
    with_streams = lambda x, new: x if _is_stream(x) else new  # noqa: E731
    return jax.tree.map(with_streams, like, loaded, is_leaf=_is_stream)


def _is_stream(x: Any) -> bool:
    """Whether part of a tree is a random stream of an NNX model, which is no weight."""
    return isinstance(x, nnx.RngState)


def _read(like: Any, read: Read | None) -> Any:
    if read is None:
        return like
    sharding = getattr(like, "sharding", None)
    if sharding is not None:
        return filled(like.shape, sharding, read)
    block = read((slice(None),) * np.ndim(like))
    return block if isinstance(like, np.ndarray) else jax.numpy.asarray(block)


def save_weights(
    path: str | os.PathLike[str], tree: PyTree, *, names: str | NameMap | None = None
) -> None:
    """Write a model's arrays to a safetensors file, or to an Orbax folder that plain Flax reads.

    Every process of a job must call this and see the folder; each writes its shards, and nothing is
    gathered. The file or folder appears at the end by one rename, and replaces an older one.

    Args:
        path: A name that ends in `.safetensors` makes one such file; any other name makes a folder
            that `orbax.checkpoint.StandardCheckpointer` restores.
        tree: The arrays: `session.weights`, `result.weights`, an NNX model, Linen's variables, or
            any other tree. Of `session.state` the same is written as of `session.weights`: the
            parameters and the other variables, such as BatchNorm's statistics.
            `session.state.params` lacks the latter, which is a warning. Random streams of NNX
            models are left out.
        names: The map from the model's names to those of the file, or the name or file of one.
            None: the same names, components joined by dots.

    Raises:
        WeightsError: If the path cannot be written, or the map does not match the arrays: all
            faults at once.
        ConfigError: If the map of names has errors.

    Example:
        >>> import hxla, numpy as np
        >>> tree = {"head": {"kernel": np.ones((8, 2), np.float32)}}
        >>> hxla.save_weights("model.safetensors", tree, names="torch")
        >>> weights = hxla.Weights("model.safetensors", names="torch")
        >>> hxla.load_weights(weights, tree)["head"]["kernel"].shape
        (8, 2)
    """
    target = local_path(path, "path", WeightsError).absolute()
    if target.suffix == ".safetensors":
        save_file(target, _arrays_of(tree), as_names(names))
        return
    if names is not None:
        raise WeightsError(
            f"names={names!r}, but {target.name} does not end in .safetensors: an Orbax folder "
            "keeps the model's own names"
        )
    _save_folder(target, _arrays_of(tree))


def save_file(
    target: pathlib.Path, tree: PyTree, names: NameMap, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; every process calls this.

    Args:
        metadata: Texts for `read_metadata`, beside the names' format.

    Raises:
        WeightsError: If it cannot be written, or the names do not match the arrays.
    """
    wanted, leaves = Wanted.of(tree), jax.tree.leaves(tree)
    arrays, shapes = _file_layout(wanted, names)
    part = target.with_name(target.name + ".part")
    stored: dict[str, Stored] = {}

    def begin() -> None:
        if jax.process_index() == 0:
            make_file(part, shapes, {"format": names.format, **(metadata or {})})

    def write() -> None:
        stored.update(read_header(part))
        for array, leaf in zip(arrays, leaves, strict=True):
            for index, block in _blocks_to_write(leaf):
                array.write(block, index, lambda name: stored[name].view(writable=True))

    def end() -> None:
        if jax.process_index() == 0:
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(target)

    try:
        for step in (begin, write, end):
            _on_all_processes(step, target)
    finally:
        if jax.process_index() == 0:
            part.unlink(missing_ok=True)


def _on_all_processes(step: Callable[[], None], target: pathlib.Path) -> None:
    """Run a step on every process, and fail on all if it fails on one.

    Raises:
        WeightsError: On every process, with all processes' faults.
    """
    problem = ""
    try:
        step()
    except WeightsError as error:
        problem = str(error)
    except (OSError, ValueError) as error:
        problem = f"{target} cannot be written: {error}"
    problems = list(dict.fromkeys(filter(None, _gather(f"saving {target.name}", problem))))
    if problems:
        raise WeightsError("\n".join(problems))


def _file_layout(
    wanted: tuple[Wanted, ...], names: NameMap
) -> tuple[list[Pieced], dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """The pieces of each array, and the shape and dtype of each tensor of the file.

    Raises:
        WeightsError: With all faults.
    """
    faults: list[str] = []
    arrays: list[Pieced] = []
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    writers: dict[str, dict[tuple[int, int, int] | None, str]] = {}
    for array in wanted:
        label = f"{array.name} {array.dtype}{list(array.shape)}"
        if unsupported_dtypes([array.dtype]):
            faults.append(f"  {label}: safetensors has no such dtype")
            continue
        rule = names.rule_of(array.name, len(array.shape))
        if rule is None:
            faults.append(f"  {label}: no rule matches it")
            continue
        try:
            pieces = pieced(array.name, array.shape, array.dtype, rule)
        except ValueError as error:
            faults.append(f"  {label}, rule {rule}: {error}")
            continue
        arrays.append(pieces)
        for piece in pieces.pieces:
            before = shapes.setdefault(piece.tensor, (piece.shape, array.dtype))
            others = writers.setdefault(piece.tensor, {})
            if before != (piece.shape, array.dtype) or piece.part in others:
                other = others.get(piece.part) or next(iter(others.values()))
                faults.append(f"  {label}: tensor {piece.tensor} is also written by {other}")
            others[piece.part] = array.name
    for tensor, parts in writers.items():
        num = next(iter(parts))
        if num is not None and len(parts) < num[2]:
            faults.append(f"  {tensor}: only {len(parts)} of its {num[2]} parts are written")
    if faults:
        raise WeightsError(
            f"this model cannot be saved with the names {names.name!r}:\n" + "\n".join(faults)
        )
    return arrays, shapes


def _blocks_to_write(leaf: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Index and data of the blocks of an array that this process writes.

    Process 0 writes arrays that every process has whole. Of a sharded array each process writes
    its shards with replica number 0.
    """
    whole = (slice(None),) * np.ndim(leaf)
    if not isinstance(leaf, jax.Array):
        if jax.process_index() == 0:
            yield whole, np.asarray(leaf)
    elif 0 in _processes(leaf) and not (leaf.is_fully_addressable and jax.process_index()):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                yield shard.index, np.asarray(shard.data)


def _processes(leaf: jax.Array) -> set[int]:
    devices: Any = leaf.sharding.device_set
    return {device.process_index for device in devices}


def _save_folder(target: pathlib.Path, tree: PyTree) -> None:
    several = jax.process_count() > 1
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    shared = [_processes(x) for x in leaves if not x.is_fully_addressable]
    writers = set[int]().union(*shared) if shared else {0}
    if several:  # process-local arrays become host arrays, which process 0 writes
        tree = jax.tree.map(_on_host, tree)

    def save() -> None:
        if 0 not in writers or jax.process_index() not in writers:
            return  # this process belongs to another replica than process 0
        if target.exists() and not (target / _MARK).exists() and any(target.iterdir()):
            raise WeightsError(
                f"{target} exists and is no folder of weights; name another, or remove it first"
            )
        import orbax.checkpoint as ocp  # a slow import

        options = ocp.options.MultiprocessingOptions(
            active_processes=writers if several else None, barrier_sync_key_prefix="hxla-weights"
        )
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
        with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
            checkpointer.save(target, args=ocp.args.StandardSave(tree), force=True)

    _on_all_processes(save, target)


def _on_host(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and x.is_fully_addressable else x

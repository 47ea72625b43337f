"""Weights saved and loaded outside of training: safetensors, and folders that plain Flax reads.

Every process writes its shards into one file; nothing is gathered.
"""

import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from ..core.errors import WeightsError
from ..core.files import local_path
from ..core.types import PyTree
from ..jax.coordination import gather
from ..model.variables import entries_of
from .name_map import NameMap, Pieced, as_names, pieced
from .safetensors import Stored, make_file, read_header, unsupported_dtypes
from .weights import Read, Wanted, Weights, as_weights, filled, open_weights

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

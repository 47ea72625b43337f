"""The user's data, of any kind, as microbatches that are loaded ahead of the step.

Examples form one continuous stream: position `p = step * batch_size + i` belongs to epoch `p // N`
and reads example `permutation(epoch)[p % N]`. So nothing is dropped between epochs, and the order
depends on seed, epoch and step alone. The order is a keyed permutation, equal on all platforms and
versions.
"""

import concurrent.futures
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from ..plan.plan import Plan
from .batches import AS_IT_COMES, Batches, HostBatches, NoPosition
from .checks import (
    as_arrays,
    check_alike,
    check_dtype,
    leading_dimension,
    leaf_name,
    with_dictionaries,
)

_ROUNDS = 8
_MASK = np.uint64(0xFFFFFFFF)


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """A 32-bit finaliser of good avalanche (murmur3's constants) over `x ^ key`."""
    x = (x ^ np.uint64(key)) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & _MASK
    return x ^ (x >> np.uint64(16))


def permute(index: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """The example at each position of an epoch.

    A Feistel network over the next even power of two, walked until it is inside the range: a
    bijection of `range(size)` in constant memory, independent of any library's random stream.

    Args:
        index: Positions, integers in [0, size).
        size: Number of examples, up to 2**62.

    Returns:
        int64 array of the shape of `index`.

    References:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    keys = _round_keys(seed, epoch)
    out = np.asarray(index).astype(np.uint64)
    todo = np.ones(out.shape, bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & low
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & low)
        out[todo] = (left << np.uint64(half)) | right
        todo = out >= size
    return out.astype(np.int64)


def shuffled(index: np.ndarray, size: int, per_file: int, *, seed: int, epoch: int) -> np.ndarray:
    """`permute` that keeps the examples of a file together.

    Args:
        index: Positions, integers in [0, size).
        per_file: Examples of a file; the last file may have fewer.

    Returns:
        int64 array of the shape of `index`: files in shuffled order, with their examples shuffled
        inside each.
    """
    if per_file == 1:
        return permute(index, size, seed=seed, epoch=epoch)
    num_files, rest = divmod(size, per_file)
    # A shorter last file stays last, so that all others begin at multiples of their size.
    position, within = np.divmod(np.asarray(index, np.int64), per_file)
    whole = position < num_files
    file = position.copy()
    file[whole] = permute(position[whole], num_files, seed=seed, epoch=epoch)
    out = np.empty_like(position)
    for number in np.unique(file):
        mask = file == number
        length = per_file if number < num_files else rest
        out[mask] = number * per_file + permute(
            within[mask], length, seed=seed + int(number) + 1, epoch=epoch
        )
    return out


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, epoch & 0xFFFFFFFF], np.uint64)
    value = np.zeros(1, np.uint64)
    for word in state:
        value = _mix(value * np.uint64(31) + word, 0x9E3779B9)
    keys = []
    for round_number in range(_ROUNDS):
        value = _mix(value + np.uint64(round_number), 0x7F4A7C15)
        keys.append(int(value[0]))
    return keys


_KINDS = (
    "data is one of\n"
    "  a pytree of arrays of equal length, such as {'x': ..., 'y': ...}\n"
    "  a sequence of examples (anything with __len__ and __getitem__, or a grain.MapDataset)\n"
    "  a callable from index to example\n"
    "  an iterable of global batches (a generator, a grain.IterDataset)"
)


class Source(Protocol):
    """Random access to the stream of examples."""

    num_examples: int | None
    num_batches: int | None  # of a repeatable iterable
    order: str  # of the examples, in words

    def repeat(self) -> None:
        """Start another pass over a repeatable iterable after each one."""

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        """Examples at positions of the global batch of a step, stacked, as host arrays."""

    def example(self) -> PyTree:
        """One example with a leading dimension of 1, as arrays or shapes."""

    def sample(self, size: int) -> PyTree | None:
        """The first examples of the stream; None without random access."""

    def state(self, step: int) -> str | None:
        """The position before a step, for a checkpoint; None with random access."""

    def begin(self, step: int, state: str | None) -> str:
        """Go to the first step of a session; returns a note for the user, or ''."""


def _shapes(tree: PyTree, size: int | None = None) -> PyTree:
    """Shapes of arrays; `size`, if any, replaces the leading dimension."""
    shape = lambda x: x.shape if size is None else (size, *x.shape[1:])  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), tree)


def _is_arrays(data: Any) -> bool:
    if hasattr(data, "__iter__") and not (hasattr(data, "shape") or isinstance(data, dict | tuple)):
        return False  # a list is a sequence of examples; generators and datasets are no pytrees
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)


class _Arrays:
    """A pytree of arrays; memory maps stay lazy."""

    def __init__(self, data: PyTree, name: str):
        self.num_examples: int = leading_dimension(data, name)
        for path, x in jax.tree_util.tree_leaves_with_path(data):
            check_dtype(x, f"{name}: {leaf_name(path)}")
        self._name = name
        # A jax array may be sharded, and slicing it would run programs.
        on_host = lambda x: as_arrays(x, name) if isinstance(x, jax.Array) else x  # noqa: E731
        self._leaves, self._treedef = jax.tree.flatten(jax.tree.map(on_host, data))
        #: Whether there are no arrays, so that a job can only be planned.
        self.is_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in self._leaves)
        # A small step would feel it if each of its microbatches were checked again.
        self._needs_no_check = all(
            type(x) in (np.ndarray, np.memmap) and x.dtype.isnative for x in self._leaves
        )

    def take(self, indices: np.ndarray) -> PyTree:
        return self._rows(lambda x: x[indices])

    def between(self, start: int, stop: int) -> PyTree:
        """Copies of consecutive rows."""
        return self._rows(lambda x: np.array(x[start:stop]))

    def _rows(self, of: Callable[[Any], Any]) -> PyTree:
        if self.is_shapes:
            raise DataError("data is shapes only: a job with it can be planned, not trained")
        if not self._needs_no_check:
            rows = jax.tree.unflatten(self._treedef, map(of, self._leaves))
            return as_arrays(rows, self._name)
        return jax.tree.unflatten(self._treedef, [np.asarray(of(x)) for x in self._leaves])

    def example(self) -> PyTree:
        def shape(x: Any) -> jax.ShapeDtypeStruct:
            dtype = x.dtype.newbyteorder("=") if isinstance(x.dtype, np.dtype) else x.dtype
            return jax.ShapeDtypeStruct((1, *x.shape[1:]), dtype)

        return jax.tree.unflatten(self._treedef, map(shape, self._leaves))


class _Examples:
    """Examples one by one, stacked."""

    def __init__(self, get: Callable[[int], PyTree], num_examples: int | None):
        self.num_examples = num_examples
        self._get = get
        self._first: tuple[str, PyTree] | None = None  # name and shapes of the first example

    def take(self, indices: np.ndarray) -> PyTree:
        names = [f"example {int(i)}" for i in indices]
        pairs = zip(names, indices, strict=True)
        examples = [as_arrays(self._get(int(i)), name) for name, i in pairs]
        if self._first is None:
            self._first = names[0], _shapes(examples[0])
        there, first = self._first
        for name, example in zip(names, examples, strict=True):
            check_alike(example, name, first, there)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)

    def example(self) -> PyTree:
        return self.take(np.zeros(1, np.int64))


class _Random(NoPosition):
    """Random access with epochs."""

    def __init__(
        self, reader: Any, batch_size: int, seed: int, shuffle: bool, examples_per_file: int
    ):
        self._reader = reader
        self._per_file = examples_per_file
        self.num_examples: int | None = reader.num_examples
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        files = f" in files of {examples_per_file}" if examples_per_file > 1 else ""
        self.order = f"shuffled{files}" if shuffle else AS_IT_COMES
        if self.num_examples is not None and self.num_examples < batch_size:
            raise DataError(
                f"data has {self.num_examples} examples, fewer than one global batch of "
                f"{batch_size}: use a smaller batch_size or more data"
            )

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        stream = step * self._batch_size + np.asarray(positions, np.int64)
        size = self._reader.num_examples
        if size is None or not self._shuffle:
            return self._reader.take(stream if size is None else stream % size)
        epochs, within = np.divmod(stream, size)
        indices = np.empty_like(within)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            indices[mask] = shuffled(
                within[mask], size, self._per_file, seed=self._seed, epoch=int(epoch)
            )
        return self._reader.take(indices)

    def example(self) -> PyTree:
        return self._reader.example()

    def sample(self, size: int) -> PyTree | None:
        return self.fetch(0, np.arange(size))


def _grain(data: Any, kind: str) -> bool:
    """Whether data is a Grain dataset of a kind, without importing Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(data, getattr(grain, kind))


def _is_batched(data: Any) -> bool:
    """Whether a Grain dataset, or one of its parents, batches examples."""
    parents = getattr(data, "parents", ())
    return type(data).__name__ == "BatchMapDataset" or any(map(_is_batched, parents))


def _refuse_known(data: Any, name: str, batch_size: int) -> None:
    """Refuse frequent mistakes, each with its remedy."""
    if inspect.isgeneratorfunction(data):
        called = f"{data.__name__}()"
        raise DataError(f"{name} is a generator function: call it, {name}={called}")
    if isinstance(data, type):
        raise DataError(f"{name} is the class {data.__name__}: pass an instance of it")
    if isinstance(data, list) and 0 < len(data) < batch_size and _is_arrays(tuple(data)):
        sizes = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(data)}
        if sizes == {batch_size} and not hasattr(data[0], "shape"):
            raise DataError(
                f"{name} is a list of {len(data)} global batches, and a list is a sequence of "
                f"examples: pass iter(...) of it, {name}=iter(batches)"
            )
        if len(sizes) == 1 and min(sizes) >= batch_size:
            raise DataError(
                f"{name} is a list of {len(data)} arrays of {min(sizes)} rows each, and a list is "
                "a sequence of examples: for columns pass a tuple, (x, y), or a dictionary, "
                "{'x': x, 'y': y}; batches have the same structure"
            )
    if isinstance(data, dict) and any(isinstance(x, list) for x in data.values()):
        raise DataError(f"{name} is a dictionary of lists: make them arrays, numpy.asarray(...)")
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        raise DataError(
            f"{name} is a table ({type(data).__name__}): pass its columns as arrays, "
            "{'x': table['x'].to_numpy(), ...}"
        )
    if callable(data) and not hasattr(data, "__getitem__"):
        try:
            inspect.signature(data).bind(0)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name} is a function that cannot be called with the index of an example "
                f"({error}); {_KINDS}"
            ) from error


def _reader(data: Any, num_examples: int | None, name: str) -> Any:
    """Random access to examples, or None if `data` has none."""
    if _is_arrays(data):
        return _Arrays(data, name)
    is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_sequence and not isinstance(data, dict | str | bytes):
        return _Examples(data.__getitem__, len(data))
    if callable(data):
        return _Examples(data, num_examples)
    return None


def _pooled(reader: Any, num_workers: int) -> Any:
    """Examples made by worker processes, if any; arrays need none."""
    if not num_workers or (isinstance(reader, _Arrays) and reader.is_shapes):
        return reader
    if isinstance(reader, _Arrays):
        raise DataError(
            f"data.workers={num_workers}: the data is arrays, which need no work: leave it at 0"
        )
    from .worker_pool import PooledExamples

    return PooledExamples(reader, num_workers)


def as_source(
    data: Any,
    *,
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    num_examples: int | None = None,
    examples_per_file: int = 1,
    num_kept: int = 4,
    is_shared: bool = True,
    num_workers: int = 0,
) -> Source:
    """The source of the user's data, by its kind.

    Args:
        data: Of a kind in `_KINDS`.
        batch_size: Examples of a global batch.
        shuffle: Whether random-access data is shuffled in each epoch. A `grain.MapDataset` keeps
            its order, and a callable without `num_examples` has no epochs.
        num_examples: Of a callable with epochs.
        examples_per_file: Examples that stay together in the shuffle.
        num_kept: Global batches of an iterable that may be fetched again.
        is_shared: Whether the processes of a host read an iterable once, together.
        num_workers: Processes of a host that make examples; 0: a thread of each training process.

    Raises:
        DataError: If it is none of the kinds, malformed, or smaller than one global batch.
    """
    data = with_dictionaries(data)
    _refuse_known(data, "data", batch_size)
    reader = None if _grain(data, "MapDataset") else _reader(data, num_examples, "data")
    if examples_per_file > 1 and (reader is None or reader.num_examples is None):
        raise DataError(
            f"io.examples_per_file={examples_per_file} is for data that hxla shuffles, but "
            f"{type(data).__name__} has a fixed order: leave it at 1, or use random access "
            "(arrays, a sequence, or a callable with num_examples)"
        )
    if _grain(data, "MapDataset"):
        if _is_batched(data):
            raise DataError(
                "data is a grain.MapDataset of batches: hxla batches it, leave out .batch(...)"
            )
        is_endless = len(data) == sys.maxsize  # of a dataset with .repeat()
        if len(data) < batch_size:
            raise DataError(
                f"data has {len(data)} examples, fewer than one global batch of {batch_size}"
            )
        # Grain's repeat reshuffles each epoch, so positions are unbounded.
        repeated = data if is_endless else data.repeat()
        reader = _pooled(_Examples(repeated.__getitem__, None), num_workers)
        source = _Random(reader, batch_size, seed, False, 1)
        source.num_examples = None if is_endless else len(data)
        return source
    if reader is not None:
        is_shuffled = shuffle and reader.num_examples is not None
        reader = _pooled(reader, num_workers)
        return _Random(reader, batch_size, seed, is_shuffled, examples_per_file)
    if hasattr(data, "__iter__") and not isinstance(data, dict | str | bytes):
        if num_workers:
            raise DataError(
                f"data.workers={num_workers}: an iterable ({type(data).__name__}) is read in "
                "order by one process of each host. Start processes in the iterable "
                "(grain.IterDataset.mp_prefetch), or use random access"
            )
        return HostBatches(Batches(data, batch_size, num_kept), is_shared=is_shared)
    raise DataError(f"data is {type(data).__name__}; {_KINDS}")


def num_steps(source: Source, *, batch_size: int, epochs: int) -> int:
    """Steps of a number of epochs: whole global batches of the continuous stream.

    An iterable is made to start again at the end of each epoch.

    Raises:
        DataError: If the length of the data is unknown.
    """
    if source.num_examples is not None:
        return epochs * source.num_examples // batch_size
    if source.num_batches is None:
        raise DataError(
            "epochs need data of known length: pass steps, num_examples with a callable, or an "
            "iterable that has a length and can be iterated several times"
        )
    source.repeat()
    return epochs * source.num_batches


def eval_batches(data: Any, microbatch_size: int) -> tuple[int, Callable[[int], PyTree]]:
    """One pass in order; the last microbatch may be shorter.

    Args:
        data: Bounded, of any kind; an iterable is read whole.
        microbatch_size: Examples of all microbatches but the last.

    Returns:
        The number of examples, and a function from microbatch id to microbatch.
    """
    return _in_order(_bounded(data, "eval_data", microbatch_size), microbatch_size)


def _bounded(data: Any, name: str, size: int) -> Any:
    """Random access to bounded data of any kind; an iterable is read whole."""
    data = with_dictionaries(data)
    _refuse_known(data, name, size)
    reader = _reader(data, None, name)
    if reader is None and hasattr(data, "__iter__") and not isinstance(data, dict | str | bytes):
        reader = _Arrays(_read_whole(data, name), name)
    if reader is None:
        raise DataError(f"{name} is {type(data).__name__}; {_KINDS}")
    if not reader.num_examples:
        raise DataError(f"{name} needs a known length of at least one example")
    return reader


def _read_whole(data: Iterable[PyTree], name: str) -> PyTree:
    batches: list[PyTree] = []
    for batch in data:
        where = f"{name}, batch {len(batches)}"
        batches.append(as_arrays(batch, where))
        leading_dimension(batches[-1], where)
        check_alike(batches[-1], where, batches[0], "batch 0", leading=1)
    if not batches:
        again = ", or was read before: iterators are read once" if is_iterator(data) else ""
        raise DataError(f"{name} is empty{again}")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def _in_order(reader: Any, microbatch_size: int) -> tuple[int, Callable[[int], PyTree]]:
    size: int = reader.num_examples

    def fetch(index: int) -> PyTree:
        start = index * microbatch_size
        stop = min(start + microbatch_size, size)
        if isinstance(reader, _Arrays):
            return reader.between(start, stop)
        return reader.take(np.arange(start, stop))

    return size, fetch


def is_iterator(data: Any) -> bool:
    """Whether data can be read only once, as a generator."""
    return isinstance(data, Iterator)


class Loader:
    """Loads this process's microbatches ahead of the step, in the background.

    Args:
        num_steps: Of the run; nothing is loaded beyond them.
    """

    def __init__(
        self,
        source: Source,
        *,
        microbatch_size: int,
        num_steps: int,
        depth: int = 2,
    ):
        self._source, self._size = source, microbatch_size
        self._num_steps, self._depth = num_steps, depth
        # One thread, since iterables need the order of steps.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "hxla-loader")
        self._pending: dict[tuple[int, int], concurrent.futures.Future[dict[int, PyTree]]] = {}

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loader's thread."""
        self._pool.shutdown(cancel_futures=True)

    def _load(self, step: int, ids: list[int]) -> dict[int, PyTree]:
        """Several microbatches in one read: a call of the source costs more than an example."""
        positions = [np.arange(i * self._size, (i + 1) * self._size) for i in ids]
        leaves, treedef = jax.tree.flatten(self._source.fetch(step, np.concatenate(positions)))
        parts = [slice(n * self._size, (n + 1) * self._size) for n in range(len(ids))]
        return {
            index: jax.tree.unflatten(treedef, [leaf[part] for leaf in leaves])
            for index, part in zip(ids, parts, strict=True)
        }

    def start(self, step: int, ids: Sequence[int]) -> None:
        """Start loading a step's microbatches and those of the next steps."""
        for ahead in range(step, min(step + self._depth, self._num_steps)):
            missing = [index for index in ids if (ahead, index) not in self._pending]
            if missing:
                loading = self._pool.submit(self._load, ahead, missing)
                self._pending |= dict.fromkeys([(ahead, index) for index in missing], loading)

    def get(self, step: int, ids: Sequence[int]) -> list[PyTree]:
        """Microbatches of a step, in the order of ids; later steps continue to load.

        Raises:
            DataError: Or any exception of the user's data.
        """
        self.start(step, ids)
        loading = [self._pending[step, index] for index in ids]
        loaded = {future: future.result() for future in dict.fromkeys(loading)}
        batches = [loaded[future][index] for future, index in zip(loading, ids, strict=True)]
        wanted = set(ids)
        for key in [k for k in self._pending if k[0] <= step or k[1] not in wanted]:
            del self._pending[key]
        self.start(step + 1, ids)
        return batches


def cut_batch(
    batch: PyTree, ids: Sequence[range], plan: Plan, name: str, first: PyTree
) -> list[list[PyTree]]:
    """Microbatches of a global batch for each local replica.

    Args:
        name: Of the batch, for messages.
        first: The first example of the job's data.

    Raises:
        DataError: If it is malformed, no global batch, or differs from the job's data.
    """
    if isinstance(batch, Mapping | tuple):
        reader: Any = _Arrays(as_arrays(batch, name), name)
    else:
        reader = _bounded(batch, name, plan.batch_size)
    size, fetch = _in_order(reader, plan.microbatch_size)
    if size != plan.batch_size:
        raise DataError(f"{name} has {size} examples, batch_size is {plan.batch_size}")
    actual, expected = (_shapes(x, size) for x in (reader.example(), first))
    check_alike(actual, name, expected, "the job's data")
    return [[fetch(i) for i in replica_ids] for replica_ids in ids]


def num_tokens(batches: Sequence[Sequence[PyTree]], num_microbatches: int) -> int:
    """Elements of the largest integer matrix of a global batch: its tokens, if it has any."""
    some = next((batch for of_replica in batches for batch in of_replica), None)
    leaves = [x for x in jax.tree.leaves(some) if hasattr(x, "dtype")]
    sizes = [x.size for x in leaves if x.ndim == 2 and np.issubdtype(x.dtype, np.integer)]
    return max(sizes, default=0) * num_microbatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epochs:
    """The passes over the data that steps make.

    Attributes:
        step_items: Examples of a step, or 1 where the data is an iterable of global batches.
        epoch_items: Examples, or global batches, of an epoch.
    """

    step_items: int
    epoch_items: int

    def done(self, steps: int) -> float:
        """The passes over the data in a number of steps."""
        return steps * self.step_items / self.epoch_items

    def ends_with(self, steps: int) -> bool:
        """Whether the last of some steps has the last example of an epoch."""
        items = steps * self.step_items
        return items // self.epoch_items > (items - self.step_items) // self.epoch_items

    def ends(self) -> Iterator[int]:
        """The steps with which epochs end, until their distances repeat."""
        for k in range(1, self.step_items + 1):
            yield -(-k * self.epoch_items // self.step_items)


def epochs_of(source: Source, batch_size: int) -> Epochs | None:
    """The epochs of a job's data; None if its length is unknown."""
    if source.num_examples:
        return Epochs(step_items=batch_size, epoch_items=source.num_examples)
    if source.num_batches:
        return Epochs(step_items=1, epoch_items=source.num_batches)
    return None

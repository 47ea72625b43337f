"""The safetensors format: a header of JSON, then the tensors' bytes, one after another.

The package of that name is not used, because a process reads only the slices of its devices, and
several processes write one file. A file is untrusted input: its whole header is checked before any
tensor is read.

References:
    https://github.com/huggingface/safetensors#format
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax import numpy as jnp

from ..core.errors import WeightsError
from ..core.format import num_bytes as as_text

_LARGEST_HEADER = 1 << 24  # bytes; 100,000 tensors need about ten million
_LARGEST_RANK = 32
_ALIGNMENT = 8

#: Names of dtypes in a header, the widest first: tensors in this order are aligned.
_DTYPES: Mapping[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file.

    Attributes:
        begin: Offset of its bytes in the file.
    """

    path: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, *, writable: bool = False) -> np.ndarray:
        """The tensor mapped into memory, so that only touched pages are read."""
        if not self.num_bytes:
            return np.zeros(self.shape, self.dtype)
        mapped = np.memmap(
            self.path, np.uint8, "r+" if writable else "r", self.begin, (self.num_bytes,)
        )
        return np.ndarray(self.shape, self.dtype, mapped)


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a file by their names.

    Raises:
        WeightsError: If there is no file, or it is damaged: the first fault, with its place.
    """
    return _parsed(path, *_header(path))


def read_metadata(path: pathlib.Path) -> dict[str, str]:
    """The texts beside the tensors of a file.

    Raises:
        WeightsError: If there is no file, or it is damaged.
    """
    text, size = _header(path)
    _parsed(path, text, size)
    return {str(k): str(v) for k, v in json.loads(text).get("__metadata__", {}).items()}


def _header(path: pathlib.Path) -> tuple[bytes, int]:
    """The text of a file's header, and the size of the file in bytes."""
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise _damaged(
                    path,
                    f"its {size} bytes begin with a header of {length}, where at most "
                    f"{max(0, min(size - 8, _LARGEST_HEADER))} are possible",
                )
            return file.read(length), size
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(path: pathlib.Path, text: bytes, size: int) -> dict[str, Stored]:
    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON: {str(error)[:200]}") from None
    if not isinstance(table, dict):
        raise _damaged(path, "its header is no table")
    table.pop("__metadata__", None)
    start, tensors = 8 + len(text), {}
    ends = []
    for name, entry in table.items():
        shape, dtype, begin, end = _entry(path, name, entry)
        if end - begin != math.prod(shape) * dtype.itemsize or end > size - start:
            raise _damaged(
                path,
                f"tensor {name!r}, {dtype}{list(shape)}, is in the bytes {begin} to {end} of "
                f"{size - start}",
            )
        ends.append((begin, end, name))
        tensors[name] = Stored(path=path, shape=shape, dtype=dtype, begin=start + begin)
    last = 0
    for begin, end, name in sorted(ends):
        if begin != last:
            raise _damaged(path, f"tensor {name!r} begins at byte {begin}, not at {last}")
        last = end
    if last != size - start:
        raise _damaged(path, f"its tensors end at byte {last} of {size - start}")
    return tensors


def _entry(path: pathlib.Path, name: str, entry: Any) -> tuple[tuple[int, ...], np.dtype, int, int]:
    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise _damaged(path, f"tensor {name!r} has other fields than {', '.join(sorted(fields))}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _damaged(
            path,
            f"tensor {name!r} has the dtype {entry['dtype']!r}; known are {', '.join(_DTYPES)}",
        )
    if not _are_counts(shape) or len(shape) > _LARGEST_RANK:
        raise _damaged(path, f"tensor {name!r} has the shape {str(shape)[:100]}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name!r} has the data_offsets {str(offsets)[:100]}")
    return tuple(shape), dtype, *offsets


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate names; a duplicate is a ValueError."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is listed twice")
    return table


def _damaged(path: pathlib.Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is no complete safetensors file: {what}")


def make_file(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    metadata: Mapping[str, str],
) -> dict[str, Stored]:
    """Make a file with room for tensors, which are then written through their views.

    Args:
        path: An existing file is replaced.
        shapes: The shape and dtype of each tensor.

    Returns:
        The tensors by name.

    Raises:
        WeightsError: If the file cannot be made, or the disk is full.
    """
    order = {dtype: i for i, dtype in enumerate(_NAMES)}
    offset, table = 0, {"__metadata__": dict(metadata)} if metadata else {}
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda s: (order[s[1][1]], s[0])):
        end = offset + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}  # type: ignore[dict-item]
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            if offset:  # so that a full disk is an error here, not a signal in a view
                os.posix_fallocate(file.fileno(), 8 + len(text), offset)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"{path} cannot be written, which takes {as_text(offset)}: {error.strerror}"
        ) from None
    return read_header(path)


def unsupported_dtypes(dtypes: Iterable[Any]) -> list[str]:
    """The dtypes that the format does not have."""
    return sorted({str(d) for d in dtypes if not isinstance(d, np.dtype) or d not in _NAMES})


def files_of(path: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a file, of the files that an index names, or of a folder's files.

    Args:
        path: A `.safetensors` file, an index (`model.safetensors.index.json`), or a folder with
            either.

    Raises:
        WeightsError: If there is no such file, or a tensor is in two files.
    """
    if path.is_dir():
        indices, files = sorted(path.glob("*.index.json")), sorted(path.glob("*.safetensors"))
        if len(indices) > 1 or not (indices or files):
            raise WeightsError(
                f"{path} is a folder with {len(indices)} indices (*.index.json) and {len(files)} "
                "files (*.safetensors): name the one to read"
            )
        return files_of(indices[0]) if indices else _merged(files)
    if path.suffix == ".json":
        return _merged([path.parent / name for name in _indexed_files(path)])
    return read_header(path)


def _check_is_file(path: pathlib.Path) -> None:
    """Refuse pipes, which would block when opened."""
    if not path.is_file():
        raise WeightsError(f"{path} is no file")


def _indexed_files(index: pathlib.Path) -> list[str]:
    _check_is_file(index)
    try:
        with index.open("rb") as file:
            text = file.read(_LARGEST_HEADER + 1)
        names = json.loads(text.decode("utf-8"))["weight_map"].values() if text else ()
        files = sorted(set(names))
    except OSError as error:
        raise WeightsError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        files = []
    if not files or any(not isinstance(n, str) or n != pathlib.Path(n).name for n in files):
        raise WeightsError(f"{index} is no index: it has no weight_map from tensors to files")
    return files


def _merged(files: list[pathlib.Path]) -> dict[str, Stored]:
    merged: dict[str, Stored] = {}
    twice: list[str] = []
    for path in files:
        tensors = read_header(path)
        twice += [
            f"  {n}: in {merged[n].path.name} and {path.name}" for n in tensors if n in merged
        ]
        merged |= tensors
    if twice:
        raise WeightsError("tensors in two files:\n" + "\n".join(twice[:20]))
    return merged

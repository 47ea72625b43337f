"""The reader of files from outside, and messages for faults in tables that a person wrote.

Mesh files, rule sets and maps of names are built in, or the user's.

"""

import difflib
import itertools
import json
import os
import pathlib
import re
import stat
import tomllib
import typing
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal
from urllib.request import url2pathname

import pydantic

from .errors import ConfigError, MeshError

MOST_JSON_BYTES = 1 << 24
MOST_TOML_BYTES = 1 << 19
MOST_DUMP_BYTES = 1 << 28
_MOST_VALUES = 1_000_000  # of a JSON text; each takes a hundred bytes of memory
_MOST_DEPTH = 64
_MOST_RATIO = 100  # of unpacked to packed bytes; program text has 10 to 20
_UNPACKED_BYTES = 1 << 24  # allowed for any file
# Keys of many parts take tomllib quadratic time. Atomic groups keep the pattern linear.
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?>[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_DEPTH}}}"""
)

# A URL; a scheme of one letter is a drive. A `pathlib.Path` of a URL has one slash.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/.*)", re.DOTALL)

Refuse = Callable[[str], Exception]  # makes the error to raise, from a description of the fault


def local_path(path: Any, what: str, error: type[Exception]) -> pathlib.Path:
    """A path of this machine to write to, with `~` expanded.

    Args:
        path: The user's argument; `file:///...` is a path too.
        what: The argument's name, for the error.
        error: The type of the error for any other URL, or no path.
    """

    def refused(why: str) -> Exception:
        return error(f"{what}={str(path)!r} {why}")

    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise error(f"{what}={path!r} is no path")
    text = os.fspath(path)
    if match := _ADDRESS.fullmatch(text):
        host = re.match("//([^/]*)", match[2])
        if match[1].lower() != "file" or (host and host[1] not in ("", "localhost")):
            raise refused(
                "is an address, and hxla writes to paths of this machine: mount that place, or "
                "write here and copy"
            )
        text = url2pathname(match[2][host.end() :] if host else match[2])
    if not text.strip():
        raise refused("is empty: name a folder, '.' for the working directory")
    if text.startswith("$"):
        raise refused("is no path before its variable is replaced: pass os.path.expandvars(...)")
    if text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise refused("names a user that is not known here")
    return pathlib.Path(text)


def read_bytes(path: str | os.PathLike[str], most_bytes: int, refuse: Refuse) -> bytes:
    """The bytes of a regular file.

    Args:
        path: A pipe, a device or a folder is refused, without waiting for it.
        most_bytes: A larger file is refused before it is read.
    """
    try:
        # Opening a pipe without a writer would wait for one.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refuse("is no regular file")
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a path with a zero byte
        raise refuse("cannot be read: it is no path") from None
    if len(data) > most_bytes:
        raise refuse(f"is larger than {most_bytes >> 10:,} KiB, the limit for such a file")
    return data


def read_text(path: str | os.PathLike[str], most_bytes: int, refuse: Refuse) -> str:
    """The text of a regular file in UTF-8; see `read_bytes`."""
    try:
        return read_bytes(path, most_bytes, refuse).decode()
    except UnicodeDecodeError as error:
        raise refuse(f"is no text: {error}") from None


def read_json(path: str | os.PathLike[str], refuse: Refuse) -> Any:
    """The value of a JSON file; repeated keys are refused."""
    value, repeated = parse_json(read_bytes(path, MOST_JSON_BYTES, refuse), refuse)
    if repeated:
        raise refuse("has keys that are given several times: " + ", ".join(repeated[:10]))
    return value


def parse_json(
    text: str | bytes,
    refuse: Refuse,
    *,
    most_bytes: int = MOST_JSON_BYTES,
    most_values: int = _MOST_VALUES,
) -> tuple[Any, list[str]]:
    """The value of a JSON text, and its repeated keys, each in words."""
    repeated: list[str] = []

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value_by_key = dict(pairs)
        if len(value_by_key) < len(pairs):
            times = Counter(key for key, _ in pairs)
            repeated.extend(f"{key[:60]}: given {n} times" for key, n in times.items() if n > 1)
        return value_by_key

    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    num = sum(map(data.count, (b"[", b"{", b",")))
    if len(data) > most_bytes or num > most_values:
        raise refuse(
            f"holds {num:,} values in {len(data) >> 20} MiB, the most that is read is "
            f"{most_values:,} in {most_bytes >> 20} MiB"
        )
    try:
        value = json.loads(text, object_pairs_hook=table)
    except RecursionError:
        raise refuse(_nested()) from None
    except ValueError as error:
        raise refuse(f"is no JSON: {error}") from None
    _check_depth(value, refuse)
    return value, repeated


def read_toml(path: str | os.PathLike[str], refuse: Refuse) -> dict[str, Any]:
    """The table of a TOML file."""
    text = read_text(path, MOST_TOML_BYTES, refuse)
    if _LONG_KEY.search(text):
        raise refuse(_nested())
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise refuse(_nested()) from None
    except ValueError as error:
        raise refuse(f"is not TOML: {error}") from None
    _check_depth(table, refuse)
    return table


def _nested() -> str:
    return f"is nested more than {_MOST_DEPTH} levels deep"


def _check_depth(value: Any, refuse: Refuse) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise refuse(_nested())
        level = [x for item in level for x in _children(item)]


def _children(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (x for x in inner if isinstance(x, dict | list))


def unpack(data: bytes) -> tuple[bytes, str]:
    """The bytes that gzip packed, and a fault in words, or nothing; refuses gzip bombs.

    Args:
        data: The packed bytes; if they were cut off, the rest is unpacked.

    Raises:
        ValueError: If they are no gzip data, or unpack to too many bytes.
    """
    most = min(MOST_DUMP_BYTES, max(_UNPACKED_BYTES, _MOST_RATIO * len(data)))
    unpacked, rest = bytearray(), data
    while True:  # a file may be several concatenated gzip streams
        unpacking = zlib.decompressobj(wbits=31)  # gzip's format
        try:
            unpacked += unpacking.decompress(rest, most + 1 - len(unpacked))
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if len(unpacked) > most:
            raise ValueError(f"it unpacks to more than {most >> 20} MiB from {len(data):,} bytes")
        rest = unpacking.unused_data.lstrip(b"\0")
        if not rest:
            return bytes(unpacked), "" if unpacking.eof else "it was cut off"


def named(what: str, path: str | os.PathLike[str], error: type[Exception]) -> Refuse:
    """A maker of errors that begin with the kind and the path of a file."""
    return lambda words: error(f"{what} {pathlib.Path(path)} {words}")


_MOST_LINES = 60  # of an error
_MOST_LETTERS = 80  # of a value or a key
_MOST_COMPARED = 1000  # names


def fault(failure: Mapping[str, Any], model: type[pydantic.BaseModel], source: str = "") -> str:
    """A line with the key, its fault, and its value or the nearest known key.

    Args:
        failure: An entry of `pydantic.ValidationError.errors()`.
        source: The origin of the value, in words; empty: none to name.
    """
    path = ".".join(_brief(str(key)) for key in failure["loc"])
    if failure["type"] == "extra_forbidden":
        near = nearest(str(failure["loc"][-1]), _keys_beside(model, failure["loc"]))
        return f"{path}: unknown key, did you mean {near!r}?"
    if failure["type"] == "missing":
        return f"{path}: missing, add it"
    value = failure["input"]
    ending = "" if isinstance(value, dict | list) else f", found {shown(value)}"
    return f"{path}{source}: {failure['msg'].removeprefix('Value error, ')}{ending}"


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Rename a file or folder to the first free name with a number, `a.1.csv` or `best.1`."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    names = (path.with_name(f"{stem}.{i}{suffix}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name nearest to another, however far it is; there must be one."""
    # Comparing a name of a megabyte would take long.
    return difflib.get_close_matches(name[:_MOST_LETTERS], list(known), n=1, cutoff=0)[0]


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means; None: it is near to none."""
    some = list(itertools.islice(known, _MOST_COMPARED))
    return next(iter(difflib.get_close_matches(name[:_MOST_LETTERS], some, n=1)), None)


def did_you_mean(name: str, known: Iterable[str], before: str = "; ") -> str:
    """The end of a message about a misspelt name; empty without a near one."""
    near = meant(name, known)
    return "" if near is None else f"{before}did you mean {near!r}?"


def shown(value: object) -> str:
    """The `repr` of a value, cut off if it is long."""
    if isinstance(value, int) and abs(value) > 10**_MOST_LETTERS:
        return "a whole number of more than 80 digits"  # writing it out takes long, or fails
    if isinstance(value, str | bytes):
        value = value[:_MOST_LETTERS]
    return _brief(repr(value))


def listed(faults: Sequence[str]) -> str:
    """A line for each fault, up to a limit."""
    more = len(faults) - _MOST_LINES
    lines = [f"\n  {line}" for line in faults[:_MOST_LINES]]
    return "".join(lines + ([f"\n  and {more} more"] if more > 0 else []))


def _brief(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS + 2 else text[:_MOST_LETTERS] + "..."


def _keys_beside(model: Any, path: Sequence[int | str]) -> list[str]:
    for key in path[:-1]:
        fields = [field for name, field in model.model_fields.items() if key in _names(name, field)]
        if fields:
            model = _model_in(fields[0].annotation) or model
    return list(model.model_fields)


def _names(name: str, field: Any) -> tuple[Any, ...]:
    """The names of a field in a file."""
    alias = field.validation_alias
    return name, *(alias.choices if isinstance(alias, pydantic.AliasChoices) else ())


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)


Kind = Literal["meshes", "rules", "names"]


def _folder(kind: Kind) -> pathlib.Path:
    # A wheel carries the folder inside the package; a checkout has it beside the package.
    package = pathlib.Path(str(files("hxla")))
    inside = package / kind
    return inside if inside.is_dir() else package.parent / kind


def names(kind: Kind) -> tuple[str, ...]:
    """Names of the built-in files of one kind, sorted."""
    return tuple(sorted(path.stem for path in _folder(kind).glob("*.toml")))


def is_built_in(kind: Kind, path: pathlib.Path) -> bool:
    """Whether a result of `find` is a built-in file."""
    return path.parent == _folder(kind).resolve()


def find(kind: Kind, name_or_path: str) -> pathlib.Path:
    """The path of a built-in name, or of the user's file.

    Args:
        name_or_path: A name from `names(kind)`, or a path to a TOML file.

    Raises:
        MeshError: If there is neither, with the nearest name; for other kinds ConfigError.
    """
    error = MeshError if kind == "meshes" else ConfigError
    try:
        path = pathlib.Path(name_or_path).expanduser()
        if path.is_file():
            return path.resolve()
        built_in = _folder(kind) / f"{name_or_path}.toml"
        if built_in.is_file():
            return built_in.resolve()
    except (OSError, RuntimeError) as fault:  # a name too long, a home of an unknown user
        raise error(f"{shown(name_or_path)} cannot be looked up: {fault}") from None
    known = names(kind)
    hint = did_you_mean(name_or_path, known)
    raise error(
        f"{shown(name_or_path)} is neither a file nor a built-in name of {kind}{hint}\n"
        f"built in: {', '.join(known) or 'none'}"
    )

"""Find mesh files, rule sets and maps of names: built in, or the user's."""

import pathlib
from importlib.resources import files
from typing import Literal

from .errors import ConfigError, MeshError
from .files import did_you_mean, shown

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

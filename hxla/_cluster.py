"""Described clusters: what a mesh file says."""

import difflib
import tomllib
from typing import Any

import pydantic

from . import _catalog
from ._errors import MeshError


class Device(pydantic.BaseModel):
    """One device of a described cluster.

    Attributes:
        kind: `cpu`, or the model name of an accelerator.
        memory_bytes: Memory that training may use; None if not described.
        core_share: Share of one core that a CPU device gets, above 0 and at most 1.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    kind: str
    memory_bytes: int | None = None
    core_share: float | None = None


class Cluster(pydantic.BaseModel):
    """A described cluster: its devices in the order of ranks."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    devices: tuple[Device, ...]


class _DeviceTable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    kind: str = pydantic.Field(min_length=1)
    count: int = pydantic.Field(1, ge=1)
    core_share: float | None = pydantic.Field(None, gt=0, le=1)
    memory_gib: float | None = pydantic.Field(None, gt=0)
    source: str | None = None

    @pydantic.model_validator(mode="after")
    def _share_is_for_cpus(self) -> "_DeviceTable":
        if self.core_share is not None and self.kind != "cpu":
            raise ValueError(f"core_share is for kind 'cpu', not {self.kind!r}")
        return self


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str
    description: str = ""
    device: list[_DeviceTable] = pydantic.Field(min_length=1)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a mesh file.

    Args:
        name_or_path: A built-in name (`cpu-1.0-0.33`) or a path.

    Returns:
        The described cluster, each `[[device]]` repeated `count` times.

    Raises:
        MeshError: If there is no such file, or with all its faults at once: each with its key,
            the nearest known key and the value found.
    """
    path = _catalog.find("meshes", name_or_path)
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MeshError(f"{path} is not TOML: {error}") from None
    try:
        parsed = _File.model_validate(table)
    except pydantic.ValidationError as error:
        lines = [_fault(failure) for failure in error.errors()]
        raise MeshError(f"{path} has faults:\n" + "\n".join(lines)) from None
    devices = [
        Device(
            kind=d.kind,
            memory_bytes=None if d.memory_gib is None else int(d.memory_gib * 2**30),
            core_share=d.core_share if d.kind != "cpu" else d.core_share or 1.0,
        )
        for d in parsed.device
        for _ in range(d.count)
    ]
    return Cluster(name=parsed.name, description=parsed.description, devices=tuple(devices))


def _fault(failure: Any) -> str:
    path = ".".join(map(str, failure["loc"]))
    if failure["type"] == "extra_forbidden":
        model: Any = _DeviceTable if len(failure["loc"]) > 1 else _File
        near = difflib.get_close_matches(
            str(failure["loc"][-1]), list(model.model_fields), n=1, cutoff=0
        )
        return f"  {path}: unknown key, did you mean {near[0]!r}?"
    if failure["type"] == "missing":
        return f"  {path}: missing, add it"
    return f"  {path}: {failure['msg']}, found {failure['input']!r}"

"""Profiles as versioned JSON files."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic

from ..cluster.cluster import Link
from ..core.errors import PlanError
from ..core.files import fault, listed, local_path, named, read_json, shown
from .profile import Profile

_VERSION = 1

# No measurement exceeds these limits, which keep sums and products finite.
_Seconds = Annotated[float, pydantic.Field(ge=0, le=1e9)]
_Bytes = Annotated[float, pydantic.Field(ge=0, le=2**60)]
_Count = Annotated[int, pydantic.Field(ge=1, le=2**40)]
_Arithmetic = Literal[
    "model", "float64", "float32", "tensorfloat32", "bfloat16", "float16", "float8"
]


class _FileTable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _ProductTable(_FileTable):
    count: _Count
    copies: _Count
    rows: _Count
    columns: _Count
    depth: _Count
    arithmetic: _Arithmetic = "model"


class _SizeTable(_FileTable):
    parameter_bytes: _Bytes
    output_bytes: _Bytes
    stash_bytes: _Bytes
    flops: Annotated[float, pydantic.Field(ge=0, le=1e30)] = 0.0
    arithmetic: _Arithmetic = "model"
    products: list[_ProductTable] = []
    moved_bytes: _Bytes = 0.0


class _TimeTable(_FileTable):
    forward: _Seconds
    backward: _Seconds
    update: _Seconds = 0.0
    measured: bool = True


class _Sizes(_FileTable):
    microbatch_size: _Count
    tensor: _Count
    layers: list[_SizeTable]

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.microbatch_size, self.tensor


class _KindTable(_FileTable):
    kind: str
    microbatch_size: _Count
    tensor: _Count

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.kind, self.microbatch_size, self.tensor


class _Times(_KindTable):
    layers: list[_TimeTable]


class _Peak(_KindTable):
    bytes: Annotated[int, pydantic.Field(ge=0, le=2**60)]


class _Split(_FileTable):
    kinds: list[str] = pydantic.Field(min_length=2)
    microbatch_size: _Count
    sent_bytes: _Bytes
    parts: list[Annotated[float, pydantic.Field(gt=0, lt=1)]]
    seconds: _Seconds


class _MeasuredLink(_FileTable):
    kinds: list[str] = pydantic.Field(min_length=2, max_length=2)
    in_node: bool
    mesh: str = ""
    link: Link

    @property
    def setting(self) -> tuple[Any, ...]:
        return (*sorted(self.kinds), self.in_node)


class _ProfileTable(_FileTable):
    version: int
    model: str
    layers: list[str] = pydantic.Field(min_length=1)
    num_segments: int = pydantic.Field(0, ge=0, le=2**20)
    form: str = ""
    sizes: list[_Sizes]
    times: list[_Times]
    reductions: dict[str, _Seconds] = {}
    peaks: list[_Peak] = []
    splits: list[_Split] = []
    links: list[_MeasuredLink] = []


def dump_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, atomically; its folder is made."""
    table = {"version": _VERSION, **profile.to_table()}
    file = local_path(path, "path", PlanError)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(file)


def load_profile(path: str | os.PathLike[str], *, model: str | None = None) -> Profile:
    """Read a profile that `hxla profile` wrote.

    Args:
        path: The path of the file.
        model: The name of the model that it must describe; None: any.

    Returns:
        The profile.

    Raises:
        PlanError: If the file cannot be read, is of another version or model, or has invalid
            values: every fault with its key.

    Example:
        >>> import hxla
        >>> hxla.load_profile("missing.json")
        PlanError: profile missing.json cannot be read: No such file or directory
    """
    refuse = named("profile", path, PlanError)
    table = read_json(path, refuse)
    version = table.get("version") if isinstance(table, dict) else None
    if type(version) is not int or version != _VERSION:
        raise refuse(
            f"has version {shown(version)}, this hxla reads {_VERSION}: measure again with hxla "
            "profile"
        )
    faults = list(_faults(table))
    if faults:
        raise refuse("has faults:" + listed(faults))
    profile = Profile.from_table(table)
    if model is not None and profile.model != model:
        raise refuse(
            f"is of another model: {profile.model[:80]}, not {model}; measure this one with hxla "
            "profile, into another file"
        )
    return profile


def merge_profiles(profiles: Iterable[Profile]) -> Profile:
    """The union of several profiles of one model; later ones win.

    Raises:
        PlanError: If their models or numbers of layers differ.
    """
    first, *others = profiles
    for other in others:
        if (other.model, len(other.layers)) != (first.model, len(first.layers)):
            raise PlanError(
                f"profiles of {first.model} in {len(first.layers)} layers and of {other.model} in "
                f"{len(other.layers)} do not match: measure one model, in the same layers"
            )
        first = dataclasses.replace(
            first,
            sizes={**first.sizes, **other.sizes},
            times={**first.times, **other.times},
            reductions={**first.reductions, **other.reductions},
            peaks={**first.peaks, **other.peaks},
            form=other.form or first.form,
            splits=tuple({s.split: s for s in (*first.splits, *other.splits)}.values()),
            links=tuple({x.place: x for x in (*first.links, *other.links)}.values()),
        )
    return first


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    """The faults inside a file's tables; without any, the contradictions between them."""
    try:
        file = _ProfileTable.model_validate(table)
    except pydantic.ValidationError as error:
        yield from (fault(failure, _ProfileTable) for failure in error.errors())
        return
    for name, rows in (
        *(("sizes", file.sizes), ("times", file.times)),
        *(("peaks", file.peaks), ("links", file.links)),
    ):
        settings = Counter(row.setting for row in rows)
        for setting, times in settings.items():
            if times > 1:
                yield f"{name}: {shown(setting)} is listed {times} times"
    layered = [(f"sizes.{i}", len(row.layers)) for i, row in enumerate(file.sizes)]
    layered += [(f"times.{i}", len(row.layers)) for i, row in enumerate(file.times)]
    for i, split in enumerate(file.splits):
        if len(split.parts) != len(split.kinds):
            yield f"splits.{i}.parts: {len(split.parts)} of {len(split.kinds)} places"
    for where, num in layered:
        if num != len(file.layers):
            yield f"{where}.layers: {num} of {len(file.layers)} layers"

"""Profiles as versioned JSON files."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic

from ..core.errors import PlanError
from ..core.files import fault, listed, local_path, named, read_json, shown
from .profile import Profile

_VERSION = 1

# Beyond these nothing was measured, and what is made of them stays a number.
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


class _OfKind(_FileTable):
    kind: str
    microbatch_size: _Count
    tensor: _Count

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.kind, self.microbatch_size, self.tensor


class _Times(_OfKind):
    layers: list[_TimeTable]


class _Peak(_OfKind):
    bytes: Annotated[int, pydantic.Field(ge=0, le=2**60)]


class _Split(_FileTable):
    kinds: list[str] = pydantic.Field(min_length=2)
    microbatch_size: _Count
    sent_bytes: _Bytes
    parts: list[Annotated[float, pydantic.Field(gt=0, lt=1)]]
    seconds: _Seconds


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


def dump_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile so that `load_profile` reads it back equal; the file is never half written.

    Args:
        profile: What was measured so far.
        path: Of the file; its folder is made.
    """
    table = {"version": _VERSION, **profile.to_table()}
    file = local_path(path, "path", PlanError)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(file)


def load_profile(path: str | os.PathLike[str], *, model: str | None = None) -> Profile:
    """Read measured times that `hxla profile` wrote.

    Args:
        path: The path of the file.
        model: The model that the profile must be of; None: any.

    Returns:
        The profile.

    Raises:
        PlanError: If the file cannot be read, is of another version or model, or holds times that
            are no times: every fault with its key.

    Example:
        >>> import hxla
        >>> hxla.load_profile("missing.json")
        PlanError: profile missing.json cannot be read: No such file or directory
    """
    refuse = named("profile", path, PlanError)
    table = read_json(path, refuse)
    found = table.get("version") if isinstance(table, dict) else None
    if type(found) is not int or found != _VERSION:
        raise refuse(
            f"has version {shown(found)}, this hxla reads {_VERSION}: measure again with hxla "
            "profile"
        )
    faults = list(_faults(table))
    if faults:
        raise refuse("has faults:" + listed(faults))
    profile = Profile.from_table(table)
    if model is not None and profile.model != model:
        raise refuse(
            f"is of another model: {profile.model[:80]}, not {model}; measure this one with hxla "
            "profile, into a file of its own"
        )
    return profile


def merge_profiles(profiles: Iterable[Profile]) -> Profile:
    """All that several profiles of one model hold; later ones win.

    Raises:
        PlanError: If they are of several models, or cut into other numbers of layers.
    """
    first, *others = profiles
    for other in others:
        if (other.model, len(other.layers)) != (first.model, len(first.layers)):
            raise PlanError(
                f"profiles of {first.model} in {len(first.layers)} layers and of {other.model} in "
                f"{len(other.layers)} do not go together: measure one model, cut in one way"
            )
        first = dataclasses.replace(
            first,
            sizes={**first.sizes, **other.sizes},
            times={**first.times, **other.times},
            reductions={**first.reductions, **other.reductions},
            peaks={**first.peaks, **other.peaks},
            form=other.form or first.form,
            splits=tuple({own.split: own for own in (*first.splits, *other.splits)}.values()),
        )
    return first


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a file: its own tables first, else how they go together."""
    try:
        file = _ProfileTable.model_validate(table)
    except pydantic.ValidationError as error:
        yield from (fault(failure, _ProfileTable) for failure in error.errors())
        return
    for name, rows in (("sizes", file.sizes), ("times", file.times), ("peaks", file.peaks)):
        settings = Counter(row.setting for row in rows)
        for setting, times in settings.items():
            if times > 1:
                yield f"{name}: {shown(setting)} is there {times} times"
    layered = [(f"sizes.{i}", len(row.layers)) for i, row in enumerate(file.sizes)]
    layered += [(f"times.{i}", len(row.layers)) for i, row in enumerate(file.times)]
    for i, split in enumerate(file.splits):
        if len(split.parts) != len(split.kinds):
            yield f"splits.{i}.parts: {len(split.parts)} of {len(split.kinds)} places"
    for where, num in layered:
        if num != len(file.layers):
            yield f"{where}.layers: {num} of {len(file.layers)} layers"

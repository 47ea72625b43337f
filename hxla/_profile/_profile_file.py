"""Profiles as versioned JSON files."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from .._core._errors import PlanError
from ._profile import Profile

_VERSION = 1


def dump_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile so that `load_profile` reads it back equal; the file is never half written.

    Args:
        profile: What was measured so far.
        path: Of the file; its folder is made.
    """
    table = {"version": _VERSION, **profile.to_table()}
    file = pathlib.Path(path)
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
    file = pathlib.Path(path)
    try:
        table = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"profile {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"profile {file} is no JSON: {error}") from None
    if not isinstance(table, dict) or table.get("version") != _VERSION:
        found = table.get("version") if isinstance(table, dict) else None
        raise PlanError(
            f"profile {file}: version {found!r}, this hxla reads {_VERSION}: measure again with "
            "hxla profile"
        )
    try:
        profile = Profile.from_table(table)
        faults = list(_faults(profile))
    except KeyError as error:
        faults = [f"{error.args[0]}: missing"]
    except (TypeError, ValueError, AttributeError) as error:
        faults = [str(error)]
    if faults:
        raise PlanError(f"profile {file} has faults:\n" + "\n".join(f"  {f}" for f in faults))
    if model is not None and profile.model != model:
        raise PlanError(
            f"profile {file} is of another model: {profile.model}, not {model}; measure this one "
            "with hxla profile, into a file of its own"
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
        )
    return first


def _faults(profile: Profile) -> Iterator[str]:
    rows: list[tuple[str, tuple[Any, ...]]] = [
        *((f"sizes of microbatch {b}, tensor {t}", own) for (b, t), own in profile.sizes.items()),
        *(
            (f"times of {s.kind}, microbatch {s.microbatch_size}, tensor {s.tensor}", own)
            for s, own in profile.times.items()
        ),
    ]
    for key, seconds in profile.reductions.items():
        if not math.isfinite(seconds) or seconds < 0:
            yield f"reductions of {key}: {seconds!r} is no finite number from 0 on"
    for where, layers in rows:
        if len(layers) != len(profile.layers):
            yield f"{where}: {len(layers)} of {len(profile.layers)} layers"
        for k, layer in enumerate(layers):
            for key, value in dataclasses.asdict(layer).items():
                if key == "measured":
                    continue
                number = isinstance(value, int | float)
                if not number or not math.isfinite(value) or value < 0:
                    yield f"{where}: {key} of layer {k} is {value!r}, no finite number from 0 on"

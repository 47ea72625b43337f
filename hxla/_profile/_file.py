"""Profiles as versioned JSON files."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from .._errors import PlanError
from ._values import LayerSize, LayerTime, Profile, Setting

_VERSION = 1


def dump_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile so that `load_profile` reads it back equal; the file is never half written.

    Args:
        profile: What was measured so far.
        path: Of the file; its folder is made.
    """
    table = {
        "version": _VERSION,
        "model": profile.model,
        "layers": list(profile.layers),
        "sizes": [
            {"microbatch_size": b, "tensor": t, "layers": [dataclasses.asdict(s) for s in sizes]}
            for (b, t), sizes in sorted(profile.sizes.items())
        ],
        "times": [
            {**dataclasses.asdict(setting), "layers": [dataclasses.asdict(t) for t in times]}
            for setting, times in sorted(profile.times.items())
        ],
    }
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(file)


def load_profile(path: str | os.PathLike[str], *, model: str | None = None) -> Profile:
    """Read what `dump_profile` wrote.

    Args:
        path: Of the file.
        model: What the profile must be of; None: of any model.

    Raises:
        PlanError: If the file cannot be read, is of another version or model, or holds times that
            are no times: every fault with its key.
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
    faults: list[str] = []
    profile = _parse(table, faults)
    if faults or profile is None:
        raise PlanError(f"profile {file} has faults:\n" + "\n".join(f"  {f}" for f in faults))
    if model is not None and profile.model != model:
        raise PlanError(
            f"profile {file} is of another model: {profile.model}, not {model}; measure this one "
            "with hxla profile"
        )
    return profile


def _parse(table: dict[str, Any], faults: list[str]) -> Profile | None:
    try:
        names = tuple(str(name) for name in table["layers"])
        sizes, times = {}, {}
        for i, row in enumerate(table["sizes"]):
            own = tuple(LayerSize(**layer) for layer in row["layers"])
            _check(f"sizes.{i}", own, len(names), faults)
            sizes[int(row["microbatch_size"]), int(row["tensor"])] = own
        for i, row in enumerate(table["times"]):
            measured = tuple(LayerTime(**layer) for layer in row["layers"])
            _check(f"times.{i}", measured, len(names), faults)
            setting = Setting(str(row["kind"]), int(row["microbatch_size"]), int(row["tensor"]))
            times[setting] = measured
        return Profile(model=str(table["model"]), layers=names, sizes=sizes, times=times)
    except KeyError as error:
        faults.append(f"{error.args[0]}: missing")
    except (TypeError, ValueError, AttributeError) as error:
        faults.append(str(error))
    return None


def _check(where: str, layers: tuple[Any, ...], num: int, faults: list[str]) -> None:
    if len(layers) != num:
        faults.append(f"{where}.layers: {len(layers)} of {num} layers")
    for k, layer in enumerate(layers):
        for key, value in dataclasses.asdict(layer).items():
            if key == "measured":
                continue
            number = isinstance(value, int | float)
            if not number or not math.isfinite(value) or value < 0:
                faults.append(f"{where}.layers.{k}.{key}: {value!r} is no finite number from 0 on")

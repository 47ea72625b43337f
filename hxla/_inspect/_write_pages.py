"""Inspections written as pages."""

import os
import pathlib

from .._core._errors import InspectError
from .._report._page import write
from . import _measured, _steps
from ._html import diff_page, inspection_page
from ._programs import Inspection

_Path = str | os.PathLike[str]


def write_inspection(
    inspection: Inspection,
    path: _Path,
    *,
    title: str,
    profile: _Path | None,
    predicted: _Path | None,
) -> None:
    """See `Inspection.write_html`."""
    measured = plan = None
    if profile is not None:
        measured = _measured.read(pathlib.Path(profile), inspection.programs)
    if predicted is not None:
        try:
            plan = _steps.of_file(pathlib.Path(predicted))
        except OSError as error:
            raise InspectError(
                f"no prediction in {predicted}: {error.strerror or error}"
            ) from error
    text = inspection_page(
        inspection, title=title or "What XLA did", measured=measured, predicted=plan
    )
    _write(path, text)


def write_diff(before: Inspection, after: Inspection, path: _Path, *, title: str) -> None:
    """See `Inspection.write_diff_html`."""
    _write(path, diff_page(before, after, title=title or "What changed"))


def _write(path: _Path, text: str) -> None:
    try:
        write(path, text)
    except OSError as error:
        raise InspectError(
            f"the page cannot be written to {path}: {error.strerror or error}. "
            "Give a path that this user may write to"
        ) from error

"""Docstrings say `Example:`; the reader of Google's style knows the section as `Examples:`."""

import re
from typing import Any

import griffe


class ExamplesSections(griffe.Extension):
    """Name the section as it is known, so that its code is shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )

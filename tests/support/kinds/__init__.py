"""What a model may call: about a hundred kinds of layers and losses, each as small as can be."""

from . import arrays, control, derivatives, modules, outside  # noqa: F401  they fill the table
from .kind import KINDS, LENGTH, WIDTH, Kind, Net, squares

__all__ = ["KINDS", "LENGTH", "WIDTH", "Kind", "Net", "squares"]

"""Train a Flax model on whatever accelerators you have: equal `plan.numerics`, equal bits."""

import ast as _ast
import pathlib as _pathlib
import sys as _sys

import lazy_loader as _lazy_loader

from ._src.core.version import __version__ as __version__

#: A name is imported when it is first used, from where `__init__.pyi` has it: each process of a job
#: waits for what it needs only.
_loaded, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)

_unnamed: dict[str, list[str]] = {}
for _node in _ast.parse(_pathlib.Path(__file__).with_suffix(".pyi").read_text()).body:
    if isinstance(_node, _ast.ImportFrom):
        _unnamed.setdefault(f"{__name__}.{_node.module}", []).extend(n.name for n in _node.names)


def __getattr__(name):
    value = _loaded(name)
    _name_classes()
    return value


def _name_classes():
    """Tracebacks and `repr` have public classes of loaded modules under their public names."""
    for module in [module for module in _unnamed if module in _sys.modules]:
        for name in _unnamed.pop(module):
            value = getattr(_sys.modules[module], name)
            if isinstance(value, type):
                value.__module__ = __name__

"""Train a Flax model on whatever accelerators you have: equal `plan.numerics`, equal bits."""

import lazy_loader

from ._src.core.version import __version__ as __version__

#: A name is imported when it is first used, from where `__init__.pyi` has it: each process of a job
#: waits for what it needs only.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

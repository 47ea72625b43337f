"""What the process does from which warm ones are forked: it imports, and ends with the launcher.

Signals to the job's process group are the launcher's matter. Nothing else may import this module.
"""

import signal

import flax.linen
import flax.nnx
import optax
import orbax.checkpoint

import hxla

from . import _join

__all__ = ["_join", "flax", "hxla", "optax", "orbax"]

_ = hxla.train  # a public name is imported when it is used

for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)

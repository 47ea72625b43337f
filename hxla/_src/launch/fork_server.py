"""What the process does from which warm ones are forked: it imports, and ends with the launcher.

Signals to the job's process group are the launcher's matter. Nothing else may import this module.
"""

import signal

import flax.linen
import flax.nnx
import optax
import orbax.checkpoint
import scipy.optimize

import hxla

from . import join

__all__ = ["flax", "join", "optax", "orbax", "scipy"]

for _name in dir(hxla):  # which is imported when it is used, and then by each process
    getattr(hxla, _name)

for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)

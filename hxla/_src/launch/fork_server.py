"""The imports of the fork server of warm processes.

It ignores signals to the job's process group, which the launcher handles. No other module may
import this one.
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

for _name in dir(hxla):  # otherwise each process would import on first use
    getattr(hxla, _name)

for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)

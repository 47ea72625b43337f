"""A job that goes on from form to form, each of which trains some steps and hands its state on.

What a form does to a bit stays in the state, so one sha256 at the end tells of all of them.
"""

import dataclasses
import gc
from typing import Any

import jax

from support import tiers

#: Steps of each form: the second reads the state that the first left.
EACH = 2


@dataclasses.dataclass
class Told:
    """What a job came to: losses of its steps, and of evaluations between; sums of its state."""

    losses: list[float]
    evaluations: list[float]
    sha256: str
    state: Any
    seen: list


def straight(own, plan, num_forms, held_out=None):
    """One form from the first step to the last."""
    return relayed([(own, plan)], None, held_out, each=EACH * num_forms)


def relayed(forms, folder, held_out=None, look=None, each=EACH):
    """Each form begins with the checkpoint of the one before.

    Args:
        forms: Jobs with their plans.
        folder: Of the checkpoints; None: there is one form only.
        held_out: Examples to evaluate with, before a form's steps and after them; in the quick tier
            at the end only.
        look: Called with a session after its first step and with the bytes that were live before.
        each: Steps of a form.
    """
    told = Told([], [], "", None, [])
    saved = {} if folder is None else {"checkpoint_dir": folder}
    for own, plan in forms:
        before = bytes_of_devices()
        with own.open(plan, steps=each * len(forms), **saved) as session:
            assert session.step_number == len(told.losses)
            if held_out is not None and tiers.is_all:
                told.evaluations.append(session.evaluate(held_out).loss)
            for k in range(each):
                told.losses.append(session.step().loss)
                if k == 0 and look is not None:
                    told.seen.append(look(session, before))
            is_last = session.step_number == each * len(forms)
            if held_out is not None and (is_last or tiers.is_all):
                told.evaluations.append(session.evaluate(held_out).loss)
            if folder is not None:
                session.save()
            if is_last:
                result = session.result()
                told.sha256, told.state = result.sha256, result.state
    return told


def bytes_of_devices():
    """Of all live arrays, by device and kind of memory; several arrays may share a buffer."""
    gc.collect()
    buffers = {}
    for x in jax.live_arrays():
        for shard in x.addressable_shards:
            where = shard.device.id, x.sharding.memory_kind, shard.data.unsafe_buffer_pointer()
            buffers[where] = shard.data.nbytes
    found = {}
    for (device, kind, _), size in buffers.items():
        found[device, kind] = found.get((device, kind), 0) + size
    return found

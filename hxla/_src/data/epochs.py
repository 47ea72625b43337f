"""Where epochs end in the continuous stream of examples."""

import dataclasses

from .data import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epochs:
    """The passes over the data that steps make.

    Attributes:
        step_items: Examples of a step, or 1 where the data is an iterable of global batches.
        epoch_items: Examples, or global batches, of an epoch.
    """

    step_items: int
    epoch_items: int

    def done(self, steps: int) -> float:
        """The passes over the data in a number of steps."""
        return steps * self.step_items / self.epoch_items

    def ends_with(self, steps: int) -> bool:
        """Whether the last of some steps has the last example of an epoch."""
        items = steps * self.step_items
        return items // self.epoch_items > (items - self.step_items) // self.epoch_items


def epochs_of(source: Source, batch_size: int) -> Epochs | None:
    """The epochs of a job's data; None if its length is unknown."""
    if source.num_examples:
        return Epochs(step_items=batch_size, epoch_items=source.num_examples)
    if source.num_batches:
        return Epochs(step_items=1, epoch_items=source.num_batches)
    return None

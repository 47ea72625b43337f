"""The plan of a run as a value: who computes what, why, and how far from optimal it can be."""

import dataclasses
import hashlib
import json
from typing import Any

from .._core._errors import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Replicated training of one global batch.

    Attributes:
        device_names: One name per device.
        batch_size: Examples of a global batch.
        microbatch_size: Examples of a microbatch.
        counts: Microbatches of each device; they sum to `num_microbatches`.
        reduction: `exact` or `float`.
        microbatch_seconds: Measured time of one microbatch on each device (0: not measured).
        fixed_seconds: Time of each device's step that does not depend on its count (the update).
        step_seconds: Predicted time of a step (0: nothing was measured).
        bound_seconds: No counts can be faster than this, not even fractional ones.
        reasons: Why the plan is what it is, in words.
    """

    device_names: tuple[str, ...]
    batch_size: int
    microbatch_size: int
    counts: tuple[int, ...]
    reduction: str
    microbatch_seconds: tuple[float, ...] = ()
    fixed_seconds: tuple[float, ...] = ()
    step_seconds: float = 0.0
    bound_seconds: float = 0.0
    reasons: tuple[str, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a global batch."""
        return self.batch_size // self.microbatch_size

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: predicted step over bound, minus one."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    def to_json(self) -> str:
        """The plan as JSON, complete."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: If the text is no plan.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(f"this is no plan: {error}; write plans with Plan.to_json") from error

    def fingerprint(self) -> str:
        """SHA-256 of the JSON form, the same on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def explain(self) -> str:
        """The plan in words, one line per device."""
        lines = [
            f"{self.batch_size} examples a step in {self.num_microbatches} microbatches of "
            f"{self.microbatch_size}, {self.reduction} sums"
        ]
        width = max(map(len, self.device_names))
        for i, (name, count) in enumerate(zip(self.device_names, self.counts, strict=True)):
            line = f"  {name:<{width}}  {count:>4} microbatches"
            if self.microbatch_seconds:
                busy = self.fixed_seconds[i] + count * self.microbatch_seconds[i]
                line += f" of {self.microbatch_seconds[i] * 1e3:.1f} ms, busy {busy:.3f} s"
            lines.append(line)
        if self.step_seconds:
            known = f", at most {self.gap:.1%} above any plan" if self.bound_seconds else ""
            lines.append(f"  predicted step {self.step_seconds:.3f} s{known}")
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])

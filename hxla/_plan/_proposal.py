"""A plan for a described cluster as a value: what `hxla plan` prints, writes and compares."""

import dataclasses
import hashlib
import json
from typing import Any

from .._core._errors import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What one device does.

    Attributes:
        device: Rank in the cluster.
        kind: As the mesh file and the profile call it.
        replica: Copy of the model.
        stage: Of its pipeline.
        first_layer: Of the chain.
        last_layer: Of the chain, included.
        num_microbatches: In a step.
        memory_bytes: Predicted peak.
        capacity_bytes: Of its memory (0: not described).
        compute_seconds: Forwards and backwards; with the next three the whole step.
        wait_seconds: Bubbles, transfers and other devices.
        reduction_seconds: Of gradients, as far as exposed.
        update_seconds: Of the optimizer.
    """

    device: int
    kind: str
    replica: int
    stage: int
    first_layer: int
    last_layer: int
    num_microbatches: int
    memory_bytes: float
    capacity_bytes: float
    compute_seconds: float
    wait_seconds: float
    reduction_seconds: float
    update_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """Another plan.

    Attributes:
        description: In words.
        step_seconds: Predicted.
    """

    description: str
    step_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan over replicas and stages, with its prediction and its certificate.

    Attributes:
        model: Fingerprint of the traced model.
        cluster: Name of the mesh file.
        batch_size: Examples of a global batch.
        microbatch_size: Examples of a microbatch.
        tensor: Devices that share each stage of each replica.
        recompute: Whether segments keep their inputs only and run forward again.
        layers: Names of the chain's parts.
        devices: Those that take part.
        step_seconds: Predicted, by replay of the schedule.
        closed_form_seconds: Of the same plan, by the formula that the search minimises: stages
            filled once, then the slowest one's pace, then reduction and update.
        bound_seconds: No plan over replicas and stages, at any microbatch size tried, is faster by
            that formula.
        runners_up: Next best plans, the fastest first.
        reasons: Why, and what is estimated.
    """

    model: str
    cluster: str
    batch_size: int
    microbatch_size: int
    tensor: int
    recompute: bool
    layers: tuple[str, ...]
    devices: tuple[DevicePlan, ...]
    step_seconds: float
    closed_form_seconds: float
    bound_seconds: float
    runners_up: tuple[RunnerUp, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return max(d.replica for d in self.devices) + 1

    @property
    def num_stages(self) -> int:
        """Stages of each copy."""
        return max(d.stage for d in self.devices) + 1

    @property
    def gap(self) -> float:
        """Certified distance from the optimum of the search's formula, over its bound."""
        return self.closed_form_seconds / self.bound_seconds - 1

    def to_json(self) -> str:
        """The proposal as JSON, complete."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Proposal":
        """Read what `to_json` wrote.

        Raises:
            PlanError: If the text is no proposal.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            values["devices"] = tuple(DevicePlan(**d) for d in values["devices"])
            values["runners_up"] = tuple(RunnerUp(**r) for r in values["runners_up"])
            values["layers"] = tuple(values["layers"])
            values["reasons"] = tuple(values["reasons"])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"this is no plan: {error}; write plans with hxla plan") from error

    def fingerprint(self) -> str:
        """SHA-256 of the JSON form, the same on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def explain(self) -> str:
        """The plan in words: what each device does, its time and memory, and why."""
        lines = [
            f"{self.cluster}: {self.num_replicas} replicas of {self.num_stages} stages of "
            f"{self.tensor} devices, {self.batch_size} examples a step in microbatches of "
            f"{self.microbatch_size}{', recomputed' if self.recompute else ''}",
            f"predicted step {self.step_seconds:.4g} s, "
            f"{self.batch_size / self.step_seconds:.4g} examples/s; "
            f"by closed form {self.closed_form_seconds:.4g} s where no plan is under "
            f"{self.bound_seconds:.4g} s: at most {self.gap:.1%} above the best",
            f"{'':>4} {'kind':<24} {'replica':>7} {'stage':>5} {'layers':>9} {'micro':>6} "
            f"{'compute':>9} {'wait':>9} {'reduce':>9} {'update':>9} {'memory':>10} {'of':>10}",
        ]
        for d in self.devices:
            capacity = f"{d.capacity_bytes / 2**30:.2f} GiB" if d.capacity_bytes else "?"
            lines.append(
                f"{d.device:>4} {d.kind:<24} {d.replica:>7} {d.stage:>5} "
                f"{f'{d.first_layer}-{d.last_layer}':>9} {d.num_microbatches:>6} "
                + " ".join(
                    f"{s:>7.3g} s"
                    for s in (
                        d.compute_seconds,
                        d.wait_seconds,
                        d.reduction_seconds,
                        d.update_seconds,
                    )
                )
                + f" {d.memory_bytes / 2**30:>6.2f} GiB {capacity:>10}"
            )
        lines += [f"  {reason}" for reason in self.reasons]
        if self.runners_up:
            lines.append("next best:")
            lines += [f"  {r.step_seconds:.4g} s: {r.description}" for r in self.runners_up]
        return "\n".join(lines)


def compare(first: Proposal, second: Proposal) -> str:
    """Two plans side by side, in words."""

    def memory(plan: Proposal) -> str:
        return f"{max(d.memory_bytes for d in plan.devices) / 2**30:.2f} GiB"

    def counts(plan: Proposal) -> str:
        found = {d.replica: d.num_microbatches for d in plan.devices}
        return ", ".join(map(str, found.values())) if len(found) <= 16 else f"{len(found)} replicas"

    rows = [
        ("cluster", first.cluster, second.cluster),
        ("devices in use", len(first.devices), len(second.devices)),
        (
            "data x stage x tensor",
            *(f"{p.num_replicas} x {p.num_stages} x {p.tensor}" for p in (first, second)),
        ),
        ("recomputed", *("yes" if p.recompute else "no" for p in (first, second))),
        ("microbatch size", first.microbatch_size, second.microbatch_size),
        ("microbatches", counts(first), counts(second)),
        ("predicted step", f"{first.step_seconds:.4g} s", f"{second.step_seconds:.4g} s"),
        (
            "examples/s",
            *(f"{p.batch_size / p.step_seconds:.4g}" for p in (first, second)),
        ),
        ("gap", f"{first.gap:.1%}", f"{second.gap:.1%}"),
        ("fullest device", memory(first), memory(second)),
    ]
    width = max(len(str(row[1])) for row in rows)
    lines = [f"{name:<21} {a!s:>{width}}  {b!s}" for name, a, b in rows]
    ratio = first.step_seconds / second.step_seconds
    faster = ("second", ratio) if ratio >= 1 else ("first", 1 / ratio)
    return "\n".join([*lines, f"the {faster[0]} is {faster[1]:.2f}x as fast"])

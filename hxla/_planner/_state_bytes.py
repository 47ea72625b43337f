"""What a device holds of a model's state in each stage of ZeRO, by the bytes of a parameter.

Stage 1 divides the optimizer's state over the devices, stage 2 the gradients too, stage 3 the
parameters too.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, section 5 and figure 1.
"""

import dataclasses
from collections.abc import Sequence

from .._core._errors import PlanError

STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """A way to train, as bytes per parameter.

    Attributes:
        name: The name in tables.
        parameter: The bytes of the parameter with which a microbatch computes.
        gradient: The bytes of its gradient, and of what gradients are summed in.
        optimizer: The bytes of all else that the update reads and writes.
    """

    name: str
    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes per parameter where nothing is divided."""
        return self.parameter + self.gradient + self.optimizer

    def on_device(
        self, num_parameters: float, stage: int, share: float, *, num_whole: float = 0
    ) -> float:
        """Bytes of the state on one device.

        Args:
            num_parameters: The parameters of the model.
            stage: The stage of ZeRO.
            share: The device's part of what is divided: 1 over their number where parts are even.
            num_whole: The parameters that are whole at a time although they are divided, with
                their gradients: of the groups of layers that are gathered, reduced and computed.
                The published figures count none.

        Raises:
            PlanError: If there is no such stage, or the share is no part.
        """
        if stage not in STAGES or not 0 <= share <= 1:
            raise PlanError(
                f"stage {stage} of ZeRO with a share of {share}: stages are 0 to 3, a share is "
                "between 0 and 1"
            )
        divided = [(3, self.parameter), (2, self.gradient), (1, self.optimizer)]
        found = 0.0
        for first, per_parameter in divided:
            if stage < first:
                found += per_parameter * num_parameters
            else:
                found += per_parameter * num_parameters * share
                found += per_parameter * num_whole if first > 1 else 0.0
        return found


#: Parameters and gradients of 16 bits; parameters, momentum and variance of 32.
MIXED_ADAM = StateBytes(name="mixed-precision Adam", parameter=2, gradient=2, optimizer=12)


def float32_state(num_sums: int, optimizer: float = 8) -> StateBytes:
    """The state of a float32 model here.

    Args:
        num_sums: Arrays in which gradients are summed: two limbs of 32 bits for exact sums, 1 for
            float ones, see `SumsForm.num_parts`.
        optimizer: The bytes of the optimizer's state, of Adam two moments.

    Returns:
        4 bytes of the parameter, 4 of a microbatch's gradient and 4 per sum, and the optimizer's.
    """
    name = {1: "hxla, one array of sums", 2: "hxla, exact sums"}.get(num_sums, f"{num_sums} sums")
    return StateBytes(name=name, parameter=4, gradient=4 * (1 + num_sums), optimizer=optimizer)


def zero_table(
    num_parameters: float, num_devices: int, states: Sequence[StateBytes]
) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """For each way to train its name, and the bytes of a device in stages 0 to 3."""
    share = 1 / num_devices
    return tuple(
        (state.name, tuple(state.on_device(num_parameters, stage, share) for stage in STAGES))
        for state in states
    )

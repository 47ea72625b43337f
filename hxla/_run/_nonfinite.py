"""What happens to a step in which a gradient or the loss was not finite."""

from .._core._errors import NonFiniteError
from .._plan._precision import LEAST_SCALE_EXPONENT
from ._step import Outcome, Stepper


def left_out(step: int, outcome: Outcome, stepper: Stepper, *, stops: bool) -> str:
    """Leave the update of a step out, and scale the loss less where it is scaled.

    Args:
        step: Number of the step.
        outcome: Of it.
        stepper: Holds the loss scale.
        stops: Whether to raise instead.

    Returns:
        What happened, in words.

    Raises:
        NonFiniteError: If it is to stop, or the scale is the least already.
    """
    names = outcome.nonfinite
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    message = f"step {step}: not finite in the gradient of {shown}"
    if stops:
        raise NonFiniteError(
            f"{message}; the parameters are those of step {step}. Lower the learning rate, "
            "clip, or pass nonfinite='skip' to leave such updates out"
        )
    scale = outcome.loss_scale
    if scale is not None and outcome.overflowed:
        if scale <= 2.0**LEAST_SCALE_EXPONENT:
            raise NonFiniteError(
                f"{message}, though the loss is scaled by 2^{LEAST_SCALE_EXPONENT}, the least: it "
                "is not the scale that overflows. Lower the learning rate, clip, or use "
                "precision='bf16'"
            )
        stepper.rescale(overflowed=True)
        message += f"; loss scale halved to {scale / 2:g}"
    return f"{message}; update skipped"

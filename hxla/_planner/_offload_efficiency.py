"""How fast a device trains while something travels: arithmetic intensity against bandwidth.

Where computation and copies do not overlap,

    efficiency = compute / (compute + copies) = i w / (i w + p)

with i floating-point operations per byte that travels, w bytes per second and p operations per
second of the device. A parameter takes 2 operations per token in the forward, 4 in the backward and
2 more where the forward runs again. Per step or microbatch of n tokens then travel, per parameter

    parameters and gradients    loads of the parameter, one of which is for the forward that runs
                                again, and one store of the gradient: i = 8 n / (3 * 2 + 2) = n
    optimizer                   its state in and out: i = 8 n / (2 * 16) = n / 4
    checkpoints                 out and in, every c blocks of 12 D^2 parameters, per token 2 D
                                bytes: i = 8 * 12 D^2 c / (2 * 2 D) = 24 D c

with the bytes of mixed-precision Adam. The traffic of checkpoints is thus 4 L / c D n bytes.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 4.
"""

RECOMPUTED, KEPT = 8.0, 6.0  # operations per parameter and token


def efficiency(flops_per_byte: float, bytes_per_second: float, flops_per_second: float) -> float:
    """Fraction of a device's rate that is left beside copies that it waits for.

    Args:
        flops_per_byte: The arithmetic intensity.
        bytes_per_second: The bandwidth that one device has.
        flops_per_second: The rate that it reaches without copies.
    """
    reached = flops_per_byte * bytes_per_second
    return reached / (reached + flops_per_second)


def needed_bandwidth(wanted: float, flops_per_byte: float, flops_per_second: float) -> float:
    """The bytes per second of one device for an efficiency: the inverse of `efficiency`.

    Args:
        wanted: The efficiency, between 0 and 1.
        flops_per_byte: The arithmetic intensity.
        flops_per_second: The rate that the device reaches without copies.
    """
    return wanted / (1 - wanted) * flops_per_second / flops_per_byte


def parameter_intensity(
    num_tokens: float,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    num_loads: int = 3,
    flops: float = RECOMPUTED,
) -> float:
    """Operations per byte of parameters that come and gradients that go.

    Args:
        num_tokens: The tokens that a device computes between the loads: of a microbatch, or of all
            that it runs where groups of layers are the outer loop.
        parameter_bytes: The bytes of a parameter.
        gradient_bytes: The bytes of a gradient.
        num_loads: The loads of a parameter: 2 without recomputation.
        flops: `RECOMPUTED` or `KEPT`.
    """
    return flops * num_tokens / (num_loads * parameter_bytes + gradient_bytes)


def optimizer_intensity(
    num_tokens: float, *, state_bytes: float = 16, flops: float = RECOMPUTED
) -> float:
    """Operations per byte of optimizer state that is read and written.

    Args:
        num_tokens: The tokens of a device in a step.
        state_bytes: The bytes per parameter; what lies elsewhere is divided like the parameters.
        flops: `RECOMPUTED` or `KEPT`.
    """
    return flops * num_tokens / (2 * state_bytes)


def checkpoint_intensity(
    width: float, *, blocks_between: float = 1, element_bytes: float = 2
) -> float:
    """Operations per byte of a decoder's checkpoints that go and come back.

    Args:
        width: The features of the decoder, see `_transformer_bytes`.
        blocks_between: The blocks from a checkpoint to the next.
        element_bytes: The bytes of an element.
    """
    return RECOMPUTED * 12 * width * blocks_between / (2 * element_bytes)

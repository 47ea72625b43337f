"""XLA options without which the same program may give other bits in another process."""

from typing import Any

from .._plan._plan_parts import SumsForm


def compiler_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=...)`.

    Args:
        platform: `cpu`, `gpu` or another backend's name.
        sums: Only exact sums ask for determinism.
    """
    if sums.kind == "exact" and platform == "cpu":
        # The number of threads may decide how a contraction is cut.
        return {"xla_cpu_multi_thread_eigen": False}
    if sums.kind == "exact" and platform in ("gpu", "cuda", "rocm"):
        return {"xla_gpu_exclude_nondeterministic_ops": True}
    return {}


def update_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Those of `compiler_options`, and an order in which few temporaries live at once."""
    options = compiler_options(platform, sums)
    if platform == "cpu":
        # Breadth first, as is usual there, the gradient of every tensor would wait for the last.
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    return options

"""XLA options without which the same program may give other bits in another process."""

from typing import Any

from .._plan._plan_parts import SumsForm


def compiler_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Options for `jax.jit(..., compiler_options=...)`.

    Args:
        platform: `cpu`, `gpu` or another backend's name.
        sums: Only exact sums ask for determinism.
    """
    if sums.kind != "exact":
        return {}
    # Else what is fused would decide which results are rounded to fewer bits; see `Plan.numerics`.
    options = {"xla_allow_excess_precision": False}
    if platform == "cpu":
        # The number of threads may decide how a contraction is cut.
        return options | {"xla_cpu_multi_thread_eigen": False}
    if platform in ("gpu", "cuda", "rocm"):
        # Kernels chosen by their times would be others in another process. Without times, products
        # are left to cuBLAS, which goes by their shapes: XLA's own would all get the same tile.
        return options | {
            "xla_gpu_exclude_nondeterministic_ops": True,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
        }
    return options


def extra_bytes(compiled: Any) -> int:
    """Bytes of one device that a compiled program needs beside its arguments.

    Args:
        compiled: A `jax.stages.Compiled`; 0 if its backend does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def update_options(platform: str, sums: SumsForm) -> dict[str, Any]:
    """Those of `compiler_options`, and an order in which few temporaries live at once."""
    options = compiler_options(platform, sums)
    if platform == "cpu":
        # Breadth first, as is usual there, the gradient of every tensor would wait for the last.
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    return options

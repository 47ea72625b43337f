"""What may move a bit of a program's results: settings of JAX and XLA, versions, the CPU.

Settings that are known to move none are excluded by name. All others count, also those of a later
jax, unless they have the usual value: that of the oldest supported jax, or of the first with that
name. Versions and the CPU's instruction set also decide bits.

"""

import fnmatch
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax._src import config

from ..core.errors import ConfigError

# Logs, checks, caches, dumps, exports, timeouts, and the choice of devices.
_HARMLESS_OF_JAX = (
    "jax2tf_*",
    "jax_*_visible_devices",
    "jax_array_garbage_collection_guard",
    "jax_backend_target",
    "jax_captured_constants_*",
    "jax_check_*",
    "jax_compilation_cache_*",
    "jax_compiler_detailed_logging_min_ops",
    "jax_cpu_enable_async_dispatch",
    "jax_cpu_get_*_minutes",
    "jax_cross_host_*",
    "jax_debug_*",
    "jax_default_device",
    "jax_disable_bwd_checks",
    "jax_disallow_mesh_context_manager",
    "jax_distributed_*",
    "jax_dump_*",
    "jax_enable_checks",
    "jax_enable_compilation_cache",
    "jax_enable_preemption_service",
    "jax_enable_recoverability",
    "jax_experimental_unsafe_xla_runtime_errors",
    "jax_explain_cache_misses",
    "jax_export_*",
    "jax_force_dcn_cross_host_transfers",
    "jax_hlo_source_file_canonicalization_regex",
    "jax_include_*",
    "jax_legacy_prng_key",
    "jax_log_*",
    "jax_logging_level",
    "jax_mock_gpu_topology",
    "jax_mosaic_unzip_debug_locations",
    "jax_mtls_*",
    "jax_mutable_array_checks",
    "jax_no_execution",
    "jax_no_tracing",
    "jax_num_cpu_devices",
    "jax_numpy_dtype_promotion",  # `strict` refuses what `standard` promotes
    "jax_numpy_rank_promotion",
    "jax_pallas_verbose_errors",
    "jax_persistent_cache_*",
    "jax_pgle_*",
    "jax_platform_name",
    "jax_platforms",
    "jax_pprint_use_color",
    "jax_raise_*",
    "jax_remove_custom_partitioning_ptr_from_cache_key",
    "jax_send_traceback_to_runtime",
    "jax_serialization_version",
    "jax_share_binary_between_hosts*",
    "jax_source_url_schema",
    "jax_thread_guard",
    "jax_traceback_*",
    "jax_tracer_error_num_traceback_frames",
    "jax_transfer_guard*",
    "jax_xla_backend",
    "mock_num_gpu_processes",
)

_USUAL_OF_JAX = {
    "check_vma": "False",
    "eager_constant_folding": "False",
    "jax_accurate_erf_inv": "False",
    "jax_allow_f16_reductions": "True",
    "jax_auto_pcast": "True",
    "jax_bcoo_cusparse_lowering": "False",
    "jax_compiler_enable_remat_pass": "True",
    "jax_cpu_collectives_implementation": "gloo",
    "jax_custom_jvp3": "False",
    "jax_custom_vjp3": "False",
    "jax_default_matmul_precision": "None",
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": "False",
    "jax_disable_most_optimizations": "False",
    "jax_disable_vmap_shmap_error": "False",
    "jax_embedded_constants_max_bytes": "32",
    "jax_enable_custom_prng": "False",
    "jax_enable_pgle": "False",
    "jax_enable_x64": "False",
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_exec_time_optimization_effort": "0.0",
    "jax_explicit_x64_dtypes": "1",
    "jax_high_dynamic_range_gumbel": "False",
    "jax_memory_fitting_effort": "0.0",
    "jax_memory_fitting_level": "O2",
    "jax_mosaic_allow_hlo": "False",
    "jax_optimization_level": "UNKNOWN",
    "jax_pallas_auto_assign_collective_ids": "no",
    "jax_pallas_auto_assign_collective_ids_limit": "25",
    "jax_pallas_enable_debug_checks": "False",
    "jax_pallas_poison_buffers": "False",
    "jax_pallas_use_mosaic_gpu": "True",
    "jax_pjrt_client_create_options": "None",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": "False",
    "jax_ragged_dot_use_ragged_dot_instruction": "True",
    "jax_random_seed_offset": "0",
    "jax_refs_to_pins": "False",
    "jax_remat3": "False",
    "jax_remat_barrier_no_cotangents": "False",
    "jax_remove_size_one_mesh_axis_from_type": "False",
    "jax_scan3": "False",
    "jax_softmax_custom_jvp": "False",
    "jax_sort_devices_by_process_index": "True",
    "jax_threefry_gpu_kernel_lowering": "False",
    "jax_threefry_partitionable": "True",
    "jax_use_cpp_shard_args": "False",
    "jax_use_direct_linearize": "True",
    "jax_use_emit_pipeline_primitive": "False",
    "jax_use_hlo_logistic_lowering": "None",
    "jax_use_magma": "auto",
    "jax_use_rgv3": "True",
    "jax_use_shardy_partitioner": "True",
    "jax_use_simplified_jaxpr_constants": "False",
    "jax_xla_profile_version": "0",
}

_HARMLESS_OF_XLA = (
    "xla_cpu_collective_*timeout_seconds",
    "xla_cpu_max_isa",  # `Versions.processor` has it
    "xla_cpu_multi_thread_eigen",  # the programs of exact sums are always compiled without
    "xla_dump_*",
    "xla_force_host_platform_device_count",
)
# Flags that `hxla run` sets for device kinds of a plan.
_SET_BY_HXLA = {
    "xla_gpu_shard_autotuning": "false",
    "xla_gpu_all_reduce_combine_threshold_bytes": "268435456",
    "xla_gpu_all_gather_combine_threshold_bytes": "268435456",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "268435456",
}
#: Environment variables with flags, and those that are one setting each.
_FLAGS, _ALONE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS"), ("NVIDIA_TF32_OVERRIDE",)


def bit_settings(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The settings that may move a bit and have no usual value, as sorted `name=value`.

    Raises:
        ConfigError: If a setting of JAX differs in this thread only, or flags cannot be read.
    """
    settings = {name: str(value) for name, value in jax.config.values.items()}
    settings = {n: v for n, v in settings.items() if not _matches_any(n, _HARMLESS_OF_JAX)}
    _refuse_local(settings)
    for name, value in _flags(environ).items():
        if not _matches_any(name, _HARMLESS_OF_XLA) and _SET_BY_HXLA.get(name) != value:
            settings[name] = value
    settings |= {name: environ[name] for name in _ALONE if environ.get(name)}
    return tuple(sorted(f"{n}={v}" for n, v in settings.items() if _USUAL_OF_JAX.get(n) != v))


def unlike_settings(there: Sequence[str], here: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The settings that differ: the name, and the values there and here.

    Args:
        there: A result of `bit_settings` in another process or run.
    """
    one, two = (dict(text.split("=", 1) for text in side) for side in (there, here))
    for name in sorted(one.keys() | two.keys()):
        usual = _USUAL_OF_JAX.get(name, "unset")
        values = one.get(name, usual), two.get(name, usual)
        if values[0] != values[1]:
            yield name, *values


@functools.cache
def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_local(settings: Mapping[str, str]) -> None:
    """Refuse settings of a context manager: they hold in one thread, hxla compiles in several."""
    local = [
        f"{name}={value}"
        for name, value in settings.items()
        if name in config.config_states and str(config.config_states[name].get_global()) != value
    ]
    if local:
        raise ConfigError(
            f"{', '.join(local)} holds in this thread only, and programs are compiled in several: "
            "leave the context manager, and set it for the process with jax.config.update"
        )


def _flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Flags by name, without dashes; the last of a name counts, as for XLA."""
    flags = {}
    for variable in _FLAGS:
        text = environ.get(variable, "").strip()
        if text and not text.startswith("-"):  # XLA reads it as the name of a file
            try:
                text = pathlib.Path(text).read_text()
            except OSError as error:
                raise ConfigError(f"{variable}={text} cannot be read: {error.strerror}") from None
        for flag in shlex.split(text):
            name, _, value = flag.lstrip("-").partition("=")
            flags[name] = value or "true"
    return flags


# From the newest to the oldest, with the names of XLA's `--xla_cpu_max_isa`.
_INSTRUCTIONS = ("amx", "avx512f", "avx2", "avx", "sse4_2")


def jax_versions() -> tuple[str, str]:
    """The versions of jax and jaxlib."""
    return jax.__version__, importlib.metadata.version("jaxlib")


@functools.cache
def processor() -> str:
    """The instruction set for which XLA compiles on this machine's CPU, `x86_64 avx2`."""
    machine = platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    most = _largest_allowed()
    for name in _INSTRUCTIONS:
        known = any(flag.startswith(name) for flag in flags)
        if known and (most is None or _INSTRUCTIONS.index(name) >= most):
            return f"{machine} {name}"
    return machine


def _largest_allowed() -> int | None:
    """The index in `_INSTRUCTIONS` of the value of `--xla_cpu_max_isa`, or None."""
    match = re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))
    asked = match[1].lower().replace("avx512", "avx512f") if match else ""
    return next((i for i, name in enumerate(_INSTRUCTIONS) if asked.startswith(name)), None)

"""The settings of JAX and XLA that may move a bit: which are found, and how they are told."""

import jax
import pytest

import hxla
from support.inside.jax import bit_settings, unlike_settings

pytestmark = pytest.mark.optimized


def test_nothing_is_told_of_a_jax_that_nobody_set():
    """Nor of what a later jax adds, once somebody has looked whether it moves bits."""
    assert bit_settings({}) == ()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", ()),
        ("--xla_cpu_enable_fast_math=true", ("xla_cpu_enable_fast_math=true",)),
        ("--xla_cpu_enable_fast_math", ("xla_cpu_enable_fast_math=true",)),
        ("--xla_a=1 --xla_b='x y' --xla_a=2", ("xla_a=2", "xla_b=x y")),
        ("  --xla_dump_to=/tmp --xla_dump_hlo_as_text ", ()),
        ("--xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX", ()),
        ("--xla_gpu_shard_autotuning=false", ()),
        ("--xla_gpu_shard_autotuning=true", ("xla_gpu_shard_autotuning=true",)),
    ],
)
def test_flags_that_may_move_a_bit_are_found(flags, found, tmp_path):
    file = tmp_path / "flags"
    file.write_text(flags)
    for text in (flags, str(file)) if flags else ("",):
        assert bit_settings({"XLA_FLAGS": text}) == found
    assert bit_settings({"LIBTPU_INIT_ARGS": flags}) == found


def test_other_variables_and_files_that_are_not_there():
    assert bit_settings({"NVIDIA_TF32_OVERRIDE": "0"}) == ("NVIDIA_TF32_OVERRIDE=0",)
    with pytest.raises(hxla.ConfigError, match="XLA_FLAGS=nowhere cannot be read"):
        bit_settings({"XLA_FLAGS": "nowhere"})


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("jax_enable_x64", True, True),
        ("jax_default_prng_impl", "rbg", True),
        ("jax_threefry_partitionable", False, True),
        ("jax_default_matmul_precision", "bfloat16", True),
        ("jax_random_seed_offset", 3, True),
        ("jax_log_compiles", True, False),
        ("jax_debug_nans", True, False),
        ("jax_numpy_dtype_promotion", "strict", False),
        ("jax_compilation_cache_dir", "elsewhere", False),
    ],
)
def test_settings_of_jax_that_may_move_a_bit_are_found(name, value, counts):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert bit_settings({}) == ((f"{name}={value}",) if counts else ())
    finally:
        jax.config.update(name, before)


def test_what_holds_in_one_thread_only_is_refused():
    words = "jax_enable_x64=True holds in this thread only"
    with jax.enable_x64(True), pytest.raises(hxla.ConfigError, match=words):
        bit_settings({})
    with jax.debug_nans(True):
        assert bit_settings({}) == ()


def test_differences_name_the_setting_and_both_values():
    there, here = ("jax_enable_x64=True", "xla_a=b=c"), ("jax_default_prng_impl=rbg",)
    assert list(unlike_settings(there, here)) == [
        ("jax_default_prng_impl", "threefry2x32", "rbg"),
        ("jax_enable_x64", "True", "False"),
        ("xla_a", "b=c", "unset"),
    ]
    assert not list(unlike_settings(there, there))

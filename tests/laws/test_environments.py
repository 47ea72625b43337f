"""Equal numerics, equal bits, under whatever settings of JAX and XLA: drawn with fixed seeds."""

import collections
import functools
import json
import random
import subprocess
import sys

import jax
import optax
import pytest
from flax import nnx

import hxla
from support import models, tiers
from support.jax_settings import in_force
from support.launched import own_environment

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("every_program_is_cached")]

#: Values that are not the usual ones, of settings that may move bits and of some that cannot.
SETTINGS = {
    "jax_default_prng_impl": ("rbg", "unsafe_rbg"),
    "jax_threefry_partitionable": (False,),
    "jax_enable_x64": (True,),
    "jax_default_matmul_precision": ("bfloat16", "highest"),
    "jax_random_seed_offset": (1,),
    "jax_softmax_custom_jvp": (True,),
    "jax_use_direct_linearize": (False,),
    "jax_numpy_rank_promotion": ("warn",),
    "jax_log_checkpoint_residuals": (True,),
    "jax_traceback_filtering": ("off",),
}
FLAGS = (
    "--xla_cpu_enable_fast_math=true",
    "--xla_cpu_enable_fast_min_max=true",
    "--xla_allow_excess_precision=true",
    "--xla_backend_optimization_level=1",
    "--xla_dump_hlo_as_text",
    "--xla_cpu_collective_timeout_seconds=50",
)
#: The PRNG alone, what cannot move a bit, and all else that a draw may have.
FIRST = (
    {},
    {"jax_default_prng_impl": "rbg"},
    {"jax_numpy_rank_promotion": "warn", "jax_traceback_filtering": "off"},
)


def drawn(num):
    rng = random.Random(0)
    yield from FIRST[:num]
    for _ in range(num - len(FIRST)):
        names = rng.sample(sorted(SETTINGS), rng.randint(1, 3))
        yield {name: rng.choice(SETTINGS[name]) for name in names}


class Net(nnx.Module):
    """Random numbers, a product, and a function that XLA may approximate."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jax.nn.softmax(self.layer(self.dropout(x)))


def ended():
    """Two steps on one device: numerics and SHA-256."""
    result = hxla.train(
        hxla.Job(
            Net(nnx.Rngs(0)),
            models.regression(16),
            models.squared_error,
            optax.sgd(0.1),
            batch_size=16,
            config={"cluster": {"visible_devices": [0]}},
        ),
        microbatch_size=8,
        steps=2,
    )
    return result.plan.numerics, result.sha256


def check(found):
    """Hold that equal numerics gave equal bits; returns how many of both there are."""
    groups = collections.defaultdict(set)
    for numerics, sha256 in found:
        groups[numerics].add(sha256)
    assert all(len(own) == 1 for own in groups.values()), groups
    return len(groups), len(set.union(*groups.values()))


def test_settings_of_jax_that_move_bits_move_numerics():
    found = []
    for settings in drawn(tiers.examples(3, 16)):
        with in_force(**settings):
            found.append(ended())
    num_numerics, num_bits = check(found)
    assert 2 <= num_bits <= num_numerics < len(found)


@functools.cache
def in_a_process(flags):
    code = (
        "import json\nfrom laws.test_environments import ended\nprint('ENDED', json.dumps(ended()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=own_environment() | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ENDED")]
    assert lines, ran.stderr
    return tuple(json.loads(lines[0].removeprefix("ENDED")))


@pytest.mark.slow
def test_flags_of_xla_that_move_bits_move_numerics():
    """Its quick row is `jax/test_settings.py`."""
    found = [in_a_process(flags) for flags in ("", *FLAGS)]
    num_numerics, num_bits = check(found)
    assert 2 <= num_bits <= num_numerics == 1 + 4

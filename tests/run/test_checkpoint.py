import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from hxla import CheckpointError
from support.inside.run import Checkpoints
from support.paths import PYTHONPATH, ROOT


def tree(step):
    rng = np.random.default_rng(step)
    params = {
        "dense": {"kernel": jnp.asarray(rng.normal(size=(300, 200)), jnp.float32)},
        "half": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        "scalar": jnp.float32(step),
    }
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "aux": {}}


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def test_all_bits_come_back_and_old_ones_go(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, tree(step), {"seed": step})
        checkpoints.wait()
        assert checkpoints.latest() == 3
        assert checkpoints.meta(3) == {"seed": 3}
        assert same(checkpoints.restore(tree(0), 3), tree(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_names_that_look_alike_are_kept_apart(tmp_path):
    names = ("a/b", "a_b", "a.b", "a%2Fb", "%", "", "a", "ü b", "..")
    like = {name: jnp.zeros(2) for name in names} | {"a": {"b": jnp.zeros(2), "/": jnp.zeros(2)}}
    leaves, treedef = jax.tree.flatten(like)
    saved = treedef.unflatten([jnp.full(2, i, jnp.float32) for i in range(len(leaves))])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {})
        assert same(checkpoints.restore(like, 1), saved)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_reads_the_users_own_tree(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree(1), {})
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "tree")
    expected = np.asarray(tree(1)["params"]["dense"]["kernel"])
    np.testing.assert_array_equal(plain["params"]["dense"]["kernel"], expected)


def test_saved_arrays_do_not_change_when_buffers_are_donated(tmp_path):
    x = jax.device_put(jnp.zeros(1 << 20))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x}, {})
        x = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
        checkpoints.wait()
        assert not checkpoints.restore({"x": x}, 1)["x"].any()


def test_another_model_is_refused_leaf_by_leaf(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.zeros(3), "b": jnp.zeros(2)}, {})
        like = {"a": jnp.zeros(4), "c": jnp.zeros(2)}
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(like, 1)
        for words in ("missing in the checkpoint: c", "not in this model: b", "float32[4]"):
            assert words in str(error.value)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests/run')\n"
        "from test_checkpoint import *\n"
        "c = Checkpoints(sys.argv[1], keep=2)\n"
        "step = (c.latest() or 0) + 1\n"
        "print('up', flush=True)\n"
        "while True:\n    c.save(step, tree(step), {'step': step}); step += 1\n"
        "    print(flush=True)\n"
    )
    random.seed(0)
    reached = -1
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        child.stdout.readline()
        for _ in range(random.randint(0, 3)):  # one save is whole when the next has begun
            child.stdout.readline()
        time.sleep(random.uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            latest = checkpoints.latest()
            if latest is not None:
                assert latest >= reached
                reached = latest
                assert checkpoints.meta(latest) == {"step": latest}
                assert same(checkpoints.restore(tree(0), latest), tree(latest))
    assert reached > 0
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(reached + 100, tree(0), {})
    assert not [p for p in tmp_path.iterdir() if not p.name.isdigit()]

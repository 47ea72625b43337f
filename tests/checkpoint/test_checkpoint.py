import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from hxla import CheckpointError
from support.inside.checkpoint import Checkpoints
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


def test_arrays_without_elements_come_back(tmp_path):
    saved = {
        "rank 0": jnp.zeros((8, 0)),
        "full": jnp.arange(3.0),
        "aux": {"half": jnp.zeros((0, 3), jnp.bfloat16), "host": np.zeros(0, np.int32)},
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {"seed": 0})
        found = checkpoints.restore(saved, 1)
        assert checkpoints.meta(1) == {"seed": 0}
        assert same(found, saved)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
            assert (type(ours), ours.shape, ours.dtype) == (
                type(theirs),
                theirs.shape,
                theirs.dtype,
            )
        with pytest.raises(CheckpointError, match=r"rank 0: float32\[8, 0\] in the checkpoint"):
            checkpoints.restore(saved | {"rank 0": jnp.zeros((8, 2))}, 1)


def test_a_step_is_written_anew_and_never_missing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)}, {})
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
        assert checkpoints.restore({"x": jnp.zeros(3)}, 1)["x"].all()
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    (tmp_path / "1").rename(tmp_path / "1.before")  # a kill before the new one was whole
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore({"x": jnp.zeros(3)}, 1)["x"].all()


def no_such_dtype(checkpoints, folder):
    checkpoints.save(1, {"x": np.array([object()], object)}, {})


def no_json(checkpoints, folder):
    checkpoints.save(1, {"x": np.ones(3)}, {"seed": object()})


def no_folder(checkpoints, folder):
    shutil.rmtree(folder)
    folder.write_text("a file")
    checkpoints.save(1, {"x": np.ones(3)}, {})


def no_place(checkpoints, folder):
    checkpoints.save(1, {"x": np.ones(1 << 20)}, {})
    (folder / "1" / "of another").mkdir(parents=True)  # found when the checkpoint gets its name


@pytest.mark.parametrize("spoil", [no_such_dtype, no_json, no_folder, no_place])
@pytest.mark.parametrize("waits", [True, False])
def test_whatever_fails_in_a_save_is_told_and_nothing_waits_for_it(tmp_path, spoil, waits):
    folder, made = tmp_path / "checkpoints", []

    def use():
        with Checkpoints(folder) as checkpoints:
            made.append(checkpoints)
            spoil(checkpoints, folder)
            if waits:
                checkpoints.wait()

    for again in (use, lambda: made[0].wait(), lambda: made[0].save(2, {"x": np.ones(3)}, {})):
        with pytest.raises(CheckpointError, match=r"could not be written: \S"):
            again()
    assert all(t.daemon for t in threading.enumerate() if "finalize" in t.name)


@pytest.mark.slow
def test_a_process_ends_after_a_save_that_failed():
    code = (
        "import pathlib, sys, tempfile; sys.path.insert(0, 'tests/checkpoint')\n"
        "from test_checkpoint import *\n"
        "for spoil in (no_such_dtype, no_json, no_folder, no_place):\n"
        "    folder = pathlib.Path(tempfile.mkdtemp())\n"
        "    with pytest.raises(CheckpointError), Checkpoints(folder) as c:\n"
        "        spoil(c, folder)\n"
    )
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, timeout=120, check=True)


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
        "import sys; sys.path.insert(0, 'tests/checkpoint')\n"
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

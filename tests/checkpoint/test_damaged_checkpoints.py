"""A checkpoint that is not as it was written is named, set aside, and the one before it is used."""

import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.checkpoint import Checkpoints
from support.tiers import rows

pytestmark = pytest.mark.usefixtures("every_program_is_cached")


def tree(step):
    noise = np.random.default_rng(step).normal(size=(64, 32))
    return {"params": {"kernel": jnp.asarray(noise, jnp.float32)}, "aux": {}}


def is_of(restored, step):
    return (np.asarray(restored["params"]["kernel"]) == tree(step)["params"]["kernel"]).all()


def data_file(folder):
    """A file that holds numbers: the largest."""
    return max((p for p in (folder / "tree").rglob("d/*") if p.is_file()), key=os.path.getsize)


def flip(path, where=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 0x10
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def rename(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "1", folder)


def replace(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def edit(folder):
    path = folder / "meta" / "metadata"
    table = json.loads(path.read_text())
    table["facts"]["seed"] = 7
    path.write_text(json.dumps(table))


DAMAGE = {
    "a bit of the arrays": (lambda f: flip(data_file(f)), "other bytes"),
    "arrays cut": (lambda f: cut(data_file(f)), "instead of"),
    "arrays emptied": (lambda f: os.truncate(data_file(f), 0), "has 0 bytes"),
    "arrays gone": (lambda f: data_file(f).unlink(), "is missing"),
    "manifest gone": (lambda f: (f / "tree/manifest.ocdbt").unlink(), "manifest.ocdbt is missing"),
    "manifest cut": (lambda f: cut(f / "tree/manifest.ocdbt"), "manifest.ocdbt has"),
    "a bit of the manifest": (lambda f: flip(f / "tree/manifest.ocdbt"), "ocdbt has other"),
    "tree's metadata gone": (lambda f: (f / "tree/_METADATA").unlink(), "_METADATA is missing"),
    "tree's metadata garbled": (lambda f: flip(f / "tree/_METADATA"), "_METADATA has other"),
    "tree gone": (lambda f: shutil.rmtree(f / "tree"), "cannot be read: No such file"),
    "meta gone": (lambda f: shutil.rmtree(f / "meta"), "cannot be read: No such file"),
    "meta cut": (lambda f: cut(f / "meta/metadata"), "meta/metadata is not what was written"),
    "meta edited": (edit, "meta/metadata is not what was written"),
    "the seal garbled": (lambda f: cut(f / "tree/hxla-seal.json"), "not what was written"),
    "a pipe for the seal": (lambda f: as_pipe(f / "tree/hxla-seal.json"), "no regular file"),
    "a pipe for the meta": (lambda f: as_pipe(f / "meta/metadata"), "no regular file"),
    "a pipe for the arrays": (lambda f: as_pipe(data_file(f)), "no regular file"),
    "a pipe besides": (lambda f: os.mkfifo(f / "tree" / "pipe"), "no regular file"),
    "empty folder": (empty, "empty folder"),
    "a file of that name": (replace, "no folder"),
    "another step under its name": (rename, "step 1 under another name"),
}


#: A fault of each file, and each way in which it is found out.
QUICK = (
    "a bit of the arrays",
    "arrays cut",
    "arrays gone",
    "manifest cut",
    "tree's metadata garbled",
    "tree gone",
    "meta gone",
    "meta edited",
    "the seal garbled",
    "a pipe for the arrays",
    "a pipe for the meta",
    "empty folder",
    "a file of that name",
    "another step under its name",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step), {"seed": 0})
    return folder


@pytest.fixture
def saved(sound, tmp_path):
    """Another such folder."""
    return shutil.copytree(sound, tmp_path / "checkpoints")


@pytest.mark.parametrize("name", rows(DAMAGE, *QUICK))
def test_a_damaged_checkpoint_is_set_aside_by_name_and_the_one_before_it_is_read(name, saved):
    damage, words = DAMAGE[name]
    damage(saved / "2")
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest() == 1
        [said] = checkpoints.notes
        assert "checkpoint 2 is damaged and now called 2.damaged: " in said
        assert words in said
        assert is_of(checkpoints.restore(tree(0), 1), 1)
    assert sorted(p.name for p in saved.iterdir()) == ["1", "2.damaged"]  # its name is free


def test_the_step_of_a_damaged_checkpoint_is_saved_again(saved):
    flip(data_file(saved / "2"))
    with Checkpoints(saved) as checkpoints:
        checkpoints.save(2, tree(2), {"seed": 0})
    with Checkpoints(saved) as checkpoints:
        assert (checkpoints.latest(), checkpoints.notes) == (2, ())
        assert checkpoints.meta(2) == {"seed": 0}
        assert is_of(checkpoints.restore(tree(0), 2), 2)


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_text("{")])
def test_what_orbax_keeps_besides_is_not_needed(damage, saved):
    damage(saved / "2" / "_CHECKPOINT_METADATA")
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.meta(2) == {"seed": 0}
        assert is_of(checkpoints.restore(tree(0), 2), 2)


def test_without_an_intact_checkpoint_nothing_is_trained_and_every_fault_is_said(saved):
    flip(data_file(saved / "1"))
    empty(saved / "2")
    with pytest.raises(hxla.CheckpointError, match=r"(?s)2: it is an empty.*1: .*other bytes"):
        Checkpoints(saved)
    assert sorted(p.name for p in saved.iterdir()) == ["1", "2"]


def test_training_goes_on_from_the_intact_one_to_the_same_bits(tmp_path, capsys):
    def fit():
        return hxla.train(
            hxla.Job(
                models.Dense(nnx.Rngs(0)),
                models.regression(),
                models.squared_error,
                optax.adam(1e-2),
                batch_size=24,
            ),
            microbatch_size=3,
            steps=6,
            counts="even",
            mesh=models.mesh(data=2),
            checkpoint_dir=tmp_path,
            checkpoint_every=2,
        )

    whole = fit()
    shutil.rmtree(tmp_path / "6")
    flip(data_file(tmp_path / "4"))
    resumed = fit()
    assert "checkpoint 4 is damaged" in capsys.readouterr().err
    assert resumed.history.steps[0].step == 3
    assert resumed.sha256 == whole.sha256

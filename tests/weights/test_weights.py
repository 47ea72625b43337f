"""Weights from files in a plan's layout, and written so that others read them."""

import concurrent.futures
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec as P

import hxla
from hxla import ConfigError, NameMap, TensorName, Weights, WeightsError
from support import models
from support.filled import filled
from support.inside.core import names as built_in
from support.inside.weights import NamePattern, Wanted, open_weights, pieced
from support.paths import PYTHONPATH, TESTS
from support.tiers import rows
from support.training import train_with


class Net(nnx.Module):
    """BatchNorm, a block whose MLP a rule set cuts, and a head."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.mlp = nnx.Dict(up=nnx.Linear(8, 16, rngs=rngs), down=nnx.Linear(16, 8, rngs=rngs))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.mlp["down"](jax.nn.relu(self.mlp["up"](self.norm(x)))))


def net(seed):
    return filled(lambda: Net(nnx.Rngs(0)), seed)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train)(x))


def data():
    return models.regression(16, inputs=8, outputs=4)


SPREADS = {
    "one device": {"mesh": {"data": 1}},
    "copies": {"mesh": {"data": 2}, "counts": [3, 1]},
    "cut by rules": {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
    "cut and shared out": {
        "mesh": {"data": 2, "tensor": 2},
        "rules": "decoder",
        "config": {"memory": {"zero": 3}},
    },
    "a pipeline": {"mesh": {"stage": 2}, "stages": 2},
}


def train(model, **options):
    """Cut by rules, if nothing else is said: the tests of this file share the programs of that."""
    if "mesh" not in options:
        options |= SPREADS["cut by rules"]
    options = {"steps": 2} | options
    options["mesh"] = models.mesh(**options["mesh"])
    return train_with(
        model, data(), models.squared_error, optax.sgd(0.1, momentum=0.9), batch_size=8,
        microbatch_size=2, **options,
    )  # fmt: skip


def torch_file(path, model):
    """What PyTorch would have saved of it."""
    flat = {"num_batches_tracked": np.array(7)}
    for keys, x in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        *prefix, last = map(str, keys)
        x = np.asarray(x[...])
        last = {"mean": "running_mean", "var": "running_var"}.get(last, last)
        last = "weight" if last in ("kernel", "scale", "embedding") else last
        flat[".".join([*prefix, last])] = np.ascontiguousarray(x.T if keys[-1] == "kernel" else x)
    flat["norm.num_batches_tracked"] = flat.pop("num_batches_tracked")
    safetensors.numpy.save_file(flat, path)
    return Weights(path, names="torch")


@pytest.fixture
def torch_weights(tmp_path):
    return torch_file(tmp_path / "torch.safetensors", net(7))


@pytest.mark.parametrize("spread", rows(SPREADS, "cut by rules"))
def test_training_from_a_file_is_training_from_its_arrays(spread, tmp_path, torch_weights):
    options, folder = SPREADS[spread], tmp_path / "checkpoints"
    expected = train(net(7), checkpoint_dir=folder, **options)
    made_there = train(lambda: Net(nnx.Rngs(0)), weights=torch_weights, **options)
    assert made_there.sha256 == expected.sha256
    shapes = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    assert train(shapes, weights=torch_weights, **options).sha256 == expected.sha256
    # A resumed run goes on from its checkpoint, whatever weights there are.
    other = torch_file(tmp_path / "other.safetensors", net(0))
    resumed = train(net(0), weights=other, checkpoint_dir=folder, **options)
    assert resumed.sha256 == expected.sha256


def linen_variables():
    shapes = jax.eval_shape(LinenNet().init, jax.random.key(0), data()["x"])
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: np.float32(rng.uniform(0.1, 1.0, x.shape)), shapes)


def test_the_parameters_of_linen_are_named_without_their_collection(tmp_path):
    file, variables = tmp_path / "x.safetensors", linen_variables()
    hxla.save_weights(file, variables)
    names = {"BatchNorm_0.bias", "BatchNorm_0.scale", "Dense_0.bias", "Dense_0.kernel"}
    names |= {"batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var"}
    assert safetensors.numpy.load_file(file).keys() == names
    again = hxla.load_weights(file, jax.tree.map(np.zeros_like, variables))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, variables))


@pytest.mark.slow
def test_linen_begins_with_a_file_too(tmp_path):
    file, on_one_device = tmp_path / "x.safetensors", SPREADS["one device"]
    hxla.save_weights(file, linen_variables())
    again = train(LinenNet(), weights=file, **on_one_device)
    expected = train(LinenNet(), variables=linen_variables(), **on_one_device)
    assert again.sha256 == expected.sha256


FRESH = {"arrays": lambda: net(0), "a function": lambda: lambda: net(0)}


@pytest.mark.parametrize("made_by", rows(FRESH, "arrays"))
def test_what_a_map_calls_fresh_begins_as_the_model_makes_it(made_by, torch_weights):
    names = hxla.load_names("torch").model_copy(update={"fresh": ("head/{x}",)})
    names = names.model_copy(update={"unused": (*names.unused, "head.{x}")})
    weights = Weights(torch_weights.path, names=names)
    mixed = net(7)
    mixed.head = net(0).head
    states = train(mixed).state, train(FRESH[made_by](), weights=weights).state
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        if made_by == "arrays":
            np.testing.assert_array_equal(a, b)
        else:  # another program makes the head
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="nothing to begin with for head/bias, head/kernel"):
        train(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), weights=weights)


def test_fresh_and_unused_names_need_no_map_of_their_own(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"norm.bias": np.ones(8, np.float32), "old.kernel": np.ones(3, np.float32)}
    safetensors.numpy.save_file(tensors, path)
    like = {"norm": {"bias": np.zeros(8, np.float32)}, "head": {"kernel": np.zeros(3, np.float32)}}
    weights = Weights(path, fresh="head/{path*}", unused=["old.{path*}"])
    loaded = hxla.load_weights(weights, like)
    np.testing.assert_array_equal(loaded["norm"]["bias"], tensors["norm.bias"])
    np.testing.assert_array_equal(loaded["head"]["kernel"], like["head"]["kernel"])
    with pytest.raises(WeightsError) as error:
        hxla.load_weights(Weights(path, fresh=["kernel"], unused=["kernel"]), like)
    assert "fresh: 'kernel' matches nothing; the nearest is 'head/kernel'" in str(error.value)
    assert "'{path*}/kernel' ends so" in str(error.value)
    assert "unused: 'kernel' matches nothing; the nearest is 'old.kernel'" in str(error.value)
    with pytest.raises(ConfigError, match=r"fresh=\['\{a\}\{b\}'\].*two placeholders"):
        Weights(path, fresh=["{a}{b}"])


def test_every_fault_is_in_one_error(tmp_path):
    own = net(0)
    path = tmp_path / "x.safetensors"
    hxla.save_weights(path, own)
    tensors = safetensors.numpy.load_file(path)
    del tensors["norm.scale"]
    tensors["norm.skale"] = np.ones(8, np.float32)
    tensors["head.kernel"] = tensors["head.kernel"].T.copy()[:3]
    tensors["head.bias"] = tensors["head.bias"].astype(np.float16)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(WeightsError) as error:
        train(own, weights=path)
    for words in (
        "missing in the file (the file has norm.skale, which no rule uses):\n"
        "  norm.scale for norm/scale float32[8]",
        "but used by no rule; add a rule, or name them in `unused`:\n  norm.skale float32[8]",
        "  head.kernel: [3, 8] in the file, [8, 4] needed for head/kernel float32[8, 4]",
        "  head.bias: float16 in the file, needed for head/bias float32[4]",
        "cast=True",
    ):
        assert words in str(error.value)


def test_floats_are_cast_where_that_is_asked_for(tmp_path):
    path = tmp_path / "x.safetensors"
    state = nnx.state(net(7), nnx.Not(nnx.RngState))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    hxla.save_weights(path, rounded)
    with pytest.raises(WeightsError, match="bfloat16 in the file"):
        train(net(0), weights=path)
    got = hxla.load_weights(Weights(path, cast=True), state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(rounded), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a, b.astype(jnp.float32))


def test_a_damaged_or_missing_file_is_said_before_anything_is_compiled(tmp_path):
    with pytest.raises(WeightsError, match="is no file"):
        train(net(0), weights=tmp_path / "x.safetensors")


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "bound"),
    [
        ("a/{n}/b", "a/0/b", {"n": "0"}),
        ("a/{n}/b", "a/0/c", None),
        ("Dense_{n}/kernel", "Dense_12/kernel", {"n": "12"}),
        ("Dense_{n}/kernel", "Dense_/kernel", None),
        ("{path*}/kernel", "kernel", {"path*": ()}),
        ("{path*}/kernel", "a/b/kernel", {"path*": ("a", "b")}),
        ("a/{path*}", "b", None),
        ("{n}/{n}", "3/3", {"n": "3"}),
        ("{n}/{n}", "3/4", None),
        ("{a*}/x/{b}", "x", None),
    ],
)
def test_a_pattern_matches_whole_components(pattern, name, bound):
    found = NamePattern(pattern, "/").match(name)
    assert found == bound
    if found is not None:
        assert NamePattern(pattern, "/").fill(found) == name


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"model": "{a*}/{b*}"}, "two placeholders for several components"),
        ({"model": "{a}{b}"}, "two placeholders in one component"),
        ({"model": "x{a*}"}, "stands for whole components"),
        ({"model": "{a"}, "is no pattern"),
        ({"model": "{0}"}, "is no placeholder"),
        ({"file": "{n}"}, "`stack` and a placeholder that only `file` has need each other"),
        ({"stack": 0}, "`stack` and a placeholder"),
        ({"join": 0}, "`join` is required for several files"),
        ({"file": ["a", "b"]}, "`join` is required for several files"),
        ({"file": ["a", "b"], "join": 0, "shares": [1]}, "1 shares for 2 files"),
        ({"dims": [0, 0]}, "do not name each dimension once"),
        ({"dims": [True]}, "valid integer"),
        ({"part": [0, 3, 3]}, r"part \[0, 3, 3\]"),
        ({"rank": "2"}, "valid integer"),
        ({"other": 2}, "Extra inputs"),
    ],
)
def test_a_rule_that_has_no_meaning_is_refused(rule, words, tmp_path):
    path = tmp_path / "names.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in rule.items()]
    rest = [f"{k} = 'x'" for k in ("model", "file") if k not in rule]
    path.write_text("name = 'x'\n[[tensor]]\n" + "\n".join([*lines, *rest]))
    with pytest.raises(ConfigError, match=words):
        hxla.load_names(str(path))


ROWS = {
    "the same": ({"file": "x"}, (4, 6), [((4, 6), "x")]),
    "transposed": ({"file": "x", "dims": [1, 0]}, (4, 6), [((6, 4), "x")]),
    "heads in one dimension": ({"file": "x", "dims": [[1, 2], 0]}, (4, 2, 3), [((6, 4), "x")]),
    "a dimension of one": ({"file": "x", "dims": [1, [], 0]}, (4, 6), [((6, 1, 4), "x")]),
    "stacked": (
        {"file": "x.{i}", "stack": 1, "dims": [[1, 2], 0]},
        (4, 3, 2, 5),
        [((10, 4), f"x.{i}") for i in range(3)],
    ),
    "stacked scalars": ({"file": "x.{i}", "stack": 0}, (3,), [((), f"x.{i}") for i in range(3)]),
    "joined": (
        {"file": ["q", "k", "v"], "join": 1, "shares": [2, 1, 1], "dims": [1, 0]},
        (4, 8),
        [((4, 4), "q"), ((2, 4), "k"), ((2, 4), "v")],
    ),
    "one element": ({"file": "x"}, (), [((), "x")]),
    "empty": ({"file": "x", "dims": [1, 0]}, (0, 6), [((6, 0), "x")]),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_rule_writes_it_reads_in_any_slices(row, tmp_path):
    rule, shape, expected = ROWS[row]
    path = tmp_path / "x.safetensors"
    names = NameMap(name="x", tensors=[{"model": "a", **rule}])
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    hxla.save_weights(path, {"a": array}, names=names)
    tensors = safetensors.numpy.load_file(path)
    assert {(x.shape, n) for n, x in tensors.items()} == set(expected)
    weights = Weights(path, names=names)
    assert np.array_equal(hxla.load_weights(weights, {"a": array})["a"], array)
    made = pieced("a", shape, array.dtype, TensorName(model="a", **rule))
    cuts = [[slice(None), *(slice(i, j) for i in range(n) for j in range(i, n + 1))] for n in shape]
    for index in itertools.islice(itertools.product(*cuts), 0, 3000, 7):
        assert np.array_equal(made.read(index, tensors.__getitem__), array[index])


def test_parts_of_one_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    names = NameMap(
        name="fused",
        tensors=[
            {"model": n, "file": "qkv", "dims": [0, [1, 2]], "part": [1, i, 3]}
            for i, n in enumerate("qkv")
        ],
    )
    tree = {n: np.random.default_rng(i).normal(size=(4, 2, 3)) for i, n in enumerate("qkv")}
    tree = jax.tree.map(np.float32, tree)
    hxla.save_weights(path, tree, names=names)
    [fused] = safetensors.numpy.load_file(path).values()
    assert np.array_equal(fused, np.concatenate([tree[n].reshape(4, 6) for n in "qkv"], axis=1))
    again = hxla.load_weights(Weights(path, names=names), tree)
    assert all(np.array_equal(again[n], tree[n]) for n in tree)
    with pytest.raises(WeightsError, match="qkv: only 2 of its 3 parts"):
        hxla.save_weights(path, {n: tree[n] for n in "qk"}, names=names)


def test_what_a_rule_does_not_suit_is_said(tmp_path):
    path = tmp_path / "x.safetensors"
    names = NameMap(
        name="x",
        tensors=[
            {"model": "a", "file": "a", "dims": [1, 0]},
            {"model": "b", "file": "c"},
            {"model": "c", "file": "c"},
            {"model": "d", "file": ["d1", "d2"], "join": 0},
            {"model": "e", "file": "e.{i}", "stack": 4},
        ],
    )
    tree = {n: np.ones(3, np.float32) for n in "abcdef"} | {"g": np.array(["x"])}
    with pytest.raises(WeightsError) as error:
        hxla.save_weights(path, tree, names=names)
    for words in (
        "a float32[3], rule 'a' <- 'a': dims = [1, 0], but 1 dimensions",
        "c float32[3]: tensor c is also written by b",
        "size 3 does not divide into shares of [1, 1]",
        "stack = 4, but the array has 1 dimensions",
        "f float32[3]: no rule matches it",
        "safetensors has no such dtype",
    ):
        assert words in str(error.value)
    assert not list(tmp_path.iterdir())


#: For each built-in map the arrays of a model, and the tensors it makes of them.
SAMPLES = {
    "torch": (
        {
            "conv/kernel": (3, 3, 4, 8),
            "dense/kernel": (4, 8),
            "norm/scale": (4,),
            "norm/mean": (4,),
            "tok/embedding": (32, 4),
            "dense/bias": (8,),
        },
        {
            "conv.weight": (8, 4, 3, 3),
            "dense.weight": (8, 4),
            "norm.weight": (4,),
            "norm.running_mean": (4,),
            "tok.weight": (32, 4),
            "dense.bias": (8,),
        },
    ),
    "llama-maxtext": (
        {
            "token_embedder/embedding": (32, 8),
            "decoder/layers/self_attention/query/kernel": (8, 2, 4, 2),
            "decoder/layers/self_attention/out/kernel": (4, 2, 2, 8),
            "decoder/layers/mlp/wo/kernel": (16, 2, 8),
            "decoder/layers/pre_self_attention_layer_norm/scale": (8, 2),
            "decoder/logits_dense/kernel": (8, 32),
        },
        {
            "model.embed_tokens.weight": (32, 8),
            "lm_head.weight": (32, 8),
            **{
                f"model.layers.{i}.{name}.weight": shape
                for i in range(2)
                for name, shape in {
                    "self_attn.q_proj": (8, 8),
                    "self_attn.o_proj": (8, 8),
                    "mlp.down_proj": (8, 16),
                    "input_layernorm": (8,),
                }.items()
            },
        },
    ),
}


@pytest.mark.parametrize("name", built_in("names"))
def test_a_built_in_map_makes_the_tensors_it_says(name, tmp_path):
    arrays, expected = SAMPLES[name]
    path = tmp_path / "x.safetensors"
    rng = np.random.default_rng(0)
    flat = {tuple(n.split("/")): rng.normal(size=s) for n, s in arrays.items()}
    tree = unflatten_dict({k: np.float32(x) for k, x in flat.items()})
    hxla.save_weights(path, tree, names=name)
    assert {n: x.shape for n, x in safetensors.numpy.load_file(path).items()} == expected
    again = hxla.load_weights(Weights(path, names=name), tree)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, tree))


# -- processes and devices ----------------------------------------------------------------------

LAYOUTS = [P(), P("data"), P(None, "tensor"), P("tensor", "data"), P(("data", "tensor"))]


def test_arrays_are_read_and_written_in_their_shardings(tmp_path):
    mesh = models.mesh(data=2, tensor=2)
    rng = np.random.default_rng(0)
    tree = {f"x{i}/kernel": rng.normal(size=(8, 4)).astype(np.float32) for i in range(5)}
    places = [jax.sharding.NamedSharding(mesh, spec) for spec in LAYOUTS]
    placed = {n: jax.device_put(x, s) for (n, x), s in zip(tree.items(), places, strict=True)}
    hxla.save_weights(tmp_path / "whole.safetensors", tree)
    hxla.save_weights(tmp_path / "sharded.safetensors", placed)
    whole, sharded = ((tmp_path / f"{n}.safetensors").read_bytes() for n in ("whole", "sharded"))
    assert sharded == whole
    empty = {n: jax.device_put(np.zeros((8, 4), np.float32), x.sharding) for n, x in placed.items()}
    again = hxla.load_weights(tmp_path / "whole.safetensors", empty)
    for name, x in again.items():
        assert x.sharding == placed[name].sharding
        assert all(np.array_equal(s.data, tree[name][s.index]) for s in x.addressable_shards)


def opened_together(paths):
    """What processes that exchange their texts, here threads, make of their paths."""
    meeting, said = threading.Barrier(len(paths), timeout=300), [""] * len(paths)

    def run(rank):
        def gather(_, text):
            said[rank] = text
            meeting.wait()
            return tuple(said)

        try:
            [read] = open_weights(Weights(paths[rank]), Wanted.of({"a": np.ones(3)}), gather)
            return read((slice(1, 3),)).tolist()
        except WeightsError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(run, range(len(paths))))


def test_processes_that_see_different_files_all_say_so(tmp_path):
    file, other, missing = (tmp_path / f"{n}.safetensors" for n in "xyz")
    hxla.save_weights(file, {"a": np.arange(3.0)})
    hxla.save_weights(other, {"a": np.ones(3, np.float32)})
    assert opened_together([file, file]) == [[1.0, 2.0]] * 2
    assert (
        opened_together([file, missing, missing])
        == [f"{missing} is no file (on processes 1, 2)"] * 3
    )
    for path, text in zip((file, other), opened_together([file, other]), strict=True):
        assert f"{path} has other tensors on process 1 than on process 0" in text


# -- what others read ---------------------------------------------------------------------------


@pytest.mark.slow
class Noisy(nnx.Module):
    """With a random stream and with statistics."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def test_random_streams_are_no_weights_and_statistics_are(tmp_path):
    model, path, mesh = Noisy(0), tmp_path / "trained.safetensors", models.mesh(data=1)
    job = hxla.Job(
        model,
        {"x": np.random.default_rng(0).normal(3, 2, (8, 4)).astype(np.float32)},
        lambda m, b: (m(b["x"]) ** 2).mean(-1),
        optax.sgd(0.1),
        batch_size=8,
    )
    with job.open(job.plan(microbatch_size=4, mesh=mesh), mesh=mesh) as session:
        session.step()
        hxla.save_weights(path, session.state)
        words = r"without the model's other variables, norm/mean, norm/var: pass session\.weights"
        with pytest.warns(UserWarning, match=words):
            hxla.save_weights(tmp_path / "parameters.safetensors", session.state.params)
        session.result()
    other, streams = Noisy(1), nnx.state(Noisy(1), nnx.RngState)
    nnx.update(other, hxla.load_weights(path, nnx.state(other)))
    kept = nnx.Not(nnx.RngState)
    assert hxla.fingerprint(nnx.state(other, kept)) == hxla.fingerprint(nnx.state(model, kept))
    assert other.norm.mean[...].any()
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(other, nnx.RngState)), jax.tree.leaves(streams), strict=True
    ):
        assert ours == theirs


class Turn(nnx.Module):
    def __init__(self):
        self.turn = nnx.Param(jnp.zeros((2, 3), jnp.complex64))


def test_complex_numbers_are_read_as_pairs_and_pairs_as_complex_numbers(tmp_path):
    """A trained complex parameter is a pair in `session.state`, and complex in `result.state`."""
    file, of_pairs = tmp_path / "complex.safetensors", tmp_path / "pairs.safetensors"
    whole = np.arange(6, dtype=np.complex64).reshape(2, 3) * (1 - 2j)
    pairs = np.stack([whole.real, whole.imag], axis=-1)
    hxla.save_weights(file, {"turn": whole})
    hxla.save_weights(of_pairs, {"turn": pairs})
    for path in (file, of_pairs):
        for wanted in (whole, pairs):
            found = hxla.load_weights(path, {"turn": np.zeros_like(wanted)})["turn"]
            np.testing.assert_array_equal(found, wanted)
    with pytest.raises(hxla.WeightsError, match=r"turn: complex64 in the file, needed for turn"):
        hxla.load_weights(file, {"turn": np.zeros((2, 3), np.float32)})
    job = hxla.Job(
        Turn(),
        {"x": np.ones((8, 2), np.float32)},
        lambda model, batch: jnp.abs(batch["x"] @ model.turn).sum(-1),
        optax.sgd(0.1),
        batch_size=8,
        weights=file,
    )
    mesh = models.mesh(data=1)
    with job.open(job.plan(microbatch_size=8, mesh=mesh), mesh=mesh) as session:
        np.testing.assert_array_equal(session.gather(session.state.params)["turn"][...], pairs)


def test_plain_flax_reads_an_exported_folder(tmp_path):
    result = train(net(0), **SPREADS["cut by rules"])
    hxla.save_weights(tmp_path / "nnx", result.state)
    fresh = net(1)
    _, abstract = nnx.split(nnx.eval_shape(lambda: fresh))
    checkpointer = ocp.StandardCheckpointer()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    nnx.update(fresh, checkpointer.restore(tmp_path / "nnx", abstract))
    state = nnx.state(fresh, nnx.Not(nnx.RngState))
    assert jax.tree.all(jax.tree.map(np.array_equal, state, result.state))
    x = data()["x"]
    fresh.eval()
    result.model.eval()
    np.testing.assert_allclose(fresh(x), result.model(x), rtol=1e-4, atol=1e-5)

    linen = train(LinenNet(), **SPREADS["one device"])
    hxla.save_weights(tmp_path / "linen", linen.state)
    plain = checkpointer.restore(tmp_path / "linen", linen.state)
    out = LinenNet().apply(plain, x, train=False)
    assert np.array_equal(out, LinenNet().apply(linen.state, x, train=False))


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    tree = {"a": np.ones(3, np.float32)}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(WeightsError, match="no folder of weights"):
        hxla.save_weights(tmp_path / "mine", tree)
    for _ in range(2):
        hxla.save_weights(tmp_path / "weights", tree)
    with pytest.raises(WeightsError, match="cannot be written"):
        hxla.save_weights("/proc/none/x.safetensors", tree)
    with pytest.raises(WeightsError, match="an Orbax folder keeps"):
        hxla.save_weights(tmp_path / "weights", tree, names="torch")
    with pytest.raises(WeightsError, match=r"result\.state and not"):
        hxla.save_weights(tmp_path / "x.safetensors", nn.Dense(3))


@pytest.mark.parametrize("name", ["x.safetensors", "folder"])
def test_what_the_disk_does_not_take_is_an_error(tmp_path, name):
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(WeightsError, match=f"{name}.* cannot be written"):
            hxla.save_weights(tmp_path / name, {"a": values})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert not (tmp_path / name).exists()


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jax, hxla
from test_weights import *
from support.inside.weights import Pieced

read = []
plain = Pieced.read

def counted(self, index, view):
    block = plain(self, index, view)
    read.append(block.nbytes)
    return block

Pieced.read = counted
spread = {spread!r}
weights = Weights({torch!r}, names="torch")
result = train(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), weights=weights, **spread)
print("read", sum(read), "sha256", result.sha256)
hxla.save_weights({folder!r} + "/out.safetensors", result.state, names="torch")
hxla.save_weights({folder!r} + "/out", result.state)
if jax.process_index():
    weights = Weights("/proc/none", names="torch")
try:
    train(net(0), weights=weights, **spread)
except hxla.WeightsError as error:
    print("both say", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "spread",
    [
        {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
        {"mesh": {"data": 2}, "counts": [3, 1]},
    ],
    ids=["cut by rules", "copies"],
)
def test_two_processes_read_and_write_their_own_slices(spread, tmp_path, torch_weights):
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(
            tests=str(TESTS / "weights"),
            spread=spread,
            torch=str(torch_weights.path),
            folder=str(tmp_path),
        )
    )
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        | {
            "PYTHONPATH": PYTHONPATH,
            "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1",
        },
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    expected = train(net(7), **spread)
    told = re.findall(r"^\[(\d)\] read (\d+) sha256 (\w+)", ran.stdout, re.M)
    assert {sha for _, _, sha in told} == {expected.sha256}
    whole = sum(x.nbytes for x in jax.tree.leaves(nnx.state(net(0), nnx.Not(nnx.RngState))))
    for _, num, _ in told:
        assert int(num) < 0.75 * whole if "rules" in spread else int(num) == whole
    hxla.save_weights(tmp_path / "here.safetensors", expected.state, names="torch")
    here = (tmp_path / "here.safetensors").read_bytes()
    assert (tmp_path / "out.safetensors").read_bytes() == here
    plain = ocp.StandardCheckpointer().restore(tmp_path / "out", jax.device_get(expected.state))
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, expected.state))
    assert ran.stdout.count("both say /proc/none is no file (on processes 1)") == 2
    assert not list(tmp_path.glob("*.part"))

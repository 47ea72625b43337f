"""Rule sets: first match wins, everything else is said."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import Rule, RuleSet
from support import lowering, models
from support.inside.core import names
from support.training import train_with

AXES = {"data": 2, "fsdp": 2, "tensor": 2}


def rule_set(*rules):
    return RuleSet(name="mine", rules=rules)


def dims(rules, name, shape, axes=AXES, **options):
    return dict(rules.resolve([name], [shape], axes, **options).dims[0])


def test_the_first_match_decides_and_a_later_one_that_differs_is_reported():
    rules = rule_set(
        Rule(path="kernel$", axes=((), ("tensor",))), Rule(path=".*kernel$", axes=(("tensor",), ()))
    )
    resolved = rules.resolve(["up/kernel"], [(8, 8)], AXES)
    assert resolved.dims == ({"tensor": 1},)
    assert "up/kernel" in resolved.conflicts[0]


def test_a_pattern_starts_at_a_path_component():
    rules = rule_set(Rule(path="up/kernel$", axes=(("tensor",), ())))
    assert dims(rules, "block/up/kernel", (8, 8)) == {"tensor": 0}
    assert dims(rules, "block/setup/kernel", (8, 8)) == {}


def test_entries_are_for_the_last_dimensions():
    rules = rule_set(Rule(path="kernel$", axes=((), ("tensor",))))
    assert dims(rules, "kernel", (3, 8, 8)) == {"tensor": 2}


def test_two_axes_cut_one_dimension():
    rules = rule_set(Rule(path="kernel$", axes=(("fsdp", "tensor"),)))
    assert dims(rules, "kernel", (8,)) == {"fsdp": 0, "tensor": 0}


def test_an_axis_the_mesh_lacks_counts_as_one():
    rules = rule_set(Rule(path="kernel$", axes=(("expert",), ("tensor",))))
    assert dims(rules, "kernel", (3, 8)) == {"tensor": 1}


def test_large_parameters_without_a_rule_are_reported():
    resolved = rule_set(Rule(path="x$", axes=())).resolve(
        ["a/kernel", "b/bias"], [(512, 512), (8,)], AXES
    )
    assert resolved.unmatched == ("a/kernel [512, 512]",)
    assert resolved.unused


def test_logical_names_decide_where_no_path_matches():
    rules = hxla.load_rules("decoder")
    logical = [("embed", "mlp")]
    assert dims(rules, "odd/name", (8, 8), logical=logical) == {"fsdp": 0, "tensor": 1}


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        (Rule(path="k$", axes=(("tenser",),)), (8,), "did you mean 'tensor'"),
        (Rule(path="k$", axes=(("tensor",),)), (7,), "7 does not divide into 2"),
        (Rule(path="k$", axes=((), (), ("tensor",))), (8, 8), "the rule has 3 dimensions"),
        (Rule(path="k$", axes=(("tensor",), ("tensor",))), (8, 8), "cuts two dimensions"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(rule, shape, message):
    with pytest.raises(hxla.AnnotationError, match=message) as error:
        rule_set(rule).resolve(["k"], [shape], AXES)
    assert "mine" in str(error.value)


@pytest.mark.parametrize("name", names("rules"))
def test_every_shipped_set_loads_and_names_usual_axes_only(name):
    rules = hxla.load_rules(name)
    assert rules.name == name
    rules.resolve(["nothing"], [()], {"data": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name="x"\n[[rule]]\npath="a"\naxis=[]', "axis"),
        ('name="x"\n[[rule]]\naxes=[]', "either `path` or `logical`"),
        ('name="x"\n[[rule]]\npath="("\naxes=[]', "is no pattern"),
        ('name="x"', "rule"),
        ("name=", "rule set"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(hxla.ConfigError, match=message):
        hxla.load_rules(str(path))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.embedder = nnx.Embed(models.VOCABULARY, 16, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)
        self.head = nnx.Linear(16, models.VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        x = x + self.attn(x)
        return self.head(x + self.down(jax.nn.gelu(self.up(x))))


class Logical(nn.Module):
    """No annotation, no path that a rule knows: Flax's own logical axes say it all."""

    @nn.compact
    def __call__(self, tokens):
        def dense(features, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(features, kernel_init=init)

        x = nn.Embed(models.VOCABULARY, 16)(tokens)
        x = x + dense(16, "mlp", "embed")(jax.nn.gelu(dense(64, "embed", "mlp")(x)))
        return dense(models.VOCABULARY, "embed", "vocab")(x)


def trained(net, **options):
    tokens = models.tokens()["tokens"][:96]
    return train_with(
        net,
        iter([{"tokens": tokens[i * 32 : (i + 1) * 32]} for i in range(3)]),
        models.token_loss,
        optax.sgd(0.1, momentum=0.9),  # Adam would blow up the rounding of a key's bias
        batch_size=32,
        microbatch_size=8,
        steps=3,
        counts="even",
        **options,
    )


MAKES = {
    "a block": lambda: Block(nnx.Rngs(0)),
    "logical names": Logical,
    "a scan of nnx": lambda: NnxStack("rows"),
    "a scan over columns": lambda: LinenStack("columns"),
}


@functools.cache
def on_one_device(make):
    return trained(MAKES[make](), mesh=models.mesh(data=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axes"),
    [
        ("a block", {"data": 2, "tensor": 4}),
        *[(make, {"data": 2, "fsdp": 2, "tensor": 2}) for make in MAKES],
    ],
    ids=str,
)
def test_a_model_without_annotation_trains_by_rules_as_on_one_device(make, axes):
    one = on_one_device(make)
    many = trained(MAKES[make](), mesh=models.mesh(**axes), rules="decoder")
    np.testing.assert_allclose(
        [s.loss for s in many.history.steps], [s.loss for s in one.history.steps], rtol=1e-5
    )
    cut = [r for r in many.plan.reasons if r.startswith("parameter") and "tensor" in r]
    assert len(cut) >= 3
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(many.state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


def test_rules_without_a_mesh_are_refused():
    with pytest.raises(hxla.ConfigError, match="need a mesh"):
        trained(lambda: Block(nnx.Rngs(0)), rules="decoder")


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm(name="norm")(x))
        y = nn.gelu(nn.Dense(64, name="up")(x + y))
        return x + nn.Dense(16, name="down")(y), None


class LinenStack(nn.Module):
    """Layers in a loop, in a scan, in scans inside a scan, or stacked in another dimension."""

    how: str

    @nn.compact
    def __call__(self, tokens):
        options = {"split_rngs": {"params": True}}
        axis = 1 if self.how == "columns" else 0
        scan = nn.scan(LinenLayer, variable_axes={"params": axis}, length=4, **options)
        inner = nn.scan(LinenLayer, variable_axes={"params": 0}, length=2, **options)
        x = nn.Embed(models.VOCABULARY, 16, name="tok")(tokens)
        if self.how == "loop":
            for i in range(4):
                x, _ = LinenLayer(name=f"layer{i}")(x)
        elif self.how == "nested":
            x, _ = nn.scan(inner, variable_axes={"params": 0}, length=2, **options)(name="layer")(
                x, None
            )
        else:
            x, _ = nn.remat(scan, prevent_cse=False)(name="layer")(x, None)
        return nn.Dense(models.VOCABULARY, name="head")(x)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x + self.attention(x))))


class NnxStack(nnx.Module):
    def __init__(self, how):
        rngs, self.how = nnx.Rngs(0), how
        self.tok = nnx.Embed(models.VOCABULARY, 16, rngs=rngs)
        self.head = nnx.Linear(16, models.VOCABULARY, rngs=rngs)
        if how == "loop":
            self.layer = nnx.List([NnxLayer(rngs) for _ in range(4)])
        else:
            self.layer = nnx.split_rngs(splits=4)(nnx.vmap(NnxLayer))(rngs)

    def __call__(self, tokens):
        x = self.tok(tokens)
        for layer in self.layer if self.how == "loop" else ():
            x = layer(x)
        if self.how != "loop":
            scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = scan(x, self.layer)
        return self.head(x)


@functools.cache
def job(make, how):
    """Of a model in shapes: it is traced once for all rule sets."""
    net = LinenStack(how) if make is LinenStack else nnx.eval_shape(lambda: make(how))
    return hxla.Job(net, models.tokens(16), models.token_loss, optax.sgd(0.1), batch_size=16)


@functools.cache
def planned(make, how, rules):
    mesh = {"data": 1, "fsdp": 2, "tensor": 2}
    return job(make, how).plan(lowering.cpus(4), mesh=mesh, rules=rules, microbatch_size=16)


def layouts_of(make, how, rules):
    """The spec of each parameter."""
    return {p.name: (p.shape, p.spec) for p in planned(make, how, rules).parameters}


def test_rules_cut_the_work_along_tensor_and_the_batch_along_fsdp():
    axes = planned(LinenStack, "loop", "decoder").axes
    assert {axis.name: set(axis.roles) for axis in axes} == {
        "fsdp": {"replicate"},
        "tensor": {"rules"},
    }


@pytest.mark.parametrize("rules", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize(
    ("make", "how", "stacked"),
    [
        (LinenStack, "rows", (0,)),
        (LinenStack, "columns", (1,)),
        (LinenStack, "nested", (0, 1)),
        (NnxStack, "rows", (0,)),
    ],
)
def test_rules_cut_the_dimensions_of_a_layer_where_a_scan_stacks_them(make, how, stacked, rules):
    loop, scan = layouts_of(make, "loop", rules), layouts_of(make, how, rules)
    cut = 0
    for name, (shape, spec) in scan.items():
        own = list(range(len(shape)))
        if name.startswith("layer"):
            assert [spec[d] for d in stacked] == [()] * len(stacked)
            own = [d for d in own if d not in stacked]
        of_loop = name.replace("layer/", "layer/0/" if make is NnxStack else "layer0/")
        assert (tuple(shape[d] for d in own), tuple(spec[d] for d in own)) == loop[of_loop]
        cut += len(shape) > len(own) and any(spec)
    assert cut >= 6


def test_a_rule_that_counts_the_stacked_dimension_says_that_it_is_stacked():
    rule = Rule(path="k$", axes=((), (), ("tensor",)))
    with pytest.raises(hxla.AnnotationError, match=r"stacked in dimension 1.*has 3 dimensions"):
        rule_set(rule).resolve(["k"], [(8, 4, 8)], AXES, stacked=[(1,)])

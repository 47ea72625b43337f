"""Each warning on a program that deserves it, and none on its mended form."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from support import programs
from support.tiers import rows

LARGE = programs.like(256, 256)  # 256 KiB


def warned(step, *args, kind, **kwargs):
    found = hxla.inspect(step, *args, **kwargs).main.warnings
    return [w.text for w in found if w.kind == kind]


def test_a_parameter_left_whole_among_cut_ones():
    where = programs.mesh(fsdp=4)

    def step(params, x):
        return (x @ params["a"] @ params["b"]).sum()

    def build(spec):
        return programs.jitted(step, where, ({"a": P("fsdp"), "b": spec}, P()))

    args = ({"a": LARGE, "b": LARGE}, programs.like(8, 256))
    (text,) = warned(build(P()), *args, kind="replicated")
    assert "params['b'], 256.0 KiB, is whole on every device of fsdp" in text
    assert not warned(build(P(None, "fsdp")), *args, kind="replicated")


@pytest.mark.parametrize("num_blocks", rows([None, 3], 3))
def test_rules_mean_the_dimensions_of_a_layer_where_a_scan_stacks_layers(num_blocks):
    """One of two dimensions would otherwise be a rule's second of three, or of four."""
    where = programs.mesh(tensor=4)
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    scan = lambda x, w: (jax.lax.scan(layer, x, w)[0], None)  # noqa: E731

    def step(params, x):
        run = scan if num_blocks is None else lambda x, w: jax.lax.scan(scan, x, w)
        return run(x, params["up"]["kernel"])[0].sum()

    shape = (5, 256, 256) if num_blocks is None else (num_blocks, 5, 256, 256)
    args = ({"up": {"kernel": programs.like(*shape)}}, programs.like(8, 256))
    rules = hxla.RuleSet(
        name="mine", rules=(hxla.Rule(path="up/kernel", axes=((), ("tensor",)), rank=2),)
    )

    def build(*spec):
        return programs.jitted(step, where, ({"up": {"kernel": P(*spec)}}, P()))

    (text,) = warned(build(), *args, kind="replicated", rules=rules)
    assert f"cuts its dimension {len(shape) - 1}" in text
    own = [None] * (len(shape) - 1)
    assert not warned(build(*own, "tensor"), *args, kind="replicated", rules=rules)


def test_a_parameter_against_its_rule():
    where = programs.mesh(tensor=4)
    step = lambda params, x: (x @ params["up"]["kernel"]).sum()  # noqa: E731
    args = ({"up": {"kernel": LARGE}}, programs.like(8, 256))
    rule = hxla.Rule(path="up/kernel", axes=((), ("tensor",)))
    rules = hxla.RuleSet(name="mine", rules=(rule,))

    def build(spec):
        return programs.jitted(step, where, ({"up": {"kernel": spec}}, P()))

    (text,) = warned(build(P()), *args, kind="replicated", rules=rules)
    assert "the rule path 'up/kernel'" in text
    assert "cuts its dimension 1" in text
    assert not warned(build(P(None, "tensor")), *args, kind="replicated", rules=rules)


def accumulate(reduce_inside):
    where = programs.mesh(data=4)

    def body(w, xs):
        def micro(total, x):
            grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
            return total + (jax.lax.psum(grad, "data") if reduce_inside else grad), None

        total, _ = jax.lax.scan(micro, jnp.zeros_like(w), xs)
        return total if reduce_inside else jax.lax.psum(total, "data")

    specs = (P(), P(None, "data"))
    step = jax.shard_map(body, mesh=where, in_specs=specs, out_specs=P(), check_vma=False)
    return programs.jitted(step, where, specs)


def test_a_sum_of_gradients_inside_the_microbatch_loop():
    args = (programs.like(64, 64), programs.like(5, 16, 64))
    (text,) = warned(accumulate(True), *args, kind="hoistable")
    assert "all-reduce of f32[64,64] over data" in text
    assert "in each of 5 iterations and is only added up by the loop" in text
    assert not warned(accumulate(False), *args, kind="hoistable")


def test_a_residual_stream_is_not_a_sum_that_could_wait():
    found = programs.inspected("linen").main.warnings
    assert not [w for w in found if w.kind == "hoistable"]


def test_a_gather_of_what_no_iteration_changes():
    where = programs.mesh(data=4)

    def body(w, xs):
        def micro(_, x):
            return _, jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True))

        return jax.lax.scan(micro, 0, xs)[1]

    specs = (P("data"), P(None, "data"))
    step = jax.shard_map(body, mesh=where, in_specs=specs, out_specs=P(None, "data"))
    args = (programs.like(64, 64), programs.like(5, 16, 64))
    # XLA moves such a gather out itself unless the loop's carry hides it; say so on the text.
    text = programs.jitted(step, where, specs).lower(*args).compile().as_text()
    found = hxla.inspect(text).main
    (gather,) = found.select("all-gather")
    inside = bool(gather.loops)
    assert [w.kind for w in found.warnings] == ["hoistable"] * inside


INVARIANT = """HloModule step, num_partitions=2

%body (t: (s32[], f32[8], f32[16])) -> (s32[], f32[8], f32[16]) {
  %t = (s32[], f32[8], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[8] get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %ag = f32[16] all-gather(%w), channel_id=1, replica_groups={{0,1}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(step)/while/body/Model/all_gather"}
  %y = f32[16] get-tuple-element(%t), index=2
  %sum = f32[16] multiply(%y, %ag)
  ROOT %r = (s32[], f32[8], f32[16]) tuple(%next, %w, %sum)
}

%cond (t.1: (s32[], f32[8], f32[16])) -> pred[] {
  %t.1 = (s32[], f32[8], f32[16]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %n = s32[] constant(9)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: f32[8], b: f32[16]) -> f32[16] {
  %a = f32[8] parameter(0)
  %b = f32[16] parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8], f32[16]) tuple(%zero, %a, %b)
  %loop = (s32[], f32[8], f32[16]) while(%init), condition=%cond, body=%body
  ROOT %out = f32[16] get-tuple-element(%loop), index=2
}
"""


def test_a_gather_in_a_loop_that_never_changes_its_operand():
    program = hxla.inspect(INVARIANT).main
    (warning,) = program.warnings
    assert warning.kind == "hoistable"
    assert "in each of 9 iterations and works on the same values" in warning.text
    assert warning.num_bytes == 8 * 4 * 8  # what eight iterations send for nothing


def test_a_loop_up_to_its_limit_runs_once_more():
    (warning,) = hxla.inspect(INVARIANT.replace("direction=LT", "direction=LE")).main.warnings
    assert "in each of 10 iterations" in warning.text


def test_a_reshard_that_gathers_and_cuts_again():
    text = """HloModule step, num_partitions=2

ENTRY %main (a: f32[8,16]) -> f32[16,8] {
  %a = f32[8,16] parameter(0)
  %id = u32[] partition-id()
  %eight = u32[] constant(8)
  %start = u32[] multiply(%id, %eight)
  %zero = u32[] constant(0)
  %ag = f32[16,16] all-gather(%a), channel_id=1, replica_groups={{0,1}}, dimensions={0}, \
use_global_device_ids=true
  ROOT %cut = f32[16,8] dynamic-slice(%ag, %zero, %start), dynamic_slice_sizes={16,8}
}
"""
    (warning,) = hxla.inspect(text).main.warnings
    assert warning.kind == "reshard"
    assert "the all-gather of f32[16,16]" in warning.text
    whole = text.replace("multiply(%id, %eight)", "multiply(%eight, %eight)")
    assert not hxla.inspect(whole).main.warnings  # the same part on every device was asked for


def test_padding_of_a_dimension_that_does_not_divide():
    where = programs.mesh(data=4)

    def step(x):
        cut = jax.lax.with_sharding_constraint(x, NamedSharding(where, P("data")))
        return jnp.tanh(cut) * 2

    def pads(rows):
        step_ = programs.jitted(step, where, P(), P())
        return warned(step_, programs.like(rows, 4096), kind="padding")

    assert "f32[5,4096] is padded to f32[8,4096] (60% more)" in pads(5)[0]
    assert "cut over 4 devices" in pads(5)[0]
    assert not pads(8)


def test_an_axis_that_does_nothing():
    where = programs.mesh(data=2, tensor=2)
    step = lambda w, x: (x @ w).sum()  # noqa: E731
    args = (programs.like(64, 64), programs.like(8, 64))
    (text,) = warned(programs.jitted(step, where, (P(), P("data"))), *args, kind="unused axis")
    assert text.startswith("nothing is cut over tensor")
    used = programs.jitted(step, where, (P(None, "tensor"), P("data")))
    assert not warned(used, *args, kind="unused axis")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donation_that_nothing_takes_over():
    step = jax.jit(lambda a, b: (a + 1, b.sum()), donate_argnums=(0, 1))
    (text,) = warned(step, LARGE, programs.like(128, 128), kind="donation")
    assert text.startswith("b, 64.0 KiB, was donated")
    kept = jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))
    assert not warned(kept, LARGE, programs.like(128, 128), kind="donation")


def test_programs_of_good_shardings_have_no_warnings():
    for name in ("data", "tensor", "pipeline", "experts", "nnx_adam", "taskgraphs"):
        assert not programs.inspected(name).main.warnings, name

"""What an inspection says, against counts and bytes worked out without it."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from support import programs
from support.inside.inspect import _annotated_module, _hlo_text, _shapes, waiting_table
from support.inside.inspect import _collectives as _groups
from support.inside.report import COLLECTIVE, COMPUTATION, Bar, Lanes
from support.programs import compiled, inspected
from support.uneven_models import Run

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.mark.parametrize("name", programs.ALL)
def test_collectives_are_those_of_the_text_and_move_the_bytes_of_theory(name):
    step, moved = compiled(name)
    program = inspected(name).main
    pattern = rf"= .+? ({'|'.join(KINDS)})(?:-start)?\("
    assert collections.Counter(c.kind for c in program.collectives) == collections.Counter(
        re.findall(pattern, step.as_text())
    )
    found = collections.Counter()
    for c in program.collectives:
        found[c.kind, c.over, c.runs] += c.num_bytes
    assert found == moved
    assert not program.problems
    for c in program.collectives:
        assert c.origin.task_graph or c.origin.module or c.origin.function or c.origin.missing
        assert "programs.py:" in c.origin.source


@pytest.mark.parametrize("name", programs.ALL)
def test_memory_by_owner_adds_up_to_the_compilers_figure(name):
    step, _ = compiled(name)
    stats = step.memory_analysis()
    own = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
    memory = inspected(name).main.memory
    assert memory.total_bytes == own
    assert sum(memory.by_owner.values()) == pytest.approx(own, rel=0.01)
    gaps = sum(b.num_bytes for b in memory.buffers if b.name.startswith("("))
    assert abs(gaps) <= 0.02 * own + 64 * len(memory.buffers)  # XLA aligns buffers to 64 bytes


def test_owners_are_the_bytes_of_a_step_of_adam():
    memory = inspected("nnx_adam").main.memory
    matrices = 2 * programs.WIDTH * programs.HIDDEN * 4
    owners = memory.by_owner
    assert owners["parameter"] == matrices
    assert owners["optimizer state"] == 2 * matrices + 4  # and the count of steps
    assert owners["batch"] == programs.BATCH // 8 * programs.WIDTH * 4
    # Before and after their sum over devices, and the table of the tuple.
    assert owners["gradient"] == 2 * matrices + 16


def test_owners_can_be_said():
    step = jax.jit(lambda w, slow: (w + 1, slow + 1), donate_argnums=(0, 1))
    shape = programs.like(64, 64)
    owners = {"slow": "optimizer state", "w": "parameter"}
    assert hxla.inspect(step, shape, shape, owners=owners).main.memory.by_owner == {
        "parameter": 64 * 64 * 4,
        "optimizer state": 64 * 64 * 4,
        "output": 16,
    }
    with pytest.raises(hxla.InspectError, match="no owner, only: parameter"):
        hxla.inspect(step, shape, shape, owners={"w": "weights"})


def test_activations_of_a_deep_network_are_named_so():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    step = jax.jit(jax.grad(loss))
    params = [programs.like(16, 16)] * 6
    memory = hxla.inspect(step, params, programs.like(4096, 16)).main.memory
    activation = 4096 * 16 * 4
    assert memory.by_owner["activation"] == pytest.approx(6 * activation, rel=0.2)


def test_flops_are_those_of_theory_times_the_trips_of_the_loop():
    program = inspected("linen").main
    products = 2 * (programs.BATCH // 2) * programs.WIDTH * (programs.HIDDEN // 2)
    assert program.total.flops == 3 * 2 * products
    once = compiled("linen")[0].cost_analysis()["flops"]  # ignores trips, counts everything
    assert 2 * products <= once < 1.5 * 2 * products


def test_flops_of_a_convolution():
    def step(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    found = hxla.inspect(jax.jit(step), programs.like(2, 8, 8, 4), programs.like(3, 3, 4, 16))
    assert found.main.total.flops == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 4)


def test_task_graphs_have_their_own_work():
    work = {w.task_graph: w for w in inspected("taskgraphs").main.work}
    features, classes = "replicate() #0", "split() #1"
    own = 2 * programs.BATCH * programs.WIDTH * programs.HIDDEN
    assert work[features].flops == own
    assert work[classes].flops == 2 * programs.BATCH * programs.HIDDEN * 256 / 4
    assert work[""].num_collectives == 1


def test_a_scope_survives_into_the_hlo_with_the_module_inside_it():
    def step(x, w):
        with jax.named_scope("Model"), hxla.split(4), jax.named_scope("Dense_0"):
            return x @ w

    text = jax.jit(step).lower(jnp.ones((4, 8)), jnp.ones((8, 4))).compile().as_text()
    (name,) = {n for n in re.findall(r'op_name="([^"]*)"', text) if "hxla" in n}
    assert re.fullmatch(r"jit\(step\)/Model/hxla\.split\[4\]\.\d+/Dense_0/dot_general", name)


def test_backward_and_recomputation_are_told_apart():
    @jax.checkpoint
    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(jnp.tanh(x @ w) @ w)

    step = jax.jit(jax.grad(lambda w, x: layer(w, x).sum()))
    text = hxla.inspect(step, programs.like(64, 64), programs.like(256, 64))
    phases = {(f.origin.module, f.origin.phase) for f in text.main.fusions}
    assert {("layer", "backward"), ("layer", "recomputation")} <= phases


def test_parameters_lie_on_the_mesh_as_they_were_given():
    arrays = {a.path: a for a in inspected("fsdp_and_tensor").main.arrays}
    up = arrays["params['up']"]
    assert up.shape == (programs.WIDTH, programs.HIDDEN)
    assert up.local_shape == (programs.WIDTH // 2, programs.HIDDEN // 2)
    assert up.spec == (("fsdp",), ("tensor",))
    assert inspected("fsdp_and_tensor").main.mesh == (("fsdp", 2), ("tensor", 2))


def test_none_among_the_arguments_hides_no_layout():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    run = jax.jit(lambda state, rest: (state["a"].sum(), rest[0]))
    found = hxla.inspect(run.lower({"a": rows, "b": None}, (rows, None)).compile()).main
    assert [a.spec for a in found.arrays] == [(("data",), ())] * 2
    assert {c.over for c in found.collectives} == {"data"}


def test_arguments_that_the_program_does_not_read_are_left_out():
    where = programs.mesh(data=4)
    step = programs.jitted(
        lambda params, x: params["a"] * 2 + x, where, ({"a": P("data"), "b": P()}, P())
    )
    args = ({"a": programs.like(8, 8), "b": programs.like(4, 4)}, programs.like(8, 8))
    arrays = hxla.inspect(step, *args).main.arrays
    assert [(a.path, a.spec) for a in arrays] == [
        ("params['a']", (("data",), ())),
        ("x", ((), ())),
    ]


def test_a_gathered_parameter_is_named_through_casts_slices_and_loops():
    where = programs.mesh(data=4)

    def step(params, x):
        def layer(x, w):
            half = jax.lax.with_sharding_constraint(
                w.astype(jnp.bfloat16), NamedSharding(where, P())
            )
            return jnp.tanh(x @ half.astype(jnp.float32)), None

        return jax.lax.scan(layer, x, params)[0]

    step = programs.jitted(step, where, (P(None, "data"), P("data")), P("data"))
    args = (programs.like(3, 32, 32), programs.like(8, 32))
    (gather,) = hxla.inspect(step, *args).main.select("all-gather")
    assert gather.operands == ("params",)
    assert gather.runs == 3


def test_predicted_times_are_those_of_a_ring():
    link = {"bytes_per_second": 1e9, "latency_seconds": 1e-5}
    cluster = hxla.Cluster(
        name="test",
        devices=(hxla.Device(kind="gpu"),) * 4,
        nodes=(hxla.Node(name="n", link=hxla.Link(**link)),),
    )
    (reduce,) = hxla.inspect(compiled("tensor")[0], cluster=cluster).collectives
    part = programs.BATCH * programs.WIDTH * 4 / 4
    assert reduce.seconds == pytest.approx(2 * 3 * (1e-5 + part / 1e9))
    (permute,) = hxla.inspect(compiled("pipeline")[0], cluster=cluster).collectives
    assert permute.seconds == pytest.approx(1e-5 + permute.num_bytes / 1e9)
    total = hxla.inspect(compiled("pipeline")[0], cluster=cluster).main.total
    assert total.collective_seconds == pytest.approx(7 * permute.seconds)


@pytest.mark.parametrize("name", ["pipeline", "nnx_adam", "unknown_trips"])
def test_json_out_and_in_is_the_same_inspection(name):
    found = inspected(name)
    assert hxla.Inspection.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["programs"][0]["collectives"]
    with pytest.raises(hxla.InspectError, match="no inspection"):
        hxla.Inspection.from_json("{}")


def test_text_and_compiled_step_tell_the_same_collectives():
    step, _ = compiled("nested_loops")
    by_text = hxla.inspect(step.as_text(), mesh={"a": 2, "b": 2, "c": 2})
    assert by_text.collectives == inspected("nested_loops").collectives
    assert by_text.main.memory is None
    assert "does not tell" in by_text.main.memory_missing
    bare = hxla.inspect(step.as_text()).collectives[0]
    assert bare.axes is None
    assert "name its axes" in bare.axes_missing


def test_what_is_nothing_to_inspect_is_refused():
    with pytest.raises(hxla.InspectError, match="a plain function first"):
        hxla.inspect(lambda x: x)
    with pytest.raises(hxla.InspectError, match="no file or folder"):
        hxla.inspect("nowhere")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
        (None, ((0, 1, 2, 3),)),
    ],
)
def test_groups_are_read_in_all_their_forms(text, groups):
    assert _groups.parse_groups(text, 4) == groups


def test_groups_of_any_axes_are_found_again():
    mesh = (("a", 2), ("b", 3), ("c", 4))
    for axes in ((), ("a",), ("b",), ("c",), ("a", "c"), ("b", "c"), ("a", "b", "c")):
        assert _groups.axes_of(_groups.groups_of(mesh, axes), mesh) == axes
    assert _groups.axes_of(((0, 5), (1, 4)), mesh) is None


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("f32[4,64]{1,0}", 1024),
        ("bf16[3]", 6),
        ("s4[5]", 3),
        ("pred[7]{0:T(256)(128)(4,1)}", 7),
        ("(s32[], f32[2,2]{1,0}, /*index=2*/(u8[3], token[]))", 23),
    ],
)
def test_bytes_of_shapes(shape, num_bytes):
    assert _shapes.shape_bytes(shape) == num_bytes


ASYNC = """HloModule step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%wrapped (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[16]{0} reduce-scatter(%p), channel_id=3, replica_groups=[1,4]<=[4], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[16], b: f32[64]) -> f32[64] {
  %a = f32[16]{0} parameter(0), metadata={op_name="params"}
  %b = f32[64]{0} parameter(1)
  %ag = (f32[16]{0}, f32[64]{0}) all-gather-start(%a), channel_id=1, replica_groups={{0,1,2,3}}, \
dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/Model/gather" \
source_file="/home/u/model.py" source_line=7}
  %cp = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%b), channel_id=2, \
source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %ags = f32[64]{0} all-gather-done(%ag)
  %cps = f32[64]{0} collective-permute-done(%cp)
  %start = ((f32[64]{0}), f32[16]{0}) async-start(%cps), calls=%wrapped
  %done = f32[16]{0} async-done(%start)
  %ar = f32[64]{0} all-reduce-start(%ags), channel_id=4, replica_groups=mesh['d'=2,'t'=2] {'d'}, \
use_global_device_ids=true, to_apply=%add
  ROOT %ars = f32[64]{0} all-reduce-done(%ar)
}
"""


def test_an_asynchronous_pair_is_one_collective():
    program = hxla.inspect(ASYNC, mesh={"d": 2, "t": 2}).main
    found = {c.kind: c for c in program.collectives}
    assert len(program.collectives) == len(found) == 4
    assert all(c.is_async for c in program.collectives)
    assert {kind: (c.num_bytes, c.over) for kind, c in found.items()} == {
        "all-gather": (256, "d+t"),
        "collective-permute": (256, "t"),
        "reduce-scatter": (256, "d+t"),
        "all-reduce": (256, "d"),
    }
    gather = found["all-gather"]
    assert (gather.origin.module, gather.origin.source) == ("Model", "/home/u/model.py:7")
    assert gather.operands == ("params",)
    assert found["all-gather"].sent_bytes == 256 * 3 / 4
    assert found["all-reduce"].sent_bytes == 2 * 256 / 2


def test_trips_are_counted_where_the_compiler_does_not_say_them():
    step, _ = compiled("nested_loops")
    text = re.sub(r', backend_config=\{"?(?:dynamic_variables|known).*', "", step.as_text())
    assert "known_trip_count" not in text
    (reduce,) = hxla.inspect(text).collectives
    assert [loop.trips for loop in reduce.loops] == [5, 3]


def test_the_reader_keeps_what_operands_and_attributes_hold():
    module = _hlo_text.read_module(ASYNC)
    permute = module.computations["main"].instructions["cp"]
    assert permute.operands == (("b", None),)
    assert permute.attribute("source_target_pairs") == "{{0,1},{1,0},{2,3},{3,2}}"
    assert permute.attribute("channel_id") == "2"
    assert permute.attribute("nothing") is None
    assert [p.name for p in module.computations["main"].parameters] == ["a", "b"]
    sugared = _hlo_text.Instruction("t", "f32[]", "fusion", "%p#1, %w.2#0), calls=%c", False)
    assert sugared.operands == (("p", 1), ("w.2", 0))


def test_a_callback_is_a_host_transfer():
    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x) + 1

    (transfer,) = hxla.inspect(jax.jit(step), programs.like(16)).main.transfers
    assert (transfer.kind, transfer.num_bytes, transfer.runs) == ("callback", 64, 1)


def test_a_collective_that_xla_made_of_several_has_the_task_graphs_of_all():
    where = programs.mesh(data=4)

    def loss(params, x):
        with hxla.split(1):
            h = jnp.tanh(x @ params["up"])
        with hxla.replicate(1):
            return (h @ params["down"]).sum()

    whole = {"up": P(), "down": P()}
    step = programs.jitted(jax.grad(loss), where, (whole, P("data")), whole)
    params = {"up": programs.like(8, 16), "down": programs.like(16, 8)}
    found = hxla.inspect(step, params, programs.like(8, 8)).collectives
    joined = {label for c in found for label in c.origin.task_graph.split(" + ")}
    assert joined == {"split(1) #0", "replicate(1) #1"}
    assert all(c.origin.phase == "backward" for c in found)


def test_joined_names_are_taken_apart():
    assert _annotated_module.joined("jit(f)/a/dot") == ["jit(f)/a/dot"]
    assert _annotated_module.joined("jit(f)/(a(b:c)/dot:(d/add:e/mul))") == [
        "jit(f)/a(b:c)/dot",
        "jit(f)/d/add",
        "jit(f)/e/mul",
    ]


def test_the_terminal_shows_parts_of_unlike_sizes_and_who_waits(tmp_path):
    params = (programs.like(8, 8),)
    found = hxla.inspect(programs.jitted(lambda x: x @ x, programs.mesh(tensor=2), (P(),)), *params)
    plan = Run("columns", 8, (3, 1)).plan
    plan.write(tmp_path / "plan.json")
    text = found.text(plan=tmp_path / "plan.json")
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("up/kernel")]
    # 6 + 2 of 8 columns of 8 float32: 4 of them are padding.
    assert rows == [["up/kernel", "1", "6", "+", "2", "6", "on", "each", "50", "%", "128", "B"]]
    assert "device 1 of a replica" in text

    bars = [
        Bar(lane=lane, kind=kind, label="", start_seconds=start, end_seconds=end)
        for lane, kind, start, end in (
            (0, COMPUTATION, 0, 1),
            (0, COLLECTIVE, 1, 4),
            (1, COMPUTATION, 0, 3),
            (1, COLLECTIVE, 3, 4),
        )
    ]
    table = waiting_table(Lanes(title="", names=("first", "second"), bars=tuple(bars)))
    assert [row[3:] for row in table.rows] == [("2 s", "50 %"), ("0 s", "0 %")]

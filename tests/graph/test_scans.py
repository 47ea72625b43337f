"""Scans over layers, cut between their iterations: graphs, slots, training, checkpoints."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from support import lowering, models
from support.filled import filled_tree
from support.inside.graph import graph_at, graph_of, run_segment, segments, trace_functional
from support.inside.lower import make_slots
from support.inside.model import functional
from support.inside.plan import shard_graph, storage_specs
from support.inside.profile import layer_sizes, measure
from support.scanned_models import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    LinenLayer,
    LinenNet,
    NnxNet,
    data,
    job,
    loss,
    run_plan,
    same,
    train,
)
from support.tiers import rows


def traced(model, own_loss=loss, num=2):
    batch = data(num)
    made = functional(model, own_loss, own_loss, variables=None, seed=0, example=batch)
    return made, trace_functional(made, batch), batch


def ranges(graph):
    return [op.iterations for op in graph.ops if op.kind == "scan"]


# -- graphs ------------------------------------------------------------------------------------


HOW = {
    "rows": {},
    "columns": {"axis": 1},
    "backwards": {"reverse": True, "remat": True},
    "columns, backwards": {"axis": 1, "reverse": True, "remat": True},
}
#: XLA's, for programs that run once.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize("how", rows(HOW, "columns, backwards"))
def test_a_chain_of_iterations_gives_the_loss_and_gradients_of_the_scan(how):
    layers = 2
    model, graph, batch = traced(LinenNet(layers=layers, **HOW[how]))
    params = filled_tree(jax.eval_shape(model.initialise, *model.init_arguments)[0])
    opened = graph_of(graph)
    assert ranges(opened) == [(i, i + 1) for i in range(layers)]
    chain = segments(opened, 32)
    assert "layers[1]" in {s.name for s in chain}
    key = jax.random.key(0)
    given = dict(zip(graph.batch_values, jax.tree.leaves(batch), strict=True))
    given[graph.key_value] = key

    def of_chain(params):
        arrays = jax.tree.leaves(params)
        crossing = {}
        for segment in chain:
            own = []
            for entry in segment.params:
                value = opened.values[opened.param_values[entry]]
                x = arrays[value.param]
                if value.rows is not None:
                    dim, start, stop = value.rows
                    x = jax.lax.slice_in_dim(x, start, stop, axis=dim)
                own.append(x)
            inputs = {v: crossing[v] for v in segment.inputs}
            made = run_segment(opened, segment)(own, inputs, {v: given[v] for v in segment.given})
            crossing |= dict(zip(segment.outputs, made, strict=True))
        return crossing[opened.result_values[0]]

    def of_whole(params):
        return model.train(params, model.aux, key, batch)[0].sum()

    compiled = functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    value, grads = compiled(jax.value_and_grad(of_chain))(params)
    expected, wanted = compiled(jax.value_and_grad(of_whole))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1.0, np.abs(b).max()))


def test_iterations_between_two_cuts_are_one_equation_with_their_own_rows():
    _, graph, _ = traced(LinenNet())
    opened = graph_of(graph)
    places = [
        i for i, op in enumerate(o for o in opened.ops if _counted(opened, o)) if op.iterations
    ]
    ranged, points = graph_at(graph, "work", [places[2], places[5]])
    assert ranges(ranged) == [(0, 2), (2, 5), (5, 6)]
    assert points == (places[1], places[2])
    taken = {v.rows for v in ranged.values if v.rows is not None}
    assert taken == {(0, 0, 2), (0, 2, 5), (0, 5, 6)}
    assert graph_at(graph, "work", [places[0]])[0] is graph  # not cut inside: nothing changes


def _counted(graph, op):
    return not all(graph.values[v].param is not None for v in op.outputs)


def test_a_scan_over_time_reads_data_and_stays_whole():
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.RNN(nn.LSTMCell(VOCABULARY))(nn.Embed(VOCABULARY, WIDTH)(tokens)), 0.0

    _, graph, _ = traced(Recurrent())
    assert [op.kind for op in graph.ops].count("scan") == 1
    assert graph_of(graph) is graph


def test_without_stages_a_scan_stays_as_it_was_traced():
    def run(params, aux, key, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
        return x.sum(), jnp.stack([x.sum(), 1.0]), aux

    params = np.ones((LAYERS, WIDTH, WIDTH), np.float32)
    made = lowering.programs(run, params, np.ones((2, WIDTH), np.float32))
    assert ranges(made.graph) == [None]
    text = made._lowered(0)[0].as_text()
    assert f"tensor<{LAYERS}x{WIDTH}x{WIDTH}xf32>" in text


# -- slots -------------------------------------------------------------------------------------

S = 4
#: Stacked in dimension 0: stored by rows, by columns, whole; stacked in 1; and one not stacked.
SHAPES = [(8, 3), (6, 4), (6, 5), (4, 8), (8, 3)]
ROWS = [
    {0: (0, 2), 1: (2, 3), 2: (3, 7), 3: (7, 8)},
    {0: (0, 3), 2: (3, 4), 3: (4, 6)},
    {1: (0, 1), 2: (1, 6)},
    {0: (4, 8), 3: (0, 4)},
]


def test_each_stage_gets_its_rows_and_sums_of_them_come_back():
    entries = [(p, None) for p in range(len(SHAPES))]
    read_by = [[] for _ in range(S)]
    for p, own in enumerate(ROWS):
        for stage, (start, stop) in own.items():
            read_by[stage].append(len(entries))
            entries.append((p, (1 if p == 3 else 0, start, stop)))
    specs = storage_specs(SHAPES, [P()] * len(SHAPES), {}, S)
    assert specs[:3] == [P("stage"), P(None, "stage"), P()]
    slots = make_slots(SHAPES, ["float32"] * len(SHAPES), read_by, specs, entries=entries)
    stacked = [slot for slot in slots.slots if slot.stack is not None]
    assert [slot.shape for slot in stacked] == [(4, 3), (3, 4), (4, 4), (5, 5)]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype(np.float32) for s in SHAPES]
    mesh = models.mesh(stage=S)

    def on_stages(run, ins, outs):
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))

    stored = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]

    def fill(*stored):
        return [x[None] for x in slots.fill(stored)]

    filled = on_stages(fill, tuple(specs), [P("stage")] * len(slots.slots))(*stored)
    sums = [np.zeros(x.shape, np.float32) for x in filled]
    wanted = [np.zeros_like(x) for x in arrays]
    for stage, held in enumerate(slots.of):
        for entry, i in held.items():
            p, taken = entries[entry]
            index = [slice(None)] * 2
            if taken is not None:
                index[taken[0]] = slice(*taken[1:])
            part = arrays[p][tuple(index)]
            place = (stage, *map(slice, part.shape))
            assert np.array_equal(np.asarray(filled[i])[place], part)
            sums[i][place] = (stage + 1) * part
            wanted[p][tuple(index)] += (stage + 1) * part

    def collect(*sums):
        return [parts[0] for parts in slots.collect([[x[0]] for x in sums], [])[0]]

    placed = [jax.device_put(x, NamedSharding(mesh, P("stage"))) for x in sums]
    collected = on_stages(collect, (P("stage"),) * len(sums), list(specs))(*placed)
    for a, b in zip(collected, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# -- programs and training ---------------------------------------------------------------------


def stacked_run(params, aux, key, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), batch, params)
    return x.sum(), jnp.stack([x.sum(), 1.0]), aux


def stacked_params(layers):
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(layers, WIDTH, WIDTH)).astype(np.float32) * 0.3,
        "b": np.zeros((layers, WIDTH), np.float32),
    }


def test_a_stage_holds_its_rows_only_and_like_stages_are_one_program():
    batch = np.ones((2, WIDTH), np.float32)
    made = lowering.programs(stacked_run, stacked_params(8), batch, stages={"num": 4})
    [pipeline] = made.runners
    assert {slot.shape for slot in pipeline.spec.slots.slots} == {(2, WIDTH, WIDTH), (2, WIDTH)}
    assert len(set(pipeline.program.programs[1:3])) == 1
    # A row has one reader, so exact sums have as much room as without stages.
    alone = lowering.programs(stacked_run, stacked_params(8), batch)
    assert made.contribution == alone.contribution


@functools.cache
def whole(layers=LAYERS, batch_size=8):
    return train(LinenNet(layers=layers), batch_size=batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "stages"),
    [({"dropout": 0.1}, (2, 1)), ({"axis": 1, "reverse": True, "remat": True}, (1, 1, 2))],
)
def test_stages_between_iterations_train_as_the_whole(how, stages):
    same(train(LinenNet(**how), stages), train(LinenNet(**how)))


@pytest.mark.slow
def test_nnx_is_cut_and_a_checkpoint_of_stacked_arrays_resumes_in_another_cut(tmp_path):
    whole = train(NnxNet())
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    train(NnxNet(), (1, 2), steps=2, **options)
    resumed = train(NnxNet(), (1, 1, 1), **options)
    assert [s.step for s in resumed.history.steps] == [3]
    same(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (2, {"pipeline": {"schedule": "interleaved", "num_chunks": 2}}),
        (2, {"pipeline": {"schedule": "zb-h1"}}),
        (3, {"memory": {"recompute": "boundaries"}}),
    ],
)
def test_schedules_run_ranges_of_iterations(stages, settings):
    config = {"cluster": {"visible_devices": list(range(stages))}, **settings}
    same(train(LinenNet(), stages, config=config), whole())


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(3, 1), (1, 1, 2, 1), (2, *(1,) * 7)])
def test_24_layers_in_2_to_8_stages_train_as_the_whole(stages):
    made = train(LinenNet(layers=24), stages, batch_size=16)
    same(made, whole(24, 16))
    shares = [s.part for s in made.plan.pipeline.segments]
    if len(set(stages)) > 1:
        assert len({shares.count(p) for p in set(shares)}) > 1


@pytest.mark.slow
def test_stages_of_two_devices_split_their_iterations():
    net = models.SplitLayers(LAYERS, VOCABULARY)
    options = {"loss": models.token_loss}
    made = train(net, num=4, mesh={"data": 1, "stage": 2, "tensor": 2}, **options)
    same(made, train(net, **options))
    cut = {p.name: p.spec for p in made.plan.parameters if "layers/Dense" in p.name}
    assert any("tensor" in names for spec in cut.values() for names in spec)
    assert any("layers[" in s.name for s in made.plan.pipeline.segments)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenLayer()((x, jnp.zeros(len(x))), 0.0)[0][0]


class Blocks(nn.Module):
    """A scan over blocks of layers, a scan in each, with a checkpoint around each block."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = nn.remat_scan(Block, lengths=(3, 2))(name="blocks")(x)
        return nn.Dense(VOCABULARY)(x), 0.0


@pytest.mark.slow
def test_scans_in_a_scan_are_cut_between_the_iterations_of_the_outer_one():
    made = train(Blocks(), (1, 2))
    same(made, train(Blocks()))
    text = made.plan.explain()
    assert "stage 1: blocks/" in text
    assert "inside a scan over layers: stages are cut between the iterations of the outer" in text


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_names_the_iterations_and_can_be_edited_to_cut_anywhere():
    plan = job(LinenNet()).plan(lowering.cpus(2), stages=(1, 1), microbatch_size=2)
    text = plan.explain()
    assert "stage 0: Embed_0 .. layers[2]" in text
    assert "stage 1: layers[3] .. " in text
    moved = tuple(
        s.model_copy(update={"part": 0 if i < 5 else 1})
        for i, s in enumerate(plan.pipeline.segments)
    )
    pipeline = plan.pipeline.model_copy(update={"segments": moved})
    other = plan.replaced(pipeline=pipeline, prediction=None, reasons=())
    assert other.numerics != plan.numerics
    same(run_plan(LinenNet(), other), whole())


def test_a_profile_times_each_iteration_and_measures_like_ones_once():
    model, graph, batch = traced(LinenNet(layers=4))
    graph = graph_of(graph)
    chain = segments(graph, 32)
    names = [s.name for s in chain]
    shapes, _ = jax.eval_shape(model.initialise, *model.init_arguments)
    first = chain[: names.index("layers[2]") + 1]
    times = measure(
        graph,
        first,
        params=shapes,
        aux=model.aux,
        batch=batch,
        device=jax.devices()[0],
        options=QUICKLY_COMPILED,
    )
    of = dict(zip(names, times, strict=False))
    assert len(times) == len(first)
    assert of["layers[1]"] is of["layers[2]"]  # one program, timed once
    assert of["layers[1]"].forward > 0
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}))
    assert sum(s.parameter_bytes for s in sizes) == sum(4 * x.size for x in jax.tree.leaves(shapes))

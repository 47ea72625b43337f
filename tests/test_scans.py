"""Scans over layers, cut between their iterations: graphs, slots, training, checkpoints."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import lowering
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from hxla._graph._parts import graph_at, graph_of
from hxla._graph._segments import run_segment, segments
from hxla._graph._trace import trace_functional
from hxla._lower._slots import make_slots
from hxla._model._functional import functional
from hxla._plan._stage_storage import storage_specs
from hxla._planner._axes import shard_graph
from hxla._profile._segment_times import layer_sizes, measure

LAYERS, WIDTH, LENGTH, VOCABULARY = 6, 16, 8, 32


class LinenLayer(nn.Module):
    """Carries two arrays, reads its depth beside its parameters, puts out a mean."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, carry, depth):
        x, total = carry
        y = nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        y = nn.Dropout(self.dropout, deterministic=False)(y)
        return (x + y / (1 + depth), total + y.sum((1, 2))), y.mean()


class LinenNet(nn.Module):
    layers: int = LAYERS
    dropout: float = 0.0
    remat: bool = False
    axis: int = 0
    reverse: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        scan = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
            reverse=self.reverse,
        )
        depths = jnp.arange(self.layers, dtype=jnp.float32)
        (x, total), means = scan(self.dropout, name="layers")((x, jnp.zeros(len(x))), depths)
        weight = self.param("weight", nn.initializers.ones, (self.layers,))
        return nn.Dense(VOCABULARY)(x), total * 1e-3 + (means * weight).sum()


def loss(model, batch):
    logits, extra = model(batch["tokens"][:, :-1])
    own = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return own.mean(1) + extra**2


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.gelu(self.up(x))))


class NnxNet(nnx.Module):
    def __init__(self, layers=LAYERS):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NnxLayer(rngs)

        rngs = nnx.Rngs(0, dropout=1)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(tokens), self.layers)), 0.0


def data(num=16):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, VOCABULARY, (num, LENGTH + 1)).astype(np.int32)}


def run_plan(model, plan):
    options = {"plan": plan, "counts": None, "microbatch_size": None}
    return train(model, None, len(plan.devices), **options)


def train(model, stages=None, num=None, *, steps=3, batch_size=8, **options):
    num = num or (stages if isinstance(stages, int) else len(stages or [1]))
    config = {"cluster": {"visible_devices": list(range(num))}} | options.pop("config", {})
    arguments = {
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "batch_size": batch_size,
        "microbatch_size": 2,
        "steps": steps,
        "stages": stages,
        "counts": "even",
        "shuffle": False,
        "config": config,
    }
    return hxla.train(model, data(3 * batch_size), loss, **(arguments | options))


def same(ours, theirs):
    own, other = ({s.step: s.loss for s in r.history.steps} for r in (ours, theirs))
    common = sorted(set(own) & set(other))
    assert common
    np.testing.assert_allclose([own[s] for s in common], [other[s] for s in common], rtol=2e-6)
    assert jax.tree.structure(ours.state) == jax.tree.structure(theirs.state)
    for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(theirs.state), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1.0, np.abs(b).max()))


def traced(model, own_loss=loss, num=2):
    batch = data(num)
    made = lowering.with_arrays(
        functional(model, own_loss, own_loss, variables=None, seed=0, example=batch)
    )
    return made, trace_functional(made, batch), batch


def ranges(graph):
    return [op.iterations for op in graph.ops if op.kind == "scan"]


# -- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"axis": 1}, {"reverse": True, "remat": True}])
def test_a_chain_of_iterations_gives_the_loss_and_gradients_of_the_scan(how):
    model, graph, batch = traced(LinenNet(**how))
    opened = graph_of(graph)
    assert ranges(opened) == [(i, i + 1) for i in range(LAYERS)]
    chain = segments(opened, 32)
    assert [f"layers[{i}]" in {s.name for s in chain} for i in range(1, LAYERS)] == [True] * 5
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

    value, grads = jax.jit(jax.value_and_grad(of_chain))(model.params)
    expected, wanted = jax.jit(jax.value_and_grad(of_whole))(model.params)
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
    rows = {v.rows for v in ranged.values if v.rows is not None}
    assert rows == {(0, 0, 2), (0, 2, 5), (0, 5, 6)}
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
            p, rows = entries[entry]
            index = [slice(None)] * 2
            if rows is not None:
                index[rows[0]] = slice(*rows[1:])
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


@pytest.mark.parametrize(
    ("how", "stages"),
    [({"dropout": 0.1}, (2, 1)), ({"axis": 1, "reverse": True, "remat": True}, (1, 1, 2))],
)
def test_stages_between_iterations_train_as_the_whole(how, stages):
    same(train(LinenNet(**how), stages), train(LinenNet(**how)))


def test_nnx_is_cut_and_a_checkpoint_of_stacked_arrays_resumes_in_another_cut(tmp_path):
    whole = train(NnxNet())
    same(train(NnxNet(), (1, 2)), whole)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    train(NnxNet(), (1, 2), steps=2, **options)
    resumed = train(NnxNet(), (1, 1, 1), **options)
    assert [s.step for s in resumed.history.steps] == [2]
    same(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "pipeline"),
    [
        (2, {"schedule": "interleaved", "num_chunks": 2}),
        (2, {"schedule": "zb-h1"}),
        (3, {"recompute": True}),
    ],
)
def test_schedules_run_ranges_of_iterations(stages, pipeline):
    config = {"cluster": {"visible_devices": list(range(stages))}, "pipeline": pipeline}
    same(train(LinenNet(), stages, config=config), train(LinenNet()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [(1,) * 2, (3, 1), (1,) * 3, (1, 2, 3), (1,) * 4, (1, 1, 2, 1), (1,) * 8, (2, *(1,) * 7)],
)
def test_24_layers_in_2_to_8_stages_train_as_the_whole(stages):
    made = train(LinenNet(layers=24), stages, batch_size=16)
    same(made, train(LinenNet(layers=24), batch_size=16))
    shares = [s.part for s in made.plan.pipeline.segments]
    if len(set(stages)) > 1:
        assert len({shares.count(p) for p in set(shares)}) > 1


class SplitNet(nn.Module):
    """Layers in a scan, each with a split inside."""

    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                with hxla.split():
                    y = nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(x)))
                return x + y, None

        scan = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        return nn.Dense(VOCABULARY)(scan(name="layers")(x, None)[0]), 0.0


@pytest.mark.slow
def test_stages_of_two_devices_split_their_iterations():
    made = train(SplitNet(), num=4, mesh={"data": 1, "stage": 2, "tensor": 2})
    same(made, train(SplitNet()))
    cut = {p.name: p.spec for p in made.plan.parameters if "layers/Dense" in p.name}
    assert any("tensor" in names for spec in cut.values() for names in spec)
    assert any("layers[" in s.name for s in made.plan.pipeline.segments)


# -- plans and refusals ------------------------------------------------------------------------


def job(model):
    return hxla.Job(model, data(24), loss, optax.sgd(0.1), batch_size=8)


def test_the_plan_names_the_iterations_and_can_be_edited_to_cut_anywhere():
    plan = job(LinenNet()).plan(lowering.cpus(2), stages=(1, 1), microbatch_size=2)
    text = plan.explain()
    assert "stage 0: LinenNet/Embed_0 .. layers[0:3]" in text
    assert "stage 1: layers[3:6] .. " in text
    moved = tuple(
        s.model_copy(update={"part": 0 if i < 5 else 1})
        for i, s in enumerate(plan.pipeline.segments)
    )
    pipeline = plan.pipeline.model_copy(update={"segments": moved})
    other = plan.replaced(pipeline=pipeline, prediction=None, reasons=())
    assert other.numerics != plan.numerics
    same(run_plan(LinenNet(), other), train(LinenNet()))


def test_a_profile_times_each_iteration_and_measures_like_ones_once():
    graph_job = job(LinenNet(layers=4))
    graph = graph_of(graph_job._traced.graph(2))
    chain = segments(graph, 32)
    model = graph_job._traced.functional(2)
    times = measure(
        graph,
        chain,
        params=model.params,
        aux=model.aux,
        batch=data(2),
        device=jax.devices()[0],
        options={},
    )
    of = dict(zip([s.name for s in chain], times, strict=True))
    assert of["layers[1]"] is of["layers[2]"]  # one program, timed once
    assert of["layers[1]"].forward > 0
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}))
    own = [s.parameter_bytes for s, c in zip(sizes, chain, strict=True) if c.name in of]
    assert sum(own) == sum(4 * x.size for x in jax.tree.leaves(model.params))


def stacked_spec(plan, name, spec):
    layouts = tuple(
        p.model_copy(update={"spec": spec}) if p.name == name else p for p in plan.parameters
    )
    return plan.replaced(parameters=layouts, prediction=None)


class Ensemble(nn.Module):
    """Iterations that hand nothing on are no layers; nor are those inside a remat around all."""

    inside: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        w = self.param("w", nn.initializers.normal(0.1), (LAYERS, WIDTH, VOCABULARY))
        if self.inside:
            v = self.param("v", nn.initializers.normal(0.1), (LAYERS, WIDTH, WIDTH))
            step = lambda x, v: (jnp.tanh(x @ v), None)  # noqa: E731
            x = jax.checkpoint(lambda x, v: jax.lax.scan(step, x, v)[0])(x, v)
        return jax.lax.map(lambda w: x @ w, w).mean(0), 0.0


def test_what_cannot_be_cut_between_iterations_is_refused_with_its_reason():
    with pytest.raises(hxla.PlanError, match=r"parts that can be told apart.* use at most"):
        job(LinenNet(layers=2)).plan(lowering.cpus(16), stages=(1,) * 16, microbatch_size=1)
    with pytest.raises(hxla.PlanError, match=r"a scan, .*, is one: it hands nothing from"):
        job(Ensemble(inside=False)).plan(lowering.cpus(8), stages=(1,) * 8, microbatch_size=2)
    with pytest.raises(hxla.PlanError, match=r"stays whole inside a checkpoint: put.*too few"):
        job(Ensemble(inside=True)).plan(lowering.cpus(8), stages=(1,) * 8, microbatch_size=2)
    plan = job(SplitNet()).plan(
        lowering.cpus(4), mesh={"data": 1, "stage": 2, "tensor": 2}, microbatch_size=2
    )
    name = "layers/Dense_0/kernel"
    wrong = stacked_spec(plan, name, (("tensor",), ("stage",), ()))
    with pytest.raises(hxla.PlanError, match=rf"{name}.spec: 'tensor' cuts dimension 0.*stacked"):
        run_plan(SplitNet(), wrong)
    plan = job(LinenNet()).plan(lowering.cpus(2), stages=(1, 1), microbatch_size=2)
    with pytest.raises(hxla.PlanError, match=r"parameters.layers/Dense_0/bias"):
        run_plan(LinenNet(layers=8), plan)
    gone = plan.pipeline.segments[-1].model_copy(update={"first": 99})
    segments = (*plan.pipeline.segments[:-1], gone)
    wrong = plan.replaced(pipeline=plan.pipeline.model_copy(update={"segments": segments}))
    with pytest.raises(hxla.PlanError, match="the loss has no equation 99"):
        run_plan(LinenNet(), wrong)
    first = plan.pipeline.segments[1].model_copy(update={"first": 0})
    segments = (plan.pipeline.segments[0], first, *plan.pipeline.segments[2:])
    twice = plan.pipeline.model_copy(update={"segments": segments})
    with pytest.raises(hxla.PlanError, match="must grow from 0"):
        plan.replaced(pipeline=twice)

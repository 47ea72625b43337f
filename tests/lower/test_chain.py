"""A microbatch as a chain of segments: the same gradients, and what is recomputed moves no bit."""

import functools
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import random_plans
from support.blocks import BATCH, WIDTH, Layers, Scanned, data, job, loss, planned, trained
from support.inside.choose import costs_of
from support.inside.graph import chain_ops, crossing_bytes, graph_of, layer_points, segments_at
from support.inside.lower import ChainRunner
from support.inside.schedule import replay_sequence, sequence_from_texts
from support.tiers import examples, rows


def with_recompute(word, **others):
    return {"memory": {"recompute": word, **others}}


#: To less than the gradient of any microbatch.
CLIPPED = {"communication": {"clip_norm": 0.05, "clip": "before"}}


@functools.cache
def chained(word, num=None, model="layers", *, clips=False):
    """A job whose microbatches are chains of so many segments, and its plan."""
    own = job(MODELS[model], with_recompute(word, segments=num) | (CLIPPED if clips else {}))
    return own, planned(own)


class SmallBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.dense(x)))


class Small(Layers):
    """Two layers with dropout, of which a recomputation needs the bits again."""

    def __init__(self, rngs):
        super().__init__(rngs, 0)
        self.blocks = nnx.List([SmallBlock(rngs) for _ in range(2)])


# -- right ---------------------------------------------------------------------------------------

MODELS = {
    "small": Small,
    "layers": Layers,
    "scanned": Scanned,
}
#: With the number of segments, or as many as there are layers, and whether each microbatch's
#: gradient is clipped.
CHAINS = [("small", None, False), ("small", None, True), ("layers", None, False)]
CHAINS += [("layers", None, True), ("layers", 1, False), ("scanned", None, False)]
CHAINS += [("scanned", None, True)]


@pytest.mark.parametrize("case", rows(CHAINS, CHAINS[1]))
def test_a_chain_trains_as_one_program_does(case):
    name, num, clips = case
    usual = trained(job(MODELS[name], CLIPPED if clips else None))
    own = trained(*chained("boundaries", num, name, clips=clips))
    np.testing.assert_allclose(own[0], usual[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(own[1]), jax.tree.leaves(usual[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clips", rows([False, True], True))
@pytest.mark.parametrize("name", rows(MODELS, "small"))
def test_what_is_recomputed_moves_no_bit(name, clips):
    found = {}
    for word in ("none", "boundaries"):
        own, plan = chained(word, model=name, clips=clips)
        found[word] = plan.numerics, trained(own, plan)[2]
    assert found["none"] == found["boundaries"]
    rng = random.Random(1)
    for _ in range(examples(1, 3)):
        sequence = random_plans.draw_sequence(rng, 0, len(plan.chain.segments) - 1)
        drawn = plan.replaced(chain=plan.chain.model_copy(update={"sequence": sequence}))
        assert drawn.numerics == plan.numerics
        assert trained(own, drawn)[2] == found["none"][1], sequence


def test_numerics_know_the_cuts_and_not_the_sequence():
    plans = [chained(*own)[1] for own in (("none",), ("boundaries",), ("none", 3))]
    assert plans[0].numerics == plans[1].numerics != plans[2].numerics
    assert planned(job()).numerics not in {p.numerics for p in plans}
    assert "4 forwards" not in plans[0].explain()
    assert "6 segments: 5 forwards are recomputed" in plans[1].explain()
    assert hxla.Plan.from_json(plans[1].to_json()) == plans[1]


# -- cuts ----------------------------------------------------------------------------------------


#: Embedding and loss are three programs, with three small ones. Layers share two; those of a scan
#: are of three kinds, for only those in the middle are told where they are and tell the next.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "programs"), [(Layers, 3 + 3 + 2), (Scanned, 3 + 3 + 6)])
@pytest.mark.parametrize("num", [3, 6])
def test_equal_layers_share_their_programs(model, programs, num):
    own = hxla.Job(
        lambda: model(nnx.Rngs(0), num),
        data(),
        loss,
        optax.sgd(0.5),
        batch_size=BATCH,
        config=with_recompute("none"),
    )
    plan = planned(own)
    assert len(plan.chain.segments) == num + 2
    with own.open(plan, steps=1) as session:
        [chain] = session._programs.runners
        assert isinstance(chain, ChainRunner)
        assert len(chain.names) == programs


def test_a_loss_that_does_not_repeat_is_cut_by_work():
    class Unlike(nnx.Module):
        def __init__(self, rngs):
            widths = (7, 64, 32, 48, 11)
            self.layers = nnx.List(
                [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    batch = {"x": jax.ShapeDtypeStruct((2, 7), jnp.float32)}
    graph = hxla.trace(lambda: Unlike(nnx.Rngs(0)), lambda m, b: m(b["x"]).sum(-1), batch)
    points = layer_points(graph_of(graph))
    assert 2 <= len(points) <= 7
    assert all(segment.ops for segment in segments_at(graph_of(graph), points))


def test_layers_are_cut_alike_where_the_fewest_bytes_cross():
    graph = graph_of(chained("none")[0].graph(2))
    whole, halves = layer_points(graph), layer_points(graph, 10)
    inside = sorted({*halves} - {*whole})
    assert {*whole} < {*halves}
    assert len(inside) == 4
    starts = [max(p for p in whole if p < cut) for cut in inside]
    assert len({cut - start for cut, start in zip(inside, starts, strict=True)}) == 1
    crossing = crossing_bytes(graph, chain_ops(graph))
    assert all(crossing[cut] <= min(crossing[cut - 1 : cut + 2]) for cut in inside)


# -- memory --------------------------------------------------------------------------------------


def watched(own, plan):
    """The most bytes of live arrays, beside those between steps, after any program of a step."""
    with own.open(plan, steps=2) as session:
        steps = iter(session)
        next(steps)
        [chain] = session._programs.runners
        most = 0

        def watch(program):
            def run(*arguments):
                nonlocal most
                made = program(*arguments)
                most = max(most, sum(x.nbytes for x in jax.live_arrays()))
                return made

            return run

        at_rest = sum(x.nbytes for x in jax.live_arrays())
        for programs in chain._programs._compiled.values():
            for name in programs:
                programs[name] = watch(programs[name])
        next(steps)
        scalars = 64  # bytes, of an update that a thread still waits for
        assert sum(x.nbytes for x in jax.live_arrays()) <= at_rest + scalars
        return most - at_rest


@pytest.mark.slow
def test_memory_falls_as_the_replay_says():
    class Wide(Layers):
        def __call__(self, tokens):
            return super().__call__(jnp.tile(tokens, (1, 40)))

    def of_wide(model, batch):
        logits = model(batch["tokens"])
        return logits.mean((-1, -2))

    def wide(word):
        return hxla.Job(
            lambda: Wide(nnx.Rngs(0), 8),
            data(),
            of_wide,
            optax.sgd(0.5),
            batch_size=BATCH,
            config=with_recompute(word),
        )

    found = {}
    for word in ("none", "boundaries"):
        own = wide(word)
        plan = planned(own, BATCH)
        num = len(plan.chain.segments)
        costs, _ = costs_of(own.graph(BATCH), plan.chain.points, range(100))
        sequence = sequence_from_texts(num, plan.chain.sequence)
        found[word] = watched(own, plan), replay_sequence(sequence, costs)
    # What a program needs while it runs is gone after it, so less lives between programs.
    for live, replay in found.values():
        assert live <= replay.peak_bytes
    saved = found["none"][0] - found["boundaries"][0]
    expected = found["none"][1].peak_bytes - found["boundaries"][1].peak_bytes
    assert saved == pytest.approx(expected, rel=0.15)
    assert found["boundaries"][0] < 0.5 * found["none"][0]


def test_auto_recomputes_what_the_memory_asks_for():
    own, plan = chained("none")
    graph, chain = own.graph(2), plan.chain
    costs, _ = costs_of(graph, chain.points, range(100))
    num = len(costs)
    keeps_all = sequence_from_texts(num, chain.sequence)
    most = replay_sequence(keeps_all, costs).peak_bytes
    state = sum(graph.values[v].num_bytes for v in graph.param_values) * 3
    again, auto = [], job(config=with_recompute("auto"))
    for share in (1.0, 0.75, 0.6):
        memory = state + int(share * most) + 2048
        cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", memory_bytes=memory),))
        plan = planned(auto, cluster=cluster)
        forwards = [op for op in plan.chain.sequence if op.startswith("F")]
        again.append(len(forwards) - (num - 1))
        replayed = replay_sequence(sequence_from_texts(num, plan.chain.sequence), costs)
        assert replayed.peak_bytes <= memory - state
    assert again[0] == 0 < again[1] <= again[2]


# -- refused -------------------------------------------------------------------------------------


def test_what_cannot_be_a_chain_is_refused():
    def refusal(config, **arguments):
        own = job(config=config)
        with pytest.raises((hxla.PlanError, hxla.ConfigError)) as caught:
            own.open(planned(own, **arguments), steps=1)
        return str(caught.value)

    four = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 4)
    for words, said in (
        (refusal({"memory": {"segments": 3}}), "memory.segments needs memory.recompute"),
        (refusal({"memory": {"recompute": "some"}}), "memory.recompute"),
        (refusal(with_recompute("none", segments=0)), "memory.segments"),
        (refusal(with_recompute("none", segments=2), cluster=four, stages=2), "are the segments"),
        (refusal(with_recompute("auto")), "no device is described with its memory"),
        (
            refusal({"memory": {"zero": 2}} | CLIPPED, cluster=four),
            "needs the whole gradient of a microbatch: use 0 or 1, or clip='after'",
        ),
        (
            refusal(
                with_recompute("auto"),
                cluster=hxla.Cluster(
                    name="", devices=(hxla.Device(kind="cpu", memory_bytes=20_000),)
                ),
            ),
            "a microbatch does not fit beside the state",
        ),
    ):
        assert said in words, words


@pytest.mark.slow
def test_segments_begin_where_the_paths_of_modules_say():
    config = with_recompute("boundaries", segments=["blocks/[13]", "blocks/2"])
    plan = planned(job(config=config))
    names = [segment.name for segment in plan.chain.segments]
    assert len(names) == 3, names  # before them is with the first, what follows with the last
    whole = planned(job(config=with_recompute("boundaries")))
    assert {s.first for s in plan.chain.segments} <= {s.first for s in whole.chain.segments} | {0}
    by_layer, by_module = (trained(job(config=config), own)[0] for own in (whole, plan))
    np.testing.assert_allclose(by_layer, by_module, rtol=1e-5)
    with pytest.raises(
        hxla.PlanError, match=r"'block/.\*' matches the path of no module.*blocks/0"
    ):
        planned(job(config=with_recompute("boundaries", segments=["block/.*"])))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sequence": ("F0:cut", "B0:cut")}, "backward"),
        ({"sequence": ("F0:cut", "F9:cut")}, "F9:cut"),
        ({"sequence": ()}, "never runs"),
        ({"sequence": ("F0:dots",)}, "residuals 'dots'"),
        ({"segments": ()}, "segments"),
    ],
)
def test_a_broken_chain_in_a_plan_is_refused(change, said):
    _, plan = chained("none", 3)
    fields = plan.model_dump()
    fields["chain"] |= change
    with pytest.raises(hxla.PlanError, match=re.escape(said)):
        hxla.Plan.checked(fields)


def test_the_last_segment_has_no_forward_of_its_own():
    _, plan = chained("none", 3)
    last = len(plan.chain.segments) - 1
    sequence = list(plan.chain.sequence)
    sequence.insert(sequence.index(f"B{last}:input"), f"F{last}+")
    with pytest.raises(hxla.PlanError, match="whose forward and backward are one program"):
        plan.replaced(chain=plan.chain.model_copy(update={"sequence": tuple(sequence)}))


def test_a_chain_of_another_loss_is_refused():
    own, plan = chained("none")
    last = plan.chain.segments[-1].model_copy(update={"first": 10_000})
    segments = (*plan.chain.segments[:-1], last)
    other = plan.replaced(chain=plan.chain.model_copy(update={"segments": segments}))
    with pytest.raises(hxla.PlanError, match="the loss has no equation 10000"):
        own.open(other, steps=1)

"""The choice of sharding patterns equals exhaustive enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl

import hxla
from hxla import PATTERNS, Factor
from support.inside.graph import fits, leaves, trace_sums
from support.inside.plan import ChoiceNode as Node
from support.inside.plan import Edge, Problem, _assignment_problem, assign, cost, least_cost, solve


def random_problem(rng):
    """A few nodes with random states and costs, each reading some of those before it."""
    n = int(rng.choice([2, 4, 8]))
    nodes, edges = [], []
    for i in range(int(rng.integers(3, 8))):
        sources = [int(s) for s in rng.permutation(i)[: rng.integers(0, 3)]]
        choices = []
        for _ in range(int(rng.integers(1, 4))):
            reads = tuple(_state(rng) for _ in sources)
            choices.append((reads, (_state(rng),), float(rng.integers(0, 50))))
        nodes.append(Node(choices=tuple(choices)))
        for k, source in enumerate(sources):
            edges.append(
                Edge(
                    source=source,
                    result=0,
                    target=i,
                    operand=k,
                    num_bytes=float(rng.integers(1, 100)),
                    differentiable=bool(rng.integers(2)),
                    free=bool(rng.random() < 0.1),
                )
            )
    return Problem(num_devices=n, nodes=tuple(nodes), edges=tuple(edges))


def _state(rng):
    return [None, 0, 1][int(rng.integers(3))]


FRACTIONS = (217, 1271)  # whose linear programme has them


def test_the_choice_is_that_of_exhaustive_enumeration():
    for seed in (*range(60), *FRACTIONS):
        problem = random_problem(np.random.default_rng(seed))
        ranges = [range(len(node.choices)) for node in problem.nodes]
        best = min(cost(problem, c) for c in itertools.product(*ranges))
        assert cost(problem, solve(problem)) == pytest.approx(best, rel=1e-12), seed
        by_programme = _assignment_problem._integer_solution(problem)
        assert cost(problem, by_programme) == pytest.approx(best), seed


def test_equations_that_read_all_others_are_solved_as_a_programme():
    """A table of all states of a dozen nodes would have 244 million entries."""
    rng = np.random.default_rng(2)
    states = [None, 0, 1, 2, 3]
    nodes = [
        Node(choices=tuple(((s,) * i, (s,), float(rng.integers(50))) for s in states))
        for i in range(12)
    ]
    edges = [
        Edge(source=k, result=0, target=i, operand=k, num_bytes=float(b), differentiable=True)
        for i in range(12)
        for k, b in enumerate(rng.integers(1, 9, i))
    ]
    problem = Problem(num_devices=4, nodes=tuple(nodes), edges=tuple(edges))
    tables = _assignment_problem._cost_tables(problem)
    assert least_cost([5] * 12, tables, _assignment_problem._MOST_ENTRIES) is None
    found = cost(problem, solve(problem))
    assert found <= min(cost(problem, [c] * 12) for c in range(5))
    assert found <= min(cost(problem, c) for c in rng.integers(5, size=(300, 12)))


def assigned(run, params, x, n=4):
    def sums(params, aux, key, batch):
        value = run(params, batch)
        return value, jnp.stack([value, value]), aux

    graph = trace_sums(sums, params, {}, x)
    return graph, assign(graph, ["split"] * len(graph.task_graphs), n)


def test_a_pair_of_dense_layers_is_cut_by_columns_then_rows():
    shapes = {
        "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def run(params, x):
        return (jax.nn.gelu(x @ params["up"]) @ params["down"]).sum()

    graph, choice = assigned(run, shapes, x)
    cut = {n: choice.made[v] for n, v in zip(graph.param_names, graph.param_values, strict=True)}
    assert cut == {"up": 1, "down": 0}


def test_every_factor_leaves_the_result_unchanged():
    """Cutting by hand along each factor and joining the parts gives the whole result."""
    rng = np.random.default_rng(0)

    def check(function, *arrays):
        (eqn,) = jax.make_jaxpr(function)(*arrays).eqns
        whole = np.asarray(function(*arrays))
        shapes, outs = [a.shape for a in arrays], [whole.shape]
        found = PATTERNS.factors(eqn.primitive.name, shapes, outs, eqn.params)
        tried = [f for f in found if fits(f, shapes, outs, 2)]
        assert tried, eqn
        cuts = [
            [
                a if d is None else np.split(a, 2, axis=d)[half]
                for a, d in zip(arrays, f.operands, strict=True)
            ]
            for f in tried
            for half in (0, 1)
        ]
        # One program for all halves of all factors.
        halves = jax.jit(lambda cuts: [function(*cut) for cut in cuts])(cuts)
        for i, f in enumerate(tried):
            parts = [np.asarray(half) for half in halves[2 * i : 2 * i + 2]]
            if f.partial:
                joined = parts[0] + parts[1]
                if eqn.primitive.name == "reduce_max":
                    joined = np.maximum(*parts)
            else:
                joined = np.concatenate(parts, axis=f.results[0])
            np.testing.assert_allclose(joined, whole, rtol=1e-5, atol=1e-6, err_msg=str(f))

    x, y = rng.normal(size=(4, 6, 8)), rng.normal(size=(4, 8, 2))
    check(lambda a, b: jax.lax.batch_matmul(a, b), x, y)
    check(lambda a: jax.lax.transpose(a, (2, 0, 1)), x)
    check(lambda a: jnp.max(a, axis=1), x)
    check(lambda a: jax.lax.reduce_sum(a, (0, 2)), x)
    check(jnp.sin, x)
    check(lambda a: jax.lax.cumsum(a, axis=1), x)
    check(lambda a: jax.lax.sort(a, dimension=2), x)
    image, kernel = rng.normal(size=(4, 8, 8, 6)), rng.normal(size=(3, 3, 6, 4))
    numbers = ("NHWC", "HWIO", "NHWC")
    check(
        lambda a, b: jax.lax.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=numbers),
        image,
        kernel,
    )


def reversed_by_pallas(x):
    def kernel(x, out):
        out[...] = x[...][::-1]

    return pl.pallas_call(kernel, out_shape=x, interpret=True)(x)


def reversed_by_a_callback(x):
    return jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x, vmap_method="sequential")


def solved(x):
    def solve(apply, b):
        return jnp.linalg.solve(x, b)

    return jax.lax.custom_linear_solve(lambda v: x @ v, x, solve)


#: Results have the shape of the operands, and each element depends on others.
WHOLE = {
    "pallas_call": reversed_by_pallas,
    "pure_callback": reversed_by_a_callback,
    "custom_linear_solve": solved,
    "scatter-max": lambda x: x.at[jnp.array([0, 0, 1, 1])].max(x),
    "scatter-mul": lambda x: x.at[jnp.array([0, 0, 1, 1])].mul(x, unique_indices=False),
    "reduce_window": lambda x: jax.lax.reduce_window(
        x, 1.0, lambda a, b: a * b + 0, (3, 1), (1, 1), "SAME"
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_equation_of_unknown_dependences_is_cut_nowhere(name):
    shape = jax.ShapeDtypeStruct((4, 4), "float32")
    [eqn] = [e for e in jax.make_jaxpr(WHOLE[name])(shape).eqns if e.primitive.name == name]
    shapes, outs = [[v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars)]
    assert outs == [shape.shape]
    assert PATTERNS.factors(name, shapes, outs, eqn.params) == []


def test_arrays_that_are_stacked_or_taken_apart_stay_cut():
    """As newer versions of jax write it; the shapes are those of jax's own operations."""
    x, parts = np.zeros((4, 3, 6)), [np.zeros((4, 6))] * 3
    assert [y.shape for y in jnp.unstack(jnp.asarray(x), axis=1)] == [y.shape for y in parts]
    assert jnp.stack(parts, axis=1).shape == x.shape
    apart = PATTERNS.factors("unstack", [x.shape], [y.shape for y in parts], {"axis": 1})
    assert {(f.operands, f.results) for f in apart} == {((0,), (0,) * 3), ((2,), (1,) * 3)}
    joined = PATTERNS.factors("stack", [y.shape for y in parts], [x.shape], {"axis": 1})
    assert {(f.operands, f.results) for f in joined} == {((0,) * 3, (0,)), ((1,) * 3, (2,))}


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ((6, 4), (2, 3, 4), [(0, 0), (1, 2)]),
        ((2, 12), (8, 3), [(0, 0)]),
        ((1, 6, 1, 4), (6, 2, 1, 2), [(1, 0), (3, 1)]),
        ((4, 6), (24,), [(0, 0)]),
    ],
)
def test_a_reshape_is_cut_where_its_dimensions_begin_alike(before, after, pairs):
    found = PATTERNS.factors("reshape", [before], [after], {"dimensions": None})
    assert [(f.operands[0], f.results[0]) for f in found] == pairs


def test_a_users_pattern_takes_the_place_of_the_built_in_one():
    mine = PATTERNS.with_pattern("sin", lambda ins, outs, params: [Factor("mine", (0,), (0,))])
    assert [f.name for f in mine.factors("sin", [(2, 2)], [(2, 2)], {})] == ["mine"]
    assert [f.name for f in PATTERNS.factors("sin", [(2, 2)], [(2, 2)], {})] == ["d0", "d1"]


def test_a_users_pattern_decides_what_may_be_cut():
    """A cumulative sum that a user knows to be independent along its last dimension only."""
    model = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    loss = hxla.split(2)(_scanned)
    batch = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    seen = []

    def pattern(ins, outs, params):
        seen.append(ins[0])
        return [Factor("feature", (1,), (1,))]

    graph = hxla.trace(model, loss, batch, patterns=hxla.PATTERNS.with_pattern("cumsum", pattern))
    scan = next(op for op in leaves(graph.ops) if op.name == "cumsum")
    assert [f.name for f in scan.factors] == ["feature"]
    assert seen == [(4, 8)]
    [kernel] = [p for p in hxla.make_plan(graph, 2).parameters if p.name == "kernel"]
    assert kernel.spec == ((), ("tensor",))


def _scanned(model, batch):
    return jax.lax.cumsum(model(batch["x"]), axis=0).mean(axis=1)

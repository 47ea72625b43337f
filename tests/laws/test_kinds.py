"""What a model may call, in every form of training: as plain JAX trains it, with equal bits.

A row trains four kinds of `support/kinds`, one after another in one model. If it fails, each of
them is trained alone, and those at fault are named.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import kinds, models, zoo
from support.tiers import rows
from support.training import train_with

STEPS, BATCH, MICROBATCH, SEED = 2, 8, 2, 3
MOST_BF16 = 0.05  # relative error of a loss with `precision="bf16"`

_RNG = np.random.default_rng(0)
_SHAPE = 2 * BATCH, kinds.LENGTH, kinds.WIDTH
DATA = {
    "x": _RNG.normal(size=_SHAPE).astype(np.float32),
    "y": _RNG.normal(size=_SHAPE).astype(np.float32),
    "labels": _RNG.integers(0, kinds.WIDTH, _SHAPE[:2]).astype(np.int32),
}

#: The outer layers are sharded in the dimension that the kinds work on.
COLUMNS = hxla.RuleSet(
    name="columns",
    rules=(hxla.Rule(path="(first|last)/kernel", axes=((), ("tensor",)), rank=2),),
)
ONE = {"mesh": {"data": 1}}
TWO = {"mesh": {"data": 2}, "counts": (3, 1)}
ZERO = {"config": {"memory": {"zero": 2}}}
BESIDE = {
    "stages": [[{"devices": 1}], [{"devices": 1}, {"devices": 1}]],
    "config": {"cluster": {"visible_devices": [0, 1, 2]}},
}
SHARDED = {"rules": COLUMNS, "config": {"cluster": {"visible_devices": [0, 1, 2, 3]}}}
#: `3 + 1` is trained on one device too.
FORMS = {
    "3 + 1": TWO,
    "whole": ONE | {"microbatch_size": BATCH},
    "chain": ONE | {"config": {"memory": {"recompute": "boundaries"}}},
    "stages": {"stages": 2, "config": {"cluster": {"visible_devices": [0, 1]}}},
    "bf16": ONE | {"precision": "bf16"},
    "zero": TWO | ZERO,
    "tensor": {"mesh": {"data": 1, "tensor": 2}, "rules": COLUMNS},
    "unlike replicas": BESIDE | {"counts": (3, 1)},
    "sharded stages": SHARDED | {"stages": [{"tensor": 2}, {"data": 2}]},
    "stages the other way": SHARDED | {"stages": [{"data": 2}, {"tensor": 2}]},
}
#: Forms, and others of the same bits.
TWINS = {"3 + 1": ONE, "zero": TWO | ZERO | {"counts": (2, 2)}}
TWINS["unlike replicas"] = BESIDE | {"counts": (1, 3)}

_FOUR = 4
_NUM = -(-len(kinds.KINDS) // _FOUR)
GROUPS = [tuple(kinds.KINDS)[i::_NUM] for i in range(_NUM)]
TABLE = [(number, form) for number in range(_NUM) for form in FORMS]
#: Forms of unlike programs, with kinds from all over the table.
QUICK = [
    (i * _NUM // len(FORMS), form) for i, form in enumerate(FORMS) if form not in ("3 + 1", "whole")
]


def row_of(names):
    members = [kinds.KINDS[name] for name in names]
    losses = list(dict.fromkeys(kind.loss or kinds.squares for kind in members))

    def loss(model, batch):
        y = model(batch["x"])
        return sum(each(y, batch) for each in losses)

    return zoo.Row(
        make=lambda: kinds.Net(members),
        loss=loss,
        data=DATA,
        optimizer=optax.sgd(0.01),
        axis_name=next(filter(None, (kind.axis_name for kind in members)), ""),
        by_microbatch=any(kind.by_microbatch for kind in members),
    )


@functools.cache
def expected(names, size):
    return zoo.plain(row_of(names), steps=STEPS, batch_size=BATCH, microbatch_size=size)


def train(names, options):
    row, options = row_of(names), dict(options)
    if "mesh" in options:
        options["mesh"] = models.mesh(**options["mesh"])
    return train_with(
        row.make(),
        row.data,
        row.loss,
        row.optimizer,
        **{"microbatch_size": MICROBATCH, "counts": "even"} | options,
        batch_size=BATCH,
        seed=SEED,
        steps=STEPS,
        shuffle=False,
    )


def losses(result):
    return [step.loss for step in result.history.steps]


def changed(start, end):
    leaves, structure = jax.tree.flatten(end)
    pairs = zip(leaves, jax.tree.leaves(start), strict=True)
    return jax.tree.unflatten(structure, [np.asarray(a) - np.asarray(b) for a, b in pairs])


def check(names, form):
    for name in names:
        if words := kinds.KINDS[name].refused.get(form):
            with pytest.raises(hxla.PlanError, match=words):
                train((name,), FORMS[form])
    names = tuple(name for name in names if form not in kinds.KINDS[name].refused)
    if not names:
        return
    result = train(names, FORMS[form])
    values, state = expected(names, FORMS[form].get("microbatch_size", MICROBATCH))
    if form == "bf16":
        np.testing.assert_allclose(losses(result), values, rtol=MOST_BF16)
        return
    most = max(kinds.KINDS[name].most for name in names)
    np.testing.assert_allclose(losses(result), values, rtol=most / 10)
    start = nnx.state(row_of(names).make(), nnx.Not(nnx.RngState))
    worst, path = zoo.error(changed(start, result.state), changed(start, state), floor=0.1)
    assert worst < most, f"the change of {path} differs by {worst}"
    if form in TWINS:
        twin = train(names, TWINS[form])
        assert result.plan.numerics == twin.plan.numerics
        assert (result.sha256, losses(result)) == (twin.sha256, losses(twin))
    if form == "tensor":
        assert any("tensor" in axes for p in result.plan.parameters for axes in p.spec)


@pytest.mark.parametrize("row", rows(TABLE, *QUICK, ids=lambda row: f"{row[0]}-{row[1]}"))
def test_every_kind_trains_as_in_plain_jax_in_every_form(row):
    number, form = row
    try:
        check(GROUPS[number], form)
    except Exception as error:
        raise AssertionError(f"{form}: {blamed(GROUPS[number], form)}") from error


def blamed(names, form):
    """The kinds that fail alone, and how."""
    found = []
    for name in names:
        try:
            check((name,), form)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return "\n".join(found) or f"none fails alone of {', '.join(names)}"

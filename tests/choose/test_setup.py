"""Choices made before the first step: microbatch size, memory limits, counts."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.choose import best_counts, best_size, candidate_sizes
from support.jax_settings import in_force
from support.training import train_with


def fit(optimizer=None, **options):
    arguments = dict(batch_size=24, steps=3, seed=1) | options
    mesh = models.mesh(data=2)
    return train_with(
        models.Dense(nnx.Rngs(0)),
        models.regression(),
        models.squared_error,
        optimizer or optax.adam(1e-2),
        mesh=mesh,
        **arguments,
    )


def test_a_measured_microbatch_size_gives_the_bits_of_naming_it():
    few = {"optimizer": optax.sgd(1e-2), "batch_size": 16, "steps": 2}
    chosen = fit(**few, microbatch_size="measured")
    size = chosen.plan.microbatch_size
    assert size in candidate_sizes(16, 2) == (2, 1)
    named = fit(**few, microbatch_size=size, counts="even")
    assert named.sha256 == chosen.sha256
    assert any(f"microbatch_size={size} chosen" in reason for reason in chosen.plan.reasons)


def planned(batch_size, num_devices, cluster=None, config=None, **wishes):
    job = hxla.Job(
        models.Dense(nnx.Rngs(0)),
        models.regression(),
        models.squared_error,
        optax.sgd(1e-2),
        batch_size=batch_size,
        config={"cluster": {"visible_devices": list(range(num_devices))}} | (config or {}),
    )
    return job.plan(cluster, **wishes)


def test_the_default_size_is_the_same_on_any_number_of_devices():
    for batch in (8, 24, 32, 60, 96):
        fitting = [b for b in range(1, batch + 1) if batch % b == 0 and b * max(b, 8) <= batch]
        for num in (1, 2, 3, 8):
            plan = planned(batch, num)
            assert plan.microbatch_size == max(fitting), (batch, num)
            assert len(plan.replicas) == num
    for batch in (1, 5, 7):
        assert planned(batch, 1).microbatch_size == 1
    assert planned(32, 1).numerics == planned(32, 8).numerics


def test_a_described_cluster_has_the_default_size_of_the_devices_that_are_here():
    cluster = hxla.Cluster(name="two", devices=(hxla.Device(kind="cpu"),) * 2)
    plan = planned(32, 1, cluster, auto=False)
    assert (plan.microbatch_size, len(plan.replicas)) == (planned(32, 2).microbatch_size, 2)


def test_more_devices_than_microbatches_have_smaller_ones_and_it_is_said():
    cluster = hxla.Cluster(name="many", devices=(hxla.Device(kind="cpu"),) * 16)
    assert planned(32, 1).num_microbatches < 16
    plan = planned(32, 1, cluster, auto=False)
    assert plan.num_microbatches == 16
    assert any("too few microbatches for 16" in reason for reason in plan.reasons)
    with pytest.raises(hxla.PlanError, match="16 devices but only 8"):
        planned(8, 1, cluster, auto=False)


def test_the_default_size_is_the_largest_that_fits_the_described_memory():
    # Parameters and sums take 1.3 MiB, the inputs of an example 64 KiB.
    inputs, batch = 1 << 14, 64
    data = {"x": np.zeros((batch, inputs), np.float32), "y": np.zeros((batch, 3), np.float32)}
    model = models.Dense(nnx.Rngs(0), inputs=inputs)
    job = hxla.Job(model, data, models.squared_error, optax.sgd(0.1), batch_size=batch)

    def plan(mebibytes, size=None):
        device = hxla.Device(kind="cpu", memory_bytes=int(mebibytes * 2**20))
        cluster = hxla.Cluster(name="small", devices=(device,) * 2)
        return job.plan(cluster, auto=False, microbatch_size=size)

    assert plan(4).microbatch_size == 8
    small = plan(1.7)
    assert small.microbatch_size == 4
    assert any("microbatch_size=8 left out: a microbatch does not fit" in r for r in small.reasons)
    with pytest.raises(hxla.PlanError, match="does not fit"):
        plan(1.7, 8)


def test_a_size_that_cannot_be_measured_is_refused():
    cluster = hxla.Cluster(name="two", devices=(hxla.Device(kind="cpu"),) * 2)
    for words, options in (
        ("needs devices that are here", {"cluster": cluster, "auto": False}),
        ("num_micro_batch=4 disagree", {"config": {"pipeline": {"num_micro_batch": 4}}}),
        ("follows from its stages", {"stages": 2}),
    ):
        with pytest.raises(hxla.ConfigError, match=words):
            planned(32, 2, **options, microbatch_size="measured")
    with pytest.raises(hxla.ConfigError, match="'fastest': use a number, 'measured' or None"):
        planned(32, 2, microbatch_size="fastest")


def test_the_size_chosen_is_the_best_of_exhaustive_search():
    rng = np.random.default_rng(0)
    for _ in range(50):
        batch = int(rng.choice([24, 32, 60, 96]))
        sizes = [s for s in range(1, batch + 1) if batch % s == 0 and batch // s >= 2]
        measured = {
            s: tuple(float(x) for x in rng.uniform(0.5, 2, 2) * (s + rng.uniform(0, 4)))
            for s in sizes
        }
        steps = {
            s: min(
                max(first * measured[s][0], (batch // s - first) * measured[s][1])
                for first in range(batch // s + 1)
            )
            for s in sizes
        }
        size, predicted = best_size(batch, measured)
        assert steps[size] <= min(steps.values()) * 1.01  # sizes this close count as equal
        assert predicted[size] == pytest.approx(steps[size])


def mesh_file(tmp_path, *gibibytes):
    path = tmp_path / "small.toml"
    devices = "".join(f'[[device]]\nkind = "cpu"\nmemory_gib = {g}\n' for g in gibibytes)
    path.write_text(f'name = "small"\n{devices}')
    return str(path)


def test_a_device_too_small_for_one_microbatch_is_refused_with_the_missing_bytes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HXLA_MESH", mesh_file(tmp_path, 1, 5e-7))
    with pytest.raises(hxla.PlanError, match=r"device 1 .*536 B"):
        fit(microbatch_size=3)


def test_counts_stay_within_memory(tmp_path, monkeypatch):
    # The inputs of a microbatch (64 KiB each) are all that grows with the count.
    data = {"x": np.zeros((64, 1 << 14), np.float32), "y": np.zeros((64, 3), np.float32)}
    mesh = models.mesh(data=2)

    def run():
        return hxla.train(
            hxla.Job(
                models.Dense(nnx.Rngs(0), inputs=1 << 14),
                data,
                models.squared_error,
                optax.sgd(1e-6),
                batch_size=64,
            ),
            microbatch_size=1,
            steps=1,
            mesh=mesh,
        )

    monkeypatch.setenv("HXLA_MESH", mesh_file(tmp_path, 8, 8))
    assert min(run().plan.counts) > 16  # equal devices
    for mebibytes in np.arange(1, 25, 0.5):
        monkeypatch.setenv("HXLA_MESH", mesh_file(tmp_path, 8, mebibytes / 1024))
        try:
            counts = run().plan.counts
        except hxla.PlanError:
            continue
        assert counts[1] <= 16  # two steps of memory above the first that fits none
        assert sum(counts) == 64
        return
    raise AssertionError("no size of memory fitted a few microbatches only")


def test_limits_bind_as_in_exhaustive_search():
    assert best_counts(64, [1.0, 1.0], None, [None, 5]) == (59, 5)
    with pytest.raises(hxla.PlanError):
        best_counts(64, [1.0, 1.0], None, [10, 5])


def automatic(tmp_path, monkeypatch, mebibytes, model=None):
    """Four devices of so much memory; the model's parameters are 1 MiB."""
    monkeypatch.setenv("HXLA_MESH", mesh_file(tmp_path, *[mebibytes / 1024] * 4))
    return hxla.train(
        hxla.Job(
            model or models.Dense(nnx.Rngs(0), inputs=INPUTS, outputs=4),
            {"x": np.zeros((16, INPUTS), np.float32), "y": np.zeros((16, 4), np.float32)},
            models.squared_error,
            optax.adam(1e-3),
            batch_size=4,
            config={"auto": {"auto_parallel": True}, "cluster": {"visible_devices": [0, 1, 2, 3]}},
        ),
        microbatch_size=1,
        steps=1,
    )


# Parameters, gradient, two limbs and two moments: 6 MiB for a copy; a microbatch: 256 KiB.
INPUTS, MOST_COPIES = 1 << 16, {50: 4, 4.5: 2, 3: 1}


def test_a_copy_takes_the_described_devices_that_its_memory_needs():
    model = nnx.eval_shape(lambda: models.Dense(nnx.Rngs(0), inputs=INPUTS, outputs=4))
    data = {
        "x": jax.ShapeDtypeStruct((4, INPUTS), np.float32),
        "y": jax.ShapeDtypeStruct((4, 4), np.float32),
    }
    job = hxla.Job(model, data, models.squared_error, optax.adam(1e-3), batch_size=4)
    link = hxla.Link(bytes_per_second=1e11)
    for mebibytes, most_copies in MOST_COPIES.items():
        device = hxla.Device(
            kind="A",
            memory_bytes=int(mebibytes * 2**20),
            memory_bytes_per_second=1e11,
            rates=(hxla.Rate(dtype="float32", flops_per_second=1e11),),
        )
        nodes = (hxla.Node(name="n", link=link),)
        cluster = hxla.Cluster(name="four", devices=(device,) * 4, nodes=nodes)
        plan = job.plan(cluster, auto=True, microbatch_size=1)
        assert len(plan.counts) <= most_copies, mebibytes
        devices = plan.prediction.devices
        assert all(0 < d.memory_bytes <= d.capacity_bytes for d in devices), mebibytes


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", MOST_COPIES)
def test_a_copy_takes_the_devices_that_its_memory_needs(tmp_path, monkeypatch, mebibytes):
    result = automatic(tmp_path, monkeypatch, mebibytes)
    assert len(result.plan.counts) <= MOST_COPIES[mebibytes]
    assert len(result.plan.devices) == 4
    assert "chosen by search" in result.plan.reasons
    assert all(0 < d.memory_bytes <= d.capacity_bytes for d in result.plan.prediction.devices)


def test_a_model_that_fits_nowhere_is_refused_with_the_missing_bytes(tmp_path, monkeypatch):
    with pytest.raises(hxla.PlanError, match=r"tensor 4: no pipeline fits.*lacks [\d,]+ bytes"):
        automatic(tmp_path, monkeypatch, 0.75)


def test_annotations_leave_nothing_to_choose(tmp_path, monkeypatch):
    class Annotated(models.Dense):
        def __call__(self, x):
            with hxla.split():
                return super().__call__(x)

    model = Annotated(nnx.Rngs(0), inputs=INPUTS, outputs=4)
    with pytest.raises(hxla.ConfigError, match="remove the annotations"):
        automatic(tmp_path, monkeypatch, 50, model)


class Wide(nnx.Module):
    def __init__(self, *dtypes):
        self.parts = nnx.data([nnx.Param(np.ones(3, dtype)) for dtype in dtypes])
        self.kept = nnx.Variable(np.ones(3))

    def __call__(self, x):
        return sum((x * part[...]).real.sum(-1) for part in (*self.parts, self.kept))


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [(["float64", "float32"], "parts/0"), (["complex128"], "parts/0"), (["float32"], None)],
)
def test_parameters_that_are_wider_than_their_sums_are_named(dtypes, told):
    with in_force(jax_enable_x64=True):
        batch = {"x": np.ones((4, 3))}
        graph = hxla.trace(Wide(*dtypes), lambda model, batch: model(batch["x"]), batch)
        said = [line for line in hxla.make_plan(graph, 2).reasons if "float64" in line]
    names = [
        line.partition(": float64, and the gradients are rounded to float32")[0] for line in said
    ]
    assert names == ([] if told is None else [told])

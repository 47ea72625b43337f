"""Bitwise comparison: a planted difference is found, named by scope and line, in three models."""

import functools
import inspect
import json
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla.__main__ import main
from support import families
from support.inside.inspect import compare_bits
from support.inside.session import EquationRuns, _bits_runs
from support.tiers import rows

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("every_program_is_cached")]

ULP = np.float32(1 + 2**-23)  # what is multiplied by it is off by one in the last place


class Small(nnx.Module):
    """A dense layer, a count of calls, and a layer that runs three times, in a scan or not."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.cell = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.scan = jax.lax.scan

    def __call__(self, x):
        with jax.named_scope("dense"):
            x = jax.nn.sigmoid(self.up(x))
        self.calls.set_value(self.calls[...] + 1)
        rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 1, 4)
        return self.scan(lambda h, row: (jnp.tanh(self.cell(h) + row), None), x, rows)[0]


def unrolled(body, carry, rows):
    for row in rows:
        carry, _ = body(carry, row)
    return carry, None


def unroll(model):
    model.scan = unrolled


def job(name, change=lambda model: None):
    if name == "small":
        model = Small(nnx.Rngs(0))
        loss, data = (
            lambda m, b: m(b["x"]).sum(axis=-1),
            {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)},
        )
    elif name == "gpt":
        model = families.example("gpt").GPT(nnx.Rngs(0), layers=2, width=16, length=8, heads=2)
        loss, data = families.token_loss, {"text": families.text(256)["text"][:, :9]}
    elif name == "resnet":
        model = families.example("resnet").ResNet((1,), 8, 3, 16, nnx.Rngs(0))
        loss, data = families.image_loss, families.images(8)
    else:
        module = families.example("lstm")
        model = module.Translator(nnx.Rngs(0), vocabulary=64, width=8, layers=2)
        loss, data = module.loss, jax.tree.map(lambda x: x[:, :4] % 64, families.pairs())
    change(model)
    return hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=4)


@functools.cache
def record(name):
    return hxla.record_bits(job(name), microbatch_size=2)


def off_forward(f):
    return lambda *x, **options: f(*x, **options) * ULP


def off_backward(f):
    @jax.custom_vjp
    def planted(x):
        return f(x)

    def backward(x, g):
        return (jax.vjp(f, x)[1](g * ULP)[0],)

    planted.defvjp(lambda x: (f(x), x), backward)
    return planted


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    [found] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{found}"


#: The model, where its function is and its name, the line that calls it, the parameter before.
PLANTED = {
    "small": ("small", jax.nn, "sigmoid", Small.__call__, "jax.nn.sigmoid", "up"),
    "small scan": ("small", jnp, "tanh", Small.__call__, "jnp.tanh", "cell"),
    "gpt": (
        *("gpt", jax.nn, "gelu", families.example("gpt").Block.__call__, "jax.nn.gelu"),
        "blocks/0/up",
    ),
    "resnet": (
        *("resnet", nnx, "relu", families.example("resnet").ResNet.__call__, "nnx.relu"),
        "",
    ),
    "lstm": (
        *("lstm", jnp, "tanh", families.example("lstm").Attention.__call__, "jnp.tanh"),
        "decoder/attention/memory",
    ),
}


def with_planted(row, off, monkeypatch):
    name, module, function, *_ = PLANTED[row]
    own = record(name)  # made before anything is replaced
    monkeypatch.setattr(module, function, off(getattr(module, function)))
    return hxla.inspect_bits(own, hxla.record_bits(job(name), microbatch_size=2))


@pytest.mark.parametrize("row", rows(PLANTED, "small scan"))
def test_a_replaced_operation_is_named_with_its_line_and_what_was_read_before_it(row, monkeypatch):
    *_, caller, call, after = PLANTED[row]
    found = with_planted(row, off_forward, monkeypatch)
    first = found.first
    assert first.what == "replaced"
    assert not first.equation.is_backward
    assert first.equation.source == line_of(caller, call)
    assert first.other.source == line_of(off_forward, "* ULP")
    assert first.equation.after.startswith(after)
    assert not found.inputs
    assert found.compiled
    assert str(first) in str(found)


@pytest.mark.parametrize("row", rows(PLANTED, "small"))
def test_one_replaced_in_the_backward_pass_is_named_there(row, monkeypatch):
    *_, caller, call, _ = PLANTED[row]
    found = with_planted(row, off_backward, monkeypatch)
    first = found.first
    assert first.other.is_backward
    if row == "resnet":  # its blocks call it too, and the last of them is the first to go back
        caller, call = families.example("resnet").Bottleneck.__call__, "relu(y + "
    assert first.other.source in (line_of(caller, call), line_of(off_backward, "* ULP"))
    assert "loss" not in found.compiled
    assert found.compiled


@pytest.mark.slow
def test_one_replaced_inside_a_scan_is_named_with_its_line():
    def change(model):
        cell = model.decoder.layers[0].cell
        cell.activation_fn = off_forward(cell.activation_fn)

    found = hxla.inspect_bits(
        record("lstm"), hxla.record_bits(job("lstm", change), microbatch_size=2)
    )
    assert found.first.other.source == line_of(off_forward, "* ULP")
    assert found.first.equation.after.startswith("decoder/layers/0/cell")


@pytest.mark.parametrize("name", rows(["small", "resnet"], "small"))
def test_an_equation_that_another_device_rounds_otherwise_is_found_alone(name, monkeypatch):
    """The second of two devices, with one forward and one backward equation off by a bit."""
    places = of_floats(record(name))
    chosen = [places[len(places) // 3], places[-len(places) // 3]]
    assert [record(name).equations[i].is_backward for i in chosen] == [False, True]
    compiled = EquationRuns._compiled
    place = EquationRuns._place
    now = []

    def placed(self, eqn, inside):
        now[:] = [place(self, eqn, inside)]
        return now[0]

    def off(self, eqn):
        first, second = compiled(self, eqn)
        if now[0] in chosen:
            return [first, lambda *x: [jnp.nextafter(y, y + 1) for y in second(*x)]]
        return [first, second]

    monkeypatch.setattr(EquationRuns, "_place", placed)
    monkeypatch.setattr(EquationRuns, "_compiled", off)
    found = hxla.inspect_bits("cpu:0", "cpu:0", job=job(name), microbatch_size=2)
    assert [d.number for d in found.differences] == chosen
    assert found.num_judged == found.num_runs  # each was given what the first device computed
    assert not found.compiled
    assert all(d.equation == record(name).equations[d.number] for d in found.differences)
    assert [d.what for d in found.differences] == ["result", "result"]
    said = str(found)
    assert f"first: equation {chosen[0]}, {found.first.equation}" in said
    assert f"{found.num_runs:,} of {found.num_runs:,} runs of equations" in said
    assert "at 2 equations bits part" in said


def of_floats(own):
    """Places of equations outside scans whose one result is of floats that are not all zero."""
    once = {}
    for run in own.runs:
        once[run.equation] = run.equation not in once
    names = [e.results for e in own.equations]
    return [i for i, is_once in once.items() if is_once and re.match("float32|f32", names[i][0])]


@pytest.mark.parametrize("name", rows(["small", "gpt"], "small"))
def test_a_record_is_of_the_bits_that_plain_jax_computes_operation_by_operation(name, monkeypatch):
    run, given = EquationRuns.run, []

    def told(self, closed, arguments, params):
        given[:] = [closed, arguments]
        return run(self, closed, arguments, params)

    monkeypatch.setattr(EquationRuns, "run", told)
    # With hxla's own a CPU multiplies by a transposed matrix in another order.
    monkeypatch.setattr(_bits_runs, "compiler_options", lambda *_: {})
    # Plain jax compiles a scan as one program.
    change = unroll if name == "small" else lambda model: None
    found = hxla.record_bits(job(name, change), microbatch_size=2)
    closed, arguments = given
    with jax.disable_jit():
        results = jax.extend.core.jaxpr_as_fun(closed)(*arguments)
    made = {digest for own in found.runs for digest in own.results}
    made |= {digest for _, digest in found.inputs}  # of a variable that stays as it is
    assert all(hxla.fingerprint(x) in made for x in results)
    gradients = [name for name, _ in found.compiled if name.startswith("gradient of ")]
    assert len(gradients) == len(jax.tree.leaves(nnx.state(job(name).model, nnx.Param)))


def test_other_inputs_are_told_and_not_blamed_on_equations():
    other = job("small", lambda model: model.cell.kernel.set_value(model.cell.kernel[...] + 1))
    found = hxla.inspect_bits(record("small"), hxla.record_bits(other, microbatch_size=2))
    assert found.inputs == ("cell/kernel",)
    assert not found.differences
    assert found.num_judged < found.num_runs


def test_a_file_of_a_record_reads_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "bits.json"
    record("small").write(path)
    assert hxla.BitsRecord.read(path) == record("small")
    assert hxla.inspect_bits(path, record("small")).is_equal
    text = json.loads(path.read_text())
    text["runs"][3][1][0][0] = 7
    text["equations"][0]["primitive"] = 5
    path.write_text(json.dumps(text))
    with pytest.raises(hxla.InspectError, match=r"equations.0.primitive"):
        hxla.BitsRecord.read(path)
    with pytest.raises(hxla.InspectError, match="say too what is to run on it, by job="):
        hxla.inspect_bits(record("small"), "cpu:0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.update(format=2), "format 2 is of another version"),
        (lambda text: text["runs"][3].__setitem__(0, 999), "runs.3: there is no equation 999"),
        (lambda text: text["runs"][0][1][0].__setitem__(0, 0), "runs.0: nothing before it is"),
        (lambda text: text["runs"][0][1][0].__setitem__(0, -99), "runs.0: nothing before it is"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change, message, tmp_path):
    text = json.loads(record("small").model_dump_json())
    change(text)
    path = tmp_path / "bits.json"
    path.write_text(json.dumps(text))
    with pytest.raises(hxla.InspectError, match=message):
        hxla.BitsRecord.read(path)


def test_constants_that_differ_are_told():
    def run(constant):
        runs = EquationRuns(jax.devices()[:1])
        closed = jax.make_jaxpr(lambda x: x * constant + 1)(1.0)
        digests = runs.run(closed, [np.float32(3)], [])
        one = record("small")
        return one.model_copy(
            update={
                "inputs": (("x", digests[0]),),
                "equations": tuple(runs.equations),
                "runs": tuple(runs.runs[0]),
                "compiled": (),
            }
        )

    found = compare_bits(run(2.0), run(2.5))
    assert [(d.what, d.equation.primitive) for d in found.differences] == [("constant", "mul")]


SCRIPT = """
import sys, hxla, numpy as np, optax
from flax import nnx

def loss(model, batch):
    y = model(batch["x"])
    return {line}

x = np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)
model = nnx.Linear(4, 4, rngs=nnx.Rngs(int(sys.argv[1])))
hxla.train(
    hxla.Job(model, {{"x": x}}, loss, optax.sgd(0.1), batch_size=8),
    microbatch_size=4, steps=1,
)
"""


def test_the_command_compares_scripts_records_and_devices(tmp_path, capsys):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(SCRIPT.format(line="(y * y).sum(-1)"))
    two.write_text(SCRIPT.format(line="(y * y * 3 / 3).sum(-1)"))
    file = str(tmp_path / "one.json")
    assert main(["inspect", f"{one} 0", "--bits-record", file]) == 0
    assert "equations in" in capsys.readouterr().out
    assert main(["inspect", "--bits", file, f"{two} 0"]) == 1
    text = capsys.readouterr().out
    assert re.search(rf"first: equation \d+, A: forward: mul .*{one}:7\n.*B: .*{two}:7", text)
    assert main(["inspect", "--bits", file, file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert main(["inspect", f"{one} 0", "--bits", "cpu:0", "cpu:1"]) == 0
    assert "had the same results" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "cpu:0", "cpu:1"], "say too what is to run on it"),
        (["--bits", "nowhere.py", "nowhere.json"], "neither a record of bits nor a script"),
        (["--bits-record", "x.json"], "say which script"),
        ([__file__, "--bits", "cpu:0", "cpu:99"], "the cpu devices here are 0 to"),
        ([__file__, "--bits", "cpu:0", "abacus:0"], "jax has no abacus here"),
        ([__file__, "--bits", "cpu:0", "nothing"], "is no device"),
        (["--bits", "a", "b", "--device", "cpu:0"], "leave out"),
        ([], "say what to inspect"),
        (["dump", "--device", "cpu:0"], "are for --bits"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message, capsys):
    assert main(["inspect", *arguments]) == 2
    assert message in capsys.readouterr().err

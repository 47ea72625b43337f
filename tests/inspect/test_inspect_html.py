"""The page of an inspection: what a browser makes of it, and what its pictures show."""

import gzip
import html
import math
import re
from collections import Counter
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib import image

import hxla
from hxla import ProgramArray
from hxla.__main__ import main
from support import browser, families, fuzz_kinds, programs
from support.inside.inspect import _profiler_trace, _shard_pictures, _step_pictures, _tables
from support.inside.report import _lanes, _lanes_picture
from support.inside.schedule import from_perfetto, one_f_one_b, perfetto
from support.overlapped_replay import replay
from support.programs import inspected

LAYERS = 12
gpt = families.example("gpt")


def spec_of(path, array):
    name = jax.tree_util.keystr(path)
    if "qkv" in name or "up" in name:
        return P(None, "tensor")
    return P("tensor") if array.ndim == 2 and ("out" in name or "down" in name) else P()


def gpt_step():
    """A whole step of a 12-layer GPT over data and tensor, and its arguments."""
    mesh = programs.mesh(data=2, tensor=4)
    model = gpt.GPT(nnx.Rngs(0), length=16, width=32, heads=4, layers=LAYERS)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, opt_state, text):
        def loss(params):
            with hxla.split(4):
                return gpt.loss(nnx.merge(graph, params, rest), {"text": text})

        grads = jax.grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    state = jax.tree_util.tree_map_with_path(
        lambda p, x: jax.device_put(x, NamedSharding(mesh, spec_of(p, x))),
        (params, optimizer.init(params)),
    )
    text = np.arange(8 * 17, dtype=np.int32).reshape(8, 17) % 256
    return step, (*state, jax.device_put(text, NamedSharding(mesh, P("data"))))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The 12-layer page with a profile of its step: the inspection and the file."""
    browser.path()  # skips before anything is compiled
    folder = tmp_path_factory.mktemp("large")
    step, args = gpt_step()
    compiled = step.lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    with jax.profiler.trace(str(folder / "profile")):
        for _ in range(2):
            jax.block_until_ready(compiled(*args))
    inspection = hxla.inspect(compiled, cluster="whale-8v100-8p100")
    page = folder / "page.html"
    inspection.write_html(page, title="A GPT of 12 layers", profile=folder / "profile")
    return inspection, page


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links, self.text = Counter(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]

    def handle_data(self, data):
        self.text += data


@pytest.mark.slow
def test_the_page_of_twelve_layers_is_small_and_opens(large, tmp_path):
    _, page = large
    assert page.stat().st_size < 3_000_000
    assert browser.opening_seconds(page, tmp_path) > 0


def assert_holds(inspection, page, document):
    """That a page, as it was written or as a browser holds it, says what is in an inspection."""
    program = inspection.main
    seen = Text(document)
    assert not [link for link in seen.links if not link.startswith("data:")]
    assert not re.search(r"https?://", page.read_text())
    for warned in program.warnings:
        assert warned.text in seen.text
    for owner in program.memory.by_owner:
        assert owner in seen.text
    # The first table with collectives has a row for each kind and axis.
    first = page.read_text().split("<h2>Collectives</h2>")[1].split("</table>")[0]
    rows = [re.findall(r">([^<>]+)</t[hd]>", row) for row in first.split("<tr>")[2:]]
    assert {(kind, over): int(number) for kind, over, number, *_ in rows} == Counter(
        (c.kind, c.over) for c in program.collectives
    )
    sources = {c.origin.source.rsplit("/", 1)[-1] for c in program.collectives if c.origin.source}
    assert sources
    for line in sources:
        assert line in seen.text
    assert "One step in time" in seen.text


@pytest.mark.slow
def test_a_browser_shows_what_the_inspection_holds(large):
    inspection, page = large
    assert_holds(inspection, page, browser.dom(page))


def test_a_page_holds_what_the_inspection_holds(loop_profile, tmp_path):
    inspection, folder = loop_profile
    page = tmp_path / "page.html"
    inspection.write_html(page, title="A loop", profile=folder)
    assert_holds(inspection, page, page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_runs_over_the_side_of_a_window(large, tmp_path, width):
    _, page = large
    asked = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.ask(page, tmp_path, asked, width=width) == "0"


@pytest.mark.slow
def test_pictures_are_drawn_light_and_dark(large, tmp_path):
    _, page = large
    grounds = []
    for scheme in (1, 0):
        shot = tmp_path / f"{scheme}.png"
        option = f"--blink-settings=preferredColorScheme={scheme}"
        browser.screenshot(page, shot, option, height=5000)
        pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
        grounds.append(pixels[2, 2].sum())
        blue = (0x2F, 0x6F, 0xDB)
        assert (np.abs(pixels - blue).sum(axis=-1) < 6).sum() > 2000
    assert grounds[0] > 700
    assert grounds[1] < 100


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 16), P("data", "tensor")),
        ((8, 16), P("tensor", None)),
        ((16,), P(("data", "tensor"))),
        ((16,), P(("tensor", "data"))),
        ((4, 8, 2), P("tensor", None, "data")),
        ((8, 8), P()),
        ((), P()),
    ],
)
def test_each_device_holds_the_part_that_jax_gives_it(shape, spec):
    mesh = programs.mesh(data=2, tensor=4)
    x = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))
    array = hxla.inspect(jax.jit(lambda x: x + 1), x).main.arrays[0]
    place = {device: n for n, device in enumerate(mesh.devices.flat)}
    wanted = {}
    for device, index in x.sharding.devices_indices_map(shape).items():
        starts = tuple((s.start or 0) // n for s, n in zip(index, array.local_shape, strict=True))
        wanted.setdefault(starts, set()).add(place[device])
    found = {
        p.index: set(p.devices) for p in _shard_pictures.shards(array, (("data", 2), ("tensor", 4)))
    }
    assert found == wanted
    drawn = _shard_pictures.array_picture(array, (("data", 2), ("tensor", 4)))
    assert drawn.count("<title>") == len(wanted)


def uneven(shape, local, spec):
    return ProgramArray(
        path="x", owner="parameter", dtype="f32", shape=shape, local_shape=local, spec=spec
    )


def test_what_a_dimension_does_not_fill_is_hatched():
    array = uneven((10, 4), (3, 4), (("tensor",), ()))
    mesh = (("tensor", 4),)
    used = [math.prod(p.used) for p in _shard_pictures.shards(array, mesh)]
    assert used == pytest.approx([1, 1, 1, 1 / 3])
    assert _shard_pictures.padded_share(array, mesh) == pytest.approx(2 / 12)
    drawn = _shard_pictures.array_picture(array, mesh)
    assert drawn.count('class="pad"') == 1
    assert "dimension 0: 9 to 9 and 2 of padding" in drawn
    # Five rows over four devices, two each: the last device has nothing but padding.
    drawn = _shard_pictures.array_picture(uneven((5, 4), (2, 4), (("tensor",), ())), mesh)
    assert drawn.count('class="pad"') == 2
    assert "padding only" in drawn
    assert 'class="pad"' not in _shard_pictures.array_picture(
        uneven((8, 4), (2, 4), (("tensor",), ())), mesh
    )


def test_a_mesh_too_large_to_draw_is_said_in_words():
    mesh = (("data", 128), ("tensor", 2))
    array = uneven((256,), (2,), (("data",),))
    assert "128 parts" in _shard_pictures.array_picture(array, mesh)
    assert _shard_pictures.mesh_picture(mesh) == ""


def test_names_that_differ_in_numbers_are_said_once():
    blocks = [f"Block_{i}/up" for i in (0, 1, 2, 5)]
    assert _tables.alike(blocks) == "Block_0-2,5/up"
    assert _tables.alike(["x"]) == "x"
    assert _tables.alike(["a[0][7]", "a[1][7]"]) == "a[0-1][7]"
    assert [len(g) for g in _tables.group([*blocks, "tok"], str)] == [4, 1]
    assert len(_tables.group(blocks, str, lambda name: name[6] == "5")) == 2


def looped():
    """Five trips of a loop with one sum each, and one sum after it."""
    mesh = programs.mesh(data=4)

    def body(x):
        def trip(_, c):
            return jax.lax.psum(jnp.tanh(c @ c), "data") / 4

        return jax.lax.psum(jax.lax.fori_loop(0, 5, trip, x), "data")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped), (
        jax.device_put(np.eye(64, dtype=np.float32), NamedSharding(mesh, P())),
    )


@pytest.fixture(scope="module")
def loop_profile(tmp_path_factory):
    """The inspection of `looped`, and a profile of three steps of it."""
    folder = tmp_path_factory.mktemp("loop")
    step, args = looped()
    compiled = step.lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            jax.block_until_ready(compiled(*args))
    return hxla.inspect(compiled, cluster="whale-8v100-8p100"), folder


def test_the_profiled_step_is_one_step_and_its_collectives_are_those_of_the_program(loop_profile):
    inspection, folder = loop_profile
    measured = _profiler_trace.last_step(folder, inspection.programs)
    assert "The last of 3 profiled steps" in measured.note
    assert measured.names == tuple(f"device {n}" for n in range(4))
    for device in range(4):
        own = Counter(
            bar.label
            for bar in measured.bars
            if bar.lane == device and bar.kind == _lanes.COLLECTIVE
        )
        assert own == {c.name: c.runs for c in inspection.main.collectives}
    assert {c.runs for c in inspection.main.collectives} == {1, 5}
    # The loop itself would cover all that runs in it.
    assert not [bar for bar in measured.bars if bar.label.startswith("while")]
    for device in range(4):
        kinds = (_lanes.COMPUTATION, _lanes.COLLECTIVE)
        busy = [measured.busy_seconds(device, kind) for kind in kinds]
        assert all(0 < seconds <= measured.seconds for seconds in busy)


def event(name, run, start, end, device="0"):
    return _profiler_trace._Event(
        device=device, line=device, program=name, run=run, name="f", start=start, end=end
    )


def test_a_step_of_hxla_ends_with_its_update():
    events = [
        *(event("jit_hxla_micro", "1", 0, 10), event("jit_hxla_update", "2", 10, 12)),
        *(event("jit_hxla_micro", "3", 13, 20), event("jit_hxla_update", "4", 20, 25)),
        event("jit_hxla_evaluate", "5", 30, 40),
        # The second device is behind: its own first update ends in the first one's second step.
        *(event("jit_hxla_micro", "1", 0, 13, "1"), event("jit_hxla_update", "2", 13, 14, "1")),
        *(event("jit_hxla_micro", "3", 14, 21, "1"), event("jit_hxla_update", "4", 21, 26, "1")),
    ]
    step, num = _profiler_trace._last_step(events)
    assert num == 2
    assert sorted((e.device, e.run) for e in step) == [
        ("0", "3"),
        ("0", "4"),
        ("1", "3"),
        ("1", "4"),
    ]
    step, num = _profiler_trace._last_step(events[4:5])
    assert (num, [e.run for e in step]) == (1, ["5"])


def test_a_profile_of_something_else_is_refused(loop_profile, tmp_path):
    other, folder = loop_profile
    with pytest.raises(hxla.InspectError, match=r"no run of .*, only of jit_body"):
        _profiler_trace.last_step(folder, inspected("tensor").programs)
    with pytest.raises(hxla.InspectError, match="holds no profile"):
        _profiler_trace.last_step(tmp_path / "nothing", other.programs)
    for content in (b"no gzip", gzip.compress(b"no JSON"), gzip.compress(b"[]")):
        (tmp_path / "broken.trace.json.gz").write_bytes(content)
        with pytest.raises(hxla.InspectError, match="is no profile"):
            _profiler_trace.last_step(tmp_path / "broken.trace.json.gz", other.programs)


def test_bars_that_cannot_be_told_apart_are_one_and_cover_the_same_time():
    def bar(start, end):
        return _lanes.Bar(
            lane=0, kind="computation", label="f", start_seconds=start, end_seconds=end
        )

    many = [bar(i * 1e-4, (i + 1) * 1e-4) for i in range(10_000)]
    apart = [bar(0, 0.3), bar(0.3, 0.6), bar(0.9, 1)]
    for bars, most in ((many, 1200), (apart, 3)):
        lanes = _lanes.Lanes(title="", names=("a",), bars=tuple(bars))
        found = list(_lanes_picture._merged(bars, 800 / lanes.seconds))
        assert len(found) <= most
        assert found[0][0] == 0
        assert found[-1][1] == pytest.approx(1)
        drawn = sum(end - start for start, end, _ in found)
        assert drawn == pytest.approx(sum(b.end_seconds - b.start_seconds for b in bars), rel=1e-3)
    assert len(found) == 3


def test_a_predicted_timeline_is_read_as_it_was_written(tmp_path):
    timeline = replay(one_f_one_b(3, 4), [0.01] * 3, [0.02] * 3, send_seconds_P=[0.001] * 2)
    text = perfetto(timeline, ["a", "b", "c"])
    again, names = from_perfetto(text)
    assert names == ("a", "b", "c")
    assert [(e.stage, e.kind, e.microbatch) for e in again.events] == [
        (e.stage, e.kind, e.microbatch) for e in timeline.events
    ]
    assert again.makespan_seconds == pytest.approx(timeline.makespan_seconds)
    file = tmp_path / "trace.json"
    file.write_text(text)
    lanes = _step_pictures.lanes_of_file(file)
    assert len(lanes.bars) == len(timeline.events) + len(timeline.sends)
    drawn = _lanes_picture.step_picture([lanes])
    assert drawn.count('class="head"') == 1
    file.write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(hxla.PlanError, match="no timeline"):
        _step_pictures.lanes_of_file(file)
    file.write_text("{}")
    with pytest.raises(hxla.PlanError, match="no plan"):
        _step_pictures.lanes_of_file(file)


def test_a_plan_is_drawn_by_the_parts_of_each_devices_step(tmp_path):
    plan = hxla.Plan.from_json(fuzz_kinds.plan_text())
    device = {
        "compute_seconds": 0.25,
        "wait_seconds": 0.0,
        "reduction_seconds": 0.5,
        "update_seconds": 0.125,
    }
    devices = tuple(hxla.DevicePrediction(rank=rank, **device) for rank in (0, 4))
    plan = plan.replaced(prediction=hxla.Prediction(step_seconds=0.875, devices=devices))
    plan.write(tmp_path / "plan.json")
    lanes = _step_pictures.lanes_of_file(tmp_path / "plan.json")
    assert lanes.names == ("cpu@1.0 (device 0)", "cpu@0.5 (device 4)")
    of_second = [b for b in lanes.bars if b.lane == 1]
    assert [(b.kind, b.start_seconds, b.end_seconds) for b in of_second] == [
        ("forward and backward", 0.0, 0.25),
        ("reduction", 0.25, 0.75),
        ("update", 0.75, 0.875),
    ]


def test_warnings_that_differ_in_numbers_are_folded_on_the_page(tmp_path):
    where = programs.mesh(tensor=4)
    large = programs.like(256, 256)
    step = programs.jitted(
        lambda params, x: sum((x @ p).sum() for p in params),
        where,
        ([P("tensor"), P(), P()], P()),
    )
    found = hxla.inspect(step, [large] * 3, programs.like(8, 256))
    warned = [w for w in found.main.warnings if w.kind == "replicated"]
    assert len(warned) == 2
    found.write_html(tmp_path / "page.html")
    seen = Text((tmp_path / "page.html").read_text()).text
    assert all(w.text in seen for w in warned)
    assert "and 1 like it" in seen


def test_a_diff_page_says_every_change(tmp_path):
    before, after = inspected("data"), inspected("tensor")
    before.write_diff_html(after, tmp_path / "diff.html")
    seen = Text((tmp_path / "diff.html").read_text()).text
    lines = before.diff(after)
    assert lines
    for line in lines:
        assert line in seen
    before.write_diff_html(before, tmp_path / "same.html")
    assert "Nothing changed" in (tmp_path / "same.html").read_text()


def test_what_a_program_is_called_cannot_break_the_page(tmp_path):
    inspected("data").write_html(tmp_path / "page.html", title="</title><script>alert(1)")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert html.escape("</title><script>alert(1)") in page


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(hxla.InspectError, match="cannot be written"):
        inspected("data").write_html(tmp_path / "file" / "page.html")


def test_the_command_writes_pages(tmp_path, capsys):
    dump = tmp_path / "step.hlo"
    dump.write_text(programs.compiled("tensor")[0].as_text())
    page, diff = tmp_path / "page.html", tmp_path / "diff.html"

    def hxla_inspect(*options):
        return main(["inspect", str(dump), "--axes", "tensor=4", *map(str, options)])

    assert hxla_inspect("--html", page) == 0
    assert "all-reduce" in page.read_text()
    assert hxla_inspect("--diff", dump, "--html", diff) == 0
    assert "Nothing changed" in diff.read_text()
    assert hxla_inspect("--predicted", dump) == 2
    assert "--html" in capsys.readouterr().err

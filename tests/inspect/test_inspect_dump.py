"""Dumps: of several versions of jax, cut off, mixed, huge, and of a run of hxla."""

import collections
import cProfile
import functools
import gzip
import os
import re
import shutil
import subprocess
import sys

import pytest

import hxla
from hxla import testing
from support import programs
from support.inside.inspect import _annotated_module, _shapes
from support.inside.inspect import _collectives as _groups
from support.inside.jax import _hlo_proto as _proto
from support.large_dump import DUMPS, large_text, measured_alone
from support.launched import own_environment
from support.tiers import rows

VERSIONS = ("jax-0.10", "jax-0.11", "jax-0.12")
NAMES = ("fsdp", "pipeline", "experts", "linen", "nnx_adam", "taskgraphs")


@functools.cache
def dumped(version):
    found = hxla.inspect(DUMPS / version)
    assert not found.problems
    by_name = {re.search(r"module_\d+\.(\w+)\.", p.source)[1]: p for p in found.programs}
    assert set(by_name) == set(NAMES)
    return by_name


def told(program):
    """What a user reads of a program, without the compiler's own names."""
    collectives = [
        (c.kind, c.arrays, c.num_bytes, c.over, c.runs, c.is_async, c.operands, c.origin)
        for c in program.collectives
    ]
    arrays = [(a.path, a.owner, a.shape, a.local_shape, a.spec) for a in program.arrays]
    return {
        "mesh": program.mesh,
        "collectives": sorted(collectives, key=str),
        "arrays": arrays,
        "memory": program.memory.by_owner,
        "flops": {w.task_graph: w.flops for w in program.work},
        "warnings": program.warnings,
    }


@pytest.mark.parametrize("name", NAMES)
def test_dumps_of_all_versions_read_alike_and_as_theory_says(name):
    first, *others = (dumped(version)[name] for version in VERSIONS)
    for other in others:
        assert told(other) == told(first)
    _, _, moved = programs.ALL[name]()
    found = collections.Counter()
    for c in first.collectives:
        found[c.kind, c.over, c.runs] += c.num_bytes
    assert found == moved
    assert sum(first.memory.by_owner.values()) == first.memory.total_bytes


def test_a_dump_reads_like_the_live_step():
    """With the jax that runs the tests, on what no version changes."""
    for name in ("linen", "nnx_adam"):
        live, old = told(programs.inspected(name).main), told(dumped("jax-0.10")[name])
        for key in ("mesh", "arrays", "memory", "flops"):
            assert live[key] == old[key], (name, key)


def test_a_live_step_and_text_and_proto_of_its_dump_read_alike(tmp_path, no_persistent_cache):
    step, args, _ = programs.linen()
    # A cached program would name the source lines of whoever compiled it first, and dump nothing.
    kinds = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}
    live = step.lower(*args).compile({"xla_dump_to": str(tmp_path), **kinds})
    found = {"live": hxla.inspect(live).main}
    for kind in (".txt", ".pb"):
        folder = tmp_path / kind[1:]
        folder.mkdir()
        for file in tmp_path.glob(f"module_*apply*optimizations*{kind}"):
            shutil.copy(file, folder)
        found[kind] = hxla.inspect(folder).main
    assert told(found[".txt"]) == told(found[".pb"]) == told(found["live"])
    assert found[".txt"].memory.buffers == found[".pb"].memory.buffers
    assert found["live"].memory.buffers == found[".pb"].memory.buffers


def test_jaxlib_still_turns_modules_into_text():
    file = next((DUMPS / "jax-0.12").glob("*after_optimizations.hlo.pb.gz"))
    module, assignment = _proto.parts_of_dump(gzip.decompress(file.read_bytes()))
    assert _proto.module_text(module).startswith("HloModule")
    assert _proto.buffer_assignment(assignment, module).argument_bytes > 0
    with pytest.raises(ValueError, match=r"cut off|no protocol"):
        _proto.parts_of_dump(b"\x0a\xff\x01no")


def plain(tmp_path, name, version="jax-0.12"):
    """A committed dump of one program, decompressed."""
    for file in (DUMPS / version).glob(f"*.{name}.*"):
        (tmp_path / file.name.removesuffix(".gz")).write_bytes(gzip.decompress(file.read_bytes()))
    (text,) = tmp_path.glob(f"*{name}.*after_optimizations.txt")
    return text


def test_a_text_that_was_cut_off_gives_what_was_there(tmp_path):
    text = plain(tmp_path, "linen")
    whole = text.read_text()
    at = whole.index(" all-reduce(") + 200
    text.write_text(whole[:at])
    program = hxla.inspect(tmp_path).main
    assert [c.kind for c in program.collectives] == ["all-reduce"]
    assert program.memory is None
    assert any("it was cut off" in p for p in program.problems)
    assert "not read" in hxla.inspect(tmp_path).text()


def test_lines_that_nobody_knows_are_counted(tmp_path):
    text = plain(tmp_path, "linen")
    before = hxla.inspect(tmp_path).main
    lines = text.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if " all-reduce(" in line)
    lines[place:place] = ["  a line of the year 2040", "  %x <- magic"]
    text.write_text("\n".join(lines))
    after = hxla.inspect(tmp_path).main
    assert after.collectives == before.collectives
    assert after.problems == ("2 lines were not understood, the first: a line of the year 2040",)


@pytest.mark.parametrize("filling", ["\n", "[],", "a = 1\n"])
def test_a_million_empty_or_odd_lines_are_passed_over(tmp_path, filling):
    text = plain(tmp_path, "linen")
    before = hxla.inspect(tmp_path).main
    text.write_text(text.read_text() + filling * (1 << 20))
    assert hxla.inspect(tmp_path).main.collectives == before.collectives


@pytest.mark.parametrize("name", rows(["pipeline", "linen", "nested_loops"], "nested_loops"))
def test_no_spoilt_line_ends_the_reading(name):
    lines = programs.compiled(name)[0].as_text().splitlines()
    spoil = [
        lambda line, start: start,
        lambda line, start: start + ")",
        lambda line, start: line.replace("index=", "index=x"),
        lambda line, start: line.replace("{", "", 1),
        lambda line, start: re.sub(r"\d+", "999", line),
    ]
    seen = set()
    for i, line in enumerate(lines):
        found = re.match(r"\s+(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([a-z\-]+)\(", line)
        if found is None or found[1] in seen:
            continue
        seen.add(found[1])
        for change in spoil:
            text = "\n".join([*lines[:i], change(line, found[0]), *lines[i + 1 :]])
            assert hxla.inspect(text).text()
    assert {"while", "parameter", "fusion", "get-tuple-element"} <= seen


def test_a_mixed_dump_gives_what_can_be_read(tmp_path):
    plain(tmp_path, "linen", "jax-0.10")
    plain(tmp_path, "experts", "jax-0.12")
    (tmp_path / "module_0007.jit_broken.cpu_after_optimizations.hlo.pb").write_bytes(
        b"\x0a\xff\x01"
    )
    (tmp_path / "module_0008.jit_killed.before_optimizations.txt").write_text("HloModule x\n")
    (tmp_path / "module_0009.jit_noise.cpu_after_optimizations.txt").write_bytes(os.urandom(4096))
    (tmp_path / "notes.txt").write_text("nothing of XLA's")
    (tmp_path / "half.txt.gz").write_bytes(gzip.compress(b"HloModule y\n")[:-9])
    found = hxla.inspect(tmp_path)
    assert {"jit_apply", "jit_layer"} <= {p.name for p in found.programs}
    problems = "\n".join(found.problems)
    assert "jit_broken: there is no optimized program" in problems
    assert "jit_killed: there is no optimized program" in problems
    assert "the compiler did not finish it" in problems
    assert "jit_noise: there is no HloModule line: this is no HLO text" in problems
    with pytest.raises(hxla.InspectError, match="was not read completely"):
        testing.assert_no_warnings(tmp_path)


@pytest.mark.parametrize("text", ["nothing of XLA's", "HloModule x\n", ""])
def test_a_file_that_is_no_hlo_is_refused(text, tmp_path):
    """Else each assertion on it would hold."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(hxla.InspectError, match="holds no program that can be read"):
        hxla.inspect(path)
    with pytest.raises(hxla.InspectError, match="holds no program that can be read"):
        testing.assert_collectives(path, all_gather=0)


def test_a_folder_without_hlo_says_how_to_make_a_dump(tmp_path):
    with pytest.raises(hxla.InspectError, match="hxla run --dump DIR"):
        hxla.inspect(tmp_path)


@pytest.mark.slow
def test_100_mb_of_text_are_read_within_1_gb(tmp_path):
    text, copies = large_text(100 * 2**20)
    file = tmp_path / "module_0000.jit_large.cpu_after_optimizations.txt"
    file.write_text(text)
    del text
    found = measured_alone(file)
    assert (found["collectives"], found["problems"]) == (copies, 0)
    assert found["peak_bytes"] < 10**9


def test_twice_the_text_takes_twice_the_calls_and_no_shape_twice():
    caches = (
        _shapes.arrays,
        _shapes.shape_bytes,
        _groups.parse_groups,
        _annotated_module.module_path,
    )
    hxla.inspect(large_text(2**18)[0])  # the first of a process imports and fills other caches
    calls, misses = [], []
    for num_bytes in (2**19, 2**20):
        text, copies = large_text(num_bytes)
        for cache in caches:
            cache.cache_clear()
        profile = cProfile.Profile()
        found = profile.runcall(hxla.inspect, text)
        assert len(found.collectives) == copies
        calls.append(sum(entry.callcount for entry in profile.getstats()) / copies)
        misses.append([cache.cache_info().misses for cache in caches])
    assert calls[1] == pytest.approx(calls[0], rel=0.05)
    assert misses[0] == misses[1]
    assert calls[1] / 51 < 27  # a copy has 51 instructions


SCRIPT = """
import jax, numpy as np, optax
from flax import nnx
import hxla

class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.v = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        with hxla.replicate():
            return self.v(jax.numpy.tanh(self.w(x)))

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

data = {"x": np.ones((64, 8), np.float32)}
hxla.train(
    hxla.Job(Model(), data, loss, optax.adam(1e-3), batch_size=8),
    microbatch_size=2, steps=2,
)
"""


@pytest.mark.slow
def test_the_dump_of_a_run_names_the_programs_of_the_step(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = own_environment()
    command = [sys.executable, "-m", "hxla", "run", "-n", "2", "--dump", "dump", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert sorted(p.name for p in (tmp_path / "dump").iterdir()) == ["process-0", "process-1"]
    found = hxla.inspect(tmp_path / "dump")
    assert not found.problems
    micro = found.program("one microbatch")
    assert not micro.collectives
    assert {w.task_graph for w in micro.work} == {"replicate() #0", ""}
    # 2 examples, forward and the weights' gradient; and the second layer's input gradient.
    w, v = 2 * 2 * 8 * 16, 2 * 2 * 16 * 4
    assert micro.total.flops == 2 * w + 3 * v
    total = found.program("sum over the replicas")
    assert {c.over for c in total.collectives} == {"data"}
    update = found.program("update of the parameters")
    assert update.memory.by_owner["optimizer state"] == 2 * (8 * 16 + 16 * 4) * 4 + 4
    again = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert again.returncode == 2
    assert "it is not empty" in again.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "hxla", "inspect", "dump"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "jit_hxla_micro (one microbatch)" in shown
    assert "jit_hxla_sum (sum over the replicas): 2 devices, data=2" in shown

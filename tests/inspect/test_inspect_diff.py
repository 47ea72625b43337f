"""What changed between two inspections, as a person would say it; and the command."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import hxla
from hxla.__main__ import main
from support import programs


@functools.cache
def blocks(num, *, reduce=True):
    where = programs.mesh(tensor=4)

    def forward(params, x):
        for i, (up, down) in enumerate(params):
            with jax.named_scope("mlp"), jax.named_scope(f"layer_{i}"):
                y = jnp.tanh(x @ up) @ down
                x = x + (jax.lax.psum(y, "tensor") if reduce else y)
        return x

    cut = [(programs.P(None, "tensor"), programs.P("tensor"))] * num
    specs = (cut, programs.P())
    step = jax.shard_map(
        forward, mesh=where, in_specs=specs, out_specs=programs.P(), check_vma=False
    )
    params = [(programs.like(256, 512), programs.like(512, 256))] * num
    return hxla.inspect(programs.jitted(step, where, specs), params, programs.like(4096, 256))


def test_nothing_changed():
    assert blocks(2).diff(blocks(2)) == ()


def test_collectives_that_went_are_named_with_size_axis_and_module():
    lines = blocks(2).diff(blocks(2, reduce=False))
    for layer in (0, 1):
        assert f"1 all-reduce of 4.0 MiB over tensor in mlp/layer_{layer} disappeared" in lines
    back = blocks(2, reduce=False).diff(blocks(2))
    assert "1 all-reduce of 4.0 MiB over tensor in mlp/layer_0 appeared" in back


def test_programs_that_come_and_go_are_named_and_the_others_compared(tmp_path):
    texts = {name: programs.compiled(name)[0].as_text() for name in ("tensor", "linen", "pipeline")}
    folders = {"before": ("tensor", "linen"), "after": ("linen", "pipeline")}
    found = {}
    for folder, names in folders.items():
        (tmp_path / folder).mkdir()
        for i, name in enumerate(names):
            file = f"module_{i:04}.jit_{name}.cpu_after_optimizations.txt"
            (tmp_path / folder / file).write_text(texts[name])
        found[folder] = hxla.inspect(tmp_path / folder)
    titles = {p.source: p.title for p in (*found["before"].programs, *found["after"].programs)}
    gone, new = found["before"].programs[0].title, found["after"].programs[1].title
    assert len(set(titles.values())) == 3
    assert found["before"].diff(found["after"]) == (
        f"program {gone} is gone",
        f"program {new} is new",
    )


def test_memory_and_work_that_grew_are_named_with_their_owner():
    lines = blocks(1).diff(blocks(3))
    memory = next(line for line in lines if line.startswith("peak memory"))
    assert memory.startswith("peak memory +")
    assert "+512.0 KiB in parameters" in memory  # 2 x 2 x 256 x 512 / 4 x 4 bytes
    (work,) = [line for line in lines if line.startswith("FLOPs")]
    assert work.endswith("(+200%)")


def test_a_loop_that_runs_more_often_is_said_so():
    def inspected(length):
        def body(x):
            return jax.lax.fori_loop(0, length, lambda _, x: jax.lax.psum(x, "data") / 4, x)

        where = programs.mesh(data=4)
        p = programs.P()
        step = jax.shard_map(body, mesh=where, in_specs=p, out_specs=p, check_vma=False)
        return hxla.inspect(programs.jitted(step, where, p), programs.like(64, 64))

    lines = inspected(3).diff(inspected(7))
    assert any("over data" in line and "runs 7 times instead of 3" in line for line in lines)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    parent = tmp_path_factory.mktemp("dumps")
    for name in ("tensor", "linen"):
        folder = parent / name
        folder.mkdir()
        text = programs.compiled(name)[0].as_text()
        (folder / "module_0000.jit_step.cpu_after_optimizations.txt").write_text(text)
    return parent


def test_the_command_prints_tables_json_and_differences(dumps, capsys):
    assert main(["inspect", str(dumps / "linen"), "--axes", "data=2,tensor=2"]) == 0
    shown = capsys.readouterr().out
    assert "all-reduce" in shown
    assert "Stack/blocks/down" in shown
    assert "tensor" in shown
    assert main(["inspect", str(dumps / "linen"), "--json"]) == 0
    assert hxla.Inspection.from_json(capsys.readouterr().out).main.collectives
    both = ["inspect", str(dumps / "linen"), "--diff", str(dumps / "tensor")]
    assert main(both) == 0
    assert "in Stack/blocks/down, 3 times a step each disappeared" in capsys.readouterr().out
    assert main([*both, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["inspect", str(dumps / "linen"), "--diff", str(dumps / "linen")]) == 0
    assert capsys.readouterr().out == "nothing changed\n"


def test_the_command_predicts_times_on_a_cluster(dumps, capsys):
    arguments = ["inspect", str(dumps / "tensor"), "--axes", "tensor=4"]
    assert main([*arguments, "--mesh", "whale-8v100-8p100"]) == 0
    assert "predicted" in capsys.readouterr().out


def test_the_command_says_what_is_no_dump(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no HLO" in capsys.readouterr().err

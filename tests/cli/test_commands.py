"""Help, version and completion, and what a shell sees of the command line."""

import ast
import inspect
import os
import re
import subprocess
import sys

import click
import jax
import pytest

import hxla
from hxla.__main__ import main
from support import profiles
from support.inside.cli import cli
from support.inside.scheduler import LIVE_POLICIES, POLICIES
from support.launched import PATIENCE_SECONDS, own_environment
from support.paths import ROOT


def every_command(group=cli, path=()):
    """Paths of commands, with their click commands."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


COMMANDS = {" ".join(path): command for path, command in every_command()}


def said(capsys, *words):
    """The output of a command that succeeds."""
    assert main(list(words)) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def test_hxla_alone_shows_its_help_with_three_examples(capsys):
    alone = said(capsys)
    assert alone == said(capsys, "--help") == said(capsys, "help") == said(capsys, "-h")
    assert "Train a Flax model on whatever accelerators you have" in alone
    assert len(re.findall(r"^  hxla \w", alone.partition("Examples:")[2], re.M)) == 3


def test_the_version_has_one_place(capsys):
    assert said(capsys, "--version") == f"hxla {hxla.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", hxla.__version__)
    assert 'path = "hxla/_src/core/version.py"' in (ROOT / "pyproject.toml").read_text()


def test_a_plan_without_a_mesh_is_for_the_devices_of_this_machine(tmp_path, capsys):
    script, file = tmp_path / "script.py", tmp_path / "plan.json"
    script.write_text(profiles.SCRIPT)
    words = said(capsys, "plan", "--write", str(file), str(script))
    plan, devices = hxla.Plan.read(file), jax.devices()
    assert f"the devices of this machine, {len(devices)} x cpu\nthis machine: " in words
    assert "trained" not in words
    assert [device.kind for device in plan.devices] == ["cpu"] * len(devices)
    assert (plan.cluster, plan.mesh) == ("", "")


def test_plans_for_two_meshes_are_drawn_and_compared(tmp_path, capsys):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(profiles.SCRIPT.replace("steps=3", "steps=3, stages=2"))
    meshes = ("workstation-3090-4090", "cpu-1.0-0.33")
    words = said(
        capsys, "plan", "--mesh", meshes[0], "--compare", meshes[1], "--draw", str(out), str(script)
    )
    for mesh in meshes:
        assert f"{mesh}: " in words
        assert (out / f"{mesh}.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^microbatches +8 +8$", words, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_in_sentences_what_a_command_does(command, capsys):
    words = command.split()
    text = said(capsys, "help", *words)
    assert text == said(capsys, *words, "--help")
    assert text.startswith(f"Usage: hxla {command}")
    for summary in (COMMANDS[command].short_help, inspect.cleandoc(COMMANDS[command].help)):
        assert re.match(r"[A-Z]", summary), summary
        assert summary.endswith("."), summary
    example, *_ = re.search(r"^Examples:\n(.*)", text, re.M | re.S)[1].splitlines()
    assert example.startswith(f"  hxla {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_a_heading_a_sentence_and_a_metavar_that_says_what_it_is(command):
    for param in COMMANDS[command].params:
        if isinstance(param, click.Argument) or param.hidden:
            continue
        assert param.heading, param.name
        assert re.fullmatch(r"[A-Z].*\.", param.help, re.S), (param.name, param.help)
        if not param.is_flag and not isinstance(param.type, click.Choice):
            assert param.metavar, param.name
            assert re.fullmatch(r"[A-Z][A-Z_.=:, ]*", param.metavar), (param.name, param.metavar)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_command_lines_that_parse(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "times.json"):
        (tmp_path / name).touch()
    for words, meaning in (*COMMANDS[command].examples, *cli.examples):
        path, rest = words.split(" > ")[0].split(), []
        while path and " ".join(path) not in COMMANDS:
            rest.insert(0, path.pop())
        COMMANDS[" ".join(path)].make_context("hxla", rest)
        assert re.fullmatch(r"[A-Z].*\.", meaning)


def test_a_mode_of_schedule_shows_its_own_flags_only(capsys):
    simulate = said(capsys, "schedule", "simulate", "--help")
    assert "--json" in simulate
    assert not {"--at", "--ray", "--learn-speeds", "--out"} & set(
        re.findall(r"--[a-z-]+", simulate)
    )
    assert "--learn-speeds" in said(capsys, "schedule", "run", "--help")


def test_help_names_the_policies_there_are():
    def named(text):
        words = re.search(r"The policies are ([^.]*)\.", " ".join(text.split()))[1]
        return tuple(re.split(", | and ", words))

    for mode, policies in (("simulate", POLICIES), ("explain", POLICIES), ("run", LIVE_POLICIES)):
        assert named(COMMANDS[f"schedule {mode}"].help) == tuple(policies)


def shell(tmp_path, *words, **environment):
    """`hxla` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hxla", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
        env=own_environment() | environment,
    )


def test_help_and_usage_errors_need_no_jax(tmp_path):
    code = """
import sys
from hxla.__main__ import main
from support import profiles
codes = [main(["help", "run"]), main(["run", "--nope"]), main(["devices", "--bogus"])]
print(codes, sorted({"jax", "numpy", "pydantic", "rich"} & sys.modules.keys()))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=own_environment(),
    )
    assert ran.stdout.endswith("[0, 2, 2] []\n"), ran.stderr


def test_a_shell_sees_exit_codes_and_streams(tmp_path):
    wrong = shell(tmp_path, "run", "--nope", "train.py")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines() == [
        "Usage: hxla run [OPTIONS] SCRIPT [ARGUMENTS]...",
        "hxla run: No such option '--nope'. Did you mean '--nodes'? See hxla run --help.",
    ]
    right = shell(tmp_path)
    assert (right.returncode, right.stderr) == (0, "")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_hxla(name, capsys):
    text = said(capsys, "completion", name)
    assert f"_HXLA_COMPLETE={name}_complete" in text


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("hxla r", "plain,run"),
        ("hxla schedule s", "plain,simulate"),
        ("hxla run --pl", "plain,--plan"),
        ("hxla run --mesh cpu-1.0-0.3", "plain,cpu-1.0-0.33"),
        ("hxla run tr", "file,tr"),
    ],
)
def test_words_are_completed(line, wanted, monkeypatch, capsys):
    monkeypatch.setenv("_HXLA_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert main([]) == 0
    assert wanted in capsys.readouterr().out.splitlines()


def test_bash_itself_completes(tmp_path):
    """With the printed script, in the way that bash calls it."""
    (tmp_path / "hxla").write_text(f'#!/bin/sh\nexec {sys.executable} -m hxla "$@"\n')
    (tmp_path / "hxla").chmod(0o755)
    script = f"""
PATH={tmp_path}:$PATH
eval "$(hxla completion bash)"
COMP_WORDS=(hxla sche); COMP_CWORD=1
_hxla_completion hxla sche hxla
echo "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        cwd=tmp_path,
        env=own_environment(),
    )
    assert ran.stdout == "schedule\n", ran.stderr


def test_the_entry_point_is_the_tested_one():
    tree = ast.parse((ROOT / "hxla" / "__main__.py").read_text())
    assert [n.module for n in tree.body if isinstance(n, ast.ImportFrom)] == ["_src.cli.main"]
    assert os.access(ROOT / "hxla" / "__main__.py", os.R_OK)

"""What `hxla` says when it is called wrongly: one clear line, exit code 2, and no traceback.

The table calls `main` and starts no process; what a shell sees is tested in `test_commands.py`.
"""

import json
import re

import numpy as np
import pytest
from flax import nnx

import hxla
from hxla.__main__ import main

CPU = '[[device]]\nkind = "cpu"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scripts, meshes and plans, right and wrong."""
    folder = tmp_path_factory.mktemp("misuse")
    (folder / "train.py").write_text("print('no training here')\n")
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    (folder / "notes.txt").write_text("Buy milk.\nCall Ann.\n")
    (folder / "bad.py").write_text("import hxla\nfor x in range(3)\n    pass\n")
    (folder / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "broken.toml").write_text("name = \n")
    (folder / "empty.toml").write_text('name = "mine"\n')
    (folder / "typo.toml").write_text(f'name = "mine"\n{CPU}core_shares = 0.5\n')
    (folder / "jobs.csv").write_text(
        "name,time,steps,microbatches,min_devices,kind,mixed,seconds_V100\na,0,9,8,1,V100,1,0.5\n"
    )
    graph = hxla.trace(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        lambda model, batch: model(batch["x"]).mean(-1),
        {"x": np.ones((4, 4), np.float32)},
    )
    plan = hxla.make_plan(graph, hxla.load_cluster("cpu-1.0-0.33"), batch_size=16)
    plan.write(folder / "plan.json")
    table = json.loads(plan.to_json())
    (folder / "unknown.json").write_text(json.dumps(table | {"replica": 3}))
    (folder / "damaged.json").write_text(json.dumps(table | {"mesh": "name = "}))
    return folder


MISUSES = {
    # The program.
    "rum train.py": "hxla: No such command 'rum'. Did you mean 'run'?",
    "train.py": "hxla: No such command 'train.py'. Did you mean hxla run train.py?",
    "-n 2 train.py": "hxla: No such option '-n'.",
    "--verison": "hxla: No such option '--verison'. Did you mean '--version'?",
    "help rum": "hxla: No such command 'rum'. Did you mean 'run'?",
    "help run fast": "hxla run: It has no commands.",
    "completion": "hxla completion: Missing argument 'SHELL'.",
    "completion csh": "'csh' is not one of 'bash', 'zsh', 'fish'.",
    # Scripts.
    "run": "hxla run: Missing argument 'SCRIPT'.",
    "run nothing.py": "hxla: no script 'nothing.py' in",
    "run full": "hxla: full is a folder: name a Python script in it",
    "run notes.txt": "hxla: notes.txt is not a Python script: line 1: invalid syntax",
    "run bad.py": "hxla: bad.py is not a Python script: line 2: expected ':'",
    "run cat.png": "hxla: cat.png is not a Python script",
    "run -m nosuch.module": "hxla: -m nosuch.module: there is no module 'nosuch'",
    "run -m train.py": "hxla: -m train.py: that is a file, and -m takes a module: leave out -m",
    "plan --mesh cpu-4-equal nothing.py": "hxla: no script 'nothing.py' in",
    "plan --mesh cpu-4-equal train.py": "train.py ended without a call of hxla.train",
    "profile bad.py": "hxla: bad.py is not a Python script",
    # Options that do not exist.
    "run --nope train.py": "hxla run: No such option '--nope'.",
    "run --mehs cpu-1.0-0.33 train.py": "Did you mean '--mesh'?",
    "plan --mesh cpu-4-equal --stage 2 train.py": "Did you mean '--stages'?",
    "profile --segment 2 train.py": "Did you mean '--segments'?",
    "devices --bogus": "hxla devices: No such option '--bogus'.",
    "devices here": "hxla devices: Got unexpected extra argument",
    "inspect --hmtl page.html dump": "Did you mean '--html'?",
    "schedule simulat jobs.csv": "No such command 'simulat'. Did you mean 'simulate'?",
    "schedule simulate jobs.csv --learn-speeds": "No such option '--learn-speeds'.",
    "schedule replay record.jsonl --json x": "hxla schedule replay: No such option '--json'.",
    # Meshes.
    "run --mesh cpu-1.0-0.3 train.py": "did you mean 'cpu-1.0-0.33'?",
    "run --mesh nothing.toml train.py": "'nothing.toml' is neither a file nor a built-in name",
    "run --mesh broken.toml train.py": "broken.toml is not TOML",
    "run --mesh empty.toml train.py": "device: missing, add [[device]]",
    "run --mesh typo.toml train.py": "core_shares: unknown key, did you mean 'core_share'?",
    "run --mesh whale-8v100-8p100 train.py": "nodes and hxla run starts the processes of one",
    "run --mesh cpu-4-equal -n 2 train.py": "--mesh and -n exclude each other: give one.",
    "plan --tensor 2 train.py": "--tensor is for a search, which needs the times of --profile or",
    "plan train.py --mesh cpu-4-equal": "--mesh stands after train.py, so the script gets it",
    "plan --mesh whale-8v10-8p100 train.py": "did you mean 'whale-8v100-8p100'?",
    # Plans.
    "run --plan nothing.json train.py": "'--plan': File 'nothing.json' does not exist.",
    "run --plan full train.py": "'--plan': File 'full' is a directory.",
    "run --plan notes.txt train.py": "notes.txt: this is no plan that can be run",
    "run --plan unknown.json train.py": "replica: there is no such key",
    "run --plan damaged.json train.py": "plan damaged.json: key 'mesh' is not TOML",
    "run --plan plan.json --mesh cpu-4-equal train.py": "is cpu in the plan and cpu@0.45 in cpu-4",
    "run --plan plan.json --elastic train.py": "leave out --plan",
    # Numbers.
    "run -n 0 train.py": "hxla: -n 0: start at least one process",
    "run -n -1 train.py": "hxla: -n -1: start at least one process",
    "run -n two train.py": "'-n': 'two' is not a valid int",
    "run --grace -1 train.py": "hxla: --grace -1: use no less than zero seconds",
    "run --grace nan train.py": "'--grace': 'nan' is not a number of seconds.",
    "run --elastic --min 3 --max 2 train.py": "--min 3 --max 2: use 1 <= min <= max",
    "run --elastic --heartbeat soon train.py": "'--heartbeat': 'soon' is not a number of seconds.",
    "run --elastic --heartbeat 0.1 train.py": "--heartbeat 0.1: use more than one second",
    "plan --mesh cpu-4-equal --stages 0 train.py": "'--stages': 0 is not in the range x>=1.",
    "plan --mesh cpu-4-equal --tensor 2,x train.py": "'2,x' is not a list of whole numbers from 1",
    "profile --microbatch-sizes 0 train.py": "'0' is not a list of whole numbers from 1",
    "profile --segments 0 train.py": "'--segments': 0 is not in the range x>=1.",
    "inspect full --limit 0": "'--limit': 0 is not in the range x>=1.",
    "inspect full --axes data": "'data' is not a list of axes and their sizes",
    "schedule simulate jobs.csv --devices V100": "is not a list of kinds of devices",
    "schedule simulate jobs.csv --gangs all": "'all' is not one of 'asked', 'most'.",
    # Options that need others, or exclude them.
    "run --min 2 train.py": "hxla: --min needs --elastic: give that too",
    "run --ray auto train.py": "hxla: --ray needs --elastic: give that too",
    "run --elastic --nodes notes.txt train.py": "--nodes are those of a Ray cluster: give --ray",
    "inspect": "hxla: say what to inspect: a dump, or --bits A B",
    "inspect full --device cpu:0": "--device and --microbatch-size are for --bits",
    "inspect full --bits one": "Option '--bits' requires 2 arguments.",
    "inspect full --predicted plan.json": "--predicted is drawn on a page: give --html FILE",
    "schedule explain jobs.csv --policy weighing": "Missing option '--at'.",
    "schedule explain jobs.csv --at 3": "hxla: explain tells the decision of one policy",
    "schedule simulate jobs.csv --policy best": "hxla: no policy best: there are one-at-a-time",
    # Files to read and to write.
    "inspect nothing": "nothing",
    "schedule simulate nothing.csv": "hxla: trace nothing.csv cannot be read",
    "schedule replay nothing.jsonl": "nothing.jsonl",
    "devices --write plan.json": "plan.json exists: remove it",
    "run --dump full train.py": "hxla: --dump full: it is not empty",
    "run --elastic --events no/file train.py": "there is no folder 'no' to write 'no/file' into.",
    "plan --mesh cpu-4-equal --write no/plan.json train.py": "there is no folder 'no'",
    "plan --mesh cpu-4-equal --profile no.json train.py": "File 'no.json' does not exist.",
    "profile --write full train.py": "'--write': File 'full' is a directory.",
}


@pytest.mark.parametrize("words", MISUSES)
def test_a_misuse_gets_one_clear_line(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert MISUSES[words] in said
    assert "Traceback" not in said
    lines = said.splitlines()
    if lines[0].startswith("Usage: hxla"):
        [line] = lines[1:]
        command = re.match(r"hxla(?: [a-z]+)*(?=:)", line)[0]
        assert line.endswith(f"See {command} --help.")
    assert len(lines) <= 3


def test_there_are_forty_misuses_and_each_command_has_some():
    assert len(MISUSES) >= 40
    commands = {words.split()[0] for words in MISUSES}
    assert {"run", "plan", "profile", "devices", "inspect", "schedule", "help"} <= commands


def test_an_option_behind_the_script_is_the_scripts_and_is_told(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    command = ["run", "-n", "0", "train.py", "--mesh", "cpu-4-equal", "--steps", "3"]
    assert main(command) == 2
    said, _ = capsys.readouterr().err.splitlines()
    assert said.startswith("hxla: --mesh stands after train.py, so the script gets it;")

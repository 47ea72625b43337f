"""Files that a mistake or a malicious hand could bring: one error, in bounded time and memory."""

import gzip
import json
import os
import pathlib
import signal
import threading

import pytest

import hxla
from support import fuzz_kinds
from support.inside.core import as_config, local_path, unpack
from support.launched import PATIENCE_SECONDS, start

DEEP = "[" * 100_000
MESH = 'name = "m"\n[[device]]\nkind = "cpu"\n'
RULES = "name = 'r'\n[[rule]]\npath = '{path}'\naxes = ['', 'tensor']\n"
READERS = {
    "plan.json": (hxla.Plan.read, hxla.PlanError),
    "profile.json": (hxla.load_profile, hxla.PlanError),
    "mesh.toml": (lambda path: hxla.load_cluster(str(path)), hxla.MeshError),
    "rules.toml": (lambda path: hxla.load_rules(str(path)), hxla.ConfigError),
    "config.json": (lambda path: as_config(path, {}), hxla.ConfigError),
    "config.toml": (lambda path: as_config(path, {}), hxla.ConfigError),
    "module_0000.step.after_optimizations.txt": (hxla.inspect, hxla.InspectError),
}


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path)


def large(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nested(path):
    path.write_text(DEEP if path.suffix == ".json" else f"a = {DEEP}")


def keys_of_many_parts(path):
    path.write_text("{" if path.suffix == ".json" else "a." * 100_000 + "a = 1")


def no_text(path):
    path.write_bytes(b"\xff\xfe\x00")


WRONG = (pipe, endless, loop, large, nested, keys_of_many_parts, no_text)


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_a_kind_is_refused(name, make, tmp_path):
    path = tmp_path / name
    make(path)
    read, error = READERS[name]
    with pytest.raises(error) as refused:
        read(path)
    assert len(str(refused.value)) < 1000


def table(change):
    found = json.loads(fuzz_kinds.plan_text())
    change(found)
    return hxla.Plan.from_json(json.dumps(found))


PLAN = hxla.Plan.from_json(fuzz_kinds.plan_text())
REFUSED = {
    "a negative count": (lambda: PLAN.with_counts((9, -1)), "num_microbatches: .*not -1"),
    "too few counts": (lambda: PLAN.with_counts((8,)), "1 counts for 2 replicas"),
    "a count in words": (lambda: PLAN.with_counts(("5", 3)), "valid integer, not '5'"),
    "a count that is a fraction": (lambda: PLAN.with_counts((5.5, 2.5)), "valid integer"),
    "a count that is a boolean": (lambda: PLAN.with_counts((True, 7)), "valid integer, not True"),
    "a batch without end": (lambda: table(lambda t: t.update(batch_size=10**400)), "batch_size: "),
    "no dtype": (lambda: table(lambda t: t["parameters"][0].update(dtype="O")), "no dtype of"),
    "a dimension without end": (
        lambda: table(lambda t: t["parameters"][0].update(shape=[10**30, 16])),
        r"parameters\.0\.shape\.0: ",
    ),
    "a microbatch of a million": (
        lambda: hxla.schedule_from_table([["F1000000"], ["B1000000"]]),
        "names 1,000,001 microbatches of 1 chunks.* in 2 ticks",
    ),
    "a chunk of a million": (
        lambda: hxla.schedule_from_table([["F0.1000000"], ["B0.1000000"]]),
        "1,000,001 chunks",
    ),
    "a number in a schedule": (lambda: hxla.schedule_from_table([[0]]), "0 is no operation"),
    "no schedule": (lambda: hxla.schedule_from_table(7), "a list of ticks.*not 7"),
    "a schedule of a billion": (
        lambda: hxla.make_schedule("gpipe", 2, 10**9),
        "2 stages, 1,000,000,000 microbatches.*at most",
    ),
    "stages that are a boolean": (
        lambda: hxla.make_schedule("gpipe", True, 4),
        "numbers are whole numbers, not True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_or_schedule_that_no_job_has_is_refused(name):
    use, words = REFUSED[name]
    with pytest.raises(hxla.PlanError, match="(?s)" + words):
        use()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("memory_gib = 1e300", r"memory_gib: .*found 1e\+300"),
        ("memory_gib = true", "memory_gib: .*found True"),
        ("count = 1e3", "count: .*valid integer"),
        ("memory_gigabytes_per_second = 1e-300", "memory_gigabytes_per_second: .*found 1e-300"),
        ("speeds = { a = { steps_per_second = 1e300, batch_size = 1 } }", "steps_per_second: "),
    ],
)
def test_a_figure_that_no_device_has_is_refused(tmp_path, line, words):
    (tmp_path / "m.toml").write_text(f"{MESH}{line}\n")
    with pytest.raises(hxla.MeshError, match=words):
        hxla.load_cluster(str(tmp_path / "m.toml"))


def test_a_cluster_has_so_many_devices_at_most(tmp_path):
    text = (
        'name = "m"\n[[node]]\nname = "a"\ncount = 65536\n[node.link]\ngigabytes_per_second = 1\n'
    )
    text += '[[node.device]]\nkind = "cpu"\ncount = 65536\n[[link]]\ngigabytes_per_second = 1\n'
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(hxla.MeshError, match="4294967296 devices in all, describe 65536 at most"):
        hxla.load_cluster(str(tmp_path / "m.toml"))


@pytest.mark.parametrize(
    "path",
    ["(a+)+$", "(a|a)*b", "((a?){30})a", "(?x)(a+) +$", ".*.*.*.*.*.*x", "a?" * 30 + "a" * 30,
     "a{99999999999}", "(" * 200 + ")" * 200, "a" * 1000, "(", "(?:(?i:a)+)+"],
)  # fmt: skip
def test_a_pattern_that_may_take_for_ever_is_refused(tmp_path, path):
    (tmp_path / "r.toml").write_text(RULES.format(path=path))
    with pytest.raises(hxla.ConfigError, match=r"rule\.0\.path: "):
        hxla.load_rules(str(tmp_path / "r.toml"))


@pytest.mark.parametrize(
    "path",
    [r"layers_\d+/.*/(query|key|value)/kernel", r"(.*/)?mlp/up[^/]*/kernel", r"attn/(?!out).*",
     r"(?i)Dense_[0-9]{1,3}/kernel", r"blocks/\d+/(?P<part>[a-z]+)/kernel$", r"a\+\(b\|c\)+"],
)  # fmt: skip
def test_a_usual_pattern_is_taken(tmp_path, path):
    (tmp_path / "r.toml").write_text(RULES.format(path=path))
    assert hxla.load_rules(str(tmp_path / "r.toml")).rules[0].path == path


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"checkpoint": {"keep": True}}, "checkpoint.keep: .*found True"),
        ({"checkpoint": {"keep": "3"}}, "checkpoint.keep: .*found '3'"),
        ({"auto": {"auto_parallel": 1}}, "auto.auto_parallel: .*found 1"),
        (
            {"watchdog": {"heartbeat_timeout_seconds": float("inf")}},
            "heartbeat_timeout_seconds: .*found inf",
        ),
        ({"a" * 5000: {}}, r"aaa\.\.\.: unknown key"),
    ],
)
def test_a_setting_of_another_type_is_refused(section, words):
    with pytest.raises(hxla.ConfigError, match=words):
        as_config(section, {})


def test_settings_of_a_script_may_be_tuples():
    given = {"cluster": {"visible_devices": (0, 1), "layout": ((0,), (1,))}}
    assert as_config(given, {}).cluster.layout == [[0], [1]]


def test_a_dump_for_more_devices_than_there_are_is_read_and_says_so(tmp_path):
    text = fuzz_kinds.kinds()["HLO text"].text.decode()
    head, body = text.split("\n", 1)
    head = head.replace("num_partitions=4", "num_partitions=99999999999")
    assert "99999999999" in head
    path = tmp_path / "module_0000.step.cpu_after_optimizations.txt"
    path.write_text(f"{head}\n{body}")
    assert "99999999999 partitions of 1 replicas" in hxla.inspect(path).text()
    path.write_text(
        text.replace("replica_groups={}", "replica_groups=[1,9999999999]<=[9999999999]")
    )
    hxla.inspect(path).text()


@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"abc", b"", b"de" * 1000]])
def test_a_packed_file_is_unpacked_whole_or_said_to_be_cut_off(parts):
    packed = b"".join(map(gzip.compress, parts))
    assert unpack(packed) == (gzip.decompress(packed), "")
    assert unpack(packed + b"\0\0") == (gzip.decompress(packed), "")
    assert unpack(packed[:-1])[1] == "it was cut off"
    with pytest.raises(ValueError, match="header"):
        unpack(packed + b"no gzip")


def test_a_packed_file_unpacks_to_no_more_than_such_files_do(tmp_path):
    bomb = gzip.compress(bytes(1 << 28), 1)
    with pytest.raises(ValueError, match="it unpacks to more than"):
        unpack(bomb)
    path = tmp_path / "module_0000.step.cpu_after_optimizations.txt.gz"
    path.write_bytes(bomb)
    with pytest.raises(hxla.InspectError, match="it unpacks to more than"):
        hxla.inspect(path)
    text = fuzz_kinds.kinds()["HLO text"].text
    assert unpack(gzip.compress(text)) == (text, "")


def test_a_bad_mesh_file_does_not_end_the_job_that_is_told_to_read_it_again(tmp_path):
    mesh = tmp_path / "own.toml"
    good = f"{MESH}core_share = 0.5\n"
    mesh.write_text(good)
    code = (
        "import os, time\nprint('up', flush=True)\n"
        "while not os.path.exists('done'):\n    time.sleep(0.1)\n"
    )
    job = start(tmp_path, code, "--mesh", str(mesh))
    late = threading.Timer(PATIENCE_SECONDS, job.kill)  # which ends its output, and the wait below
    late.start()
    lines = []

    def until(words):
        for line in iter(job.stderr.readline, ""):
            lines.append(line)
            if words in line:
                return
        pytest.fail(f"the job ended, or took {PATIENCE_SECONDS:g} s, without {words!r}: {lines}")

    assert "up" in job.stdout.readline()
    for text in (None, "", "name = [", DEEP, "pipe", f"{MESH}memory_gib = 1e300\n", "folder"):
        if mesh.exists():
            mesh.unlink()
        if text == "pipe":
            os.mkfifo(mesh)
        elif text == "folder":
            mesh.mkdir()
        elif text is not None:
            mesh.write_text(text)
        job.send_signal(signal.SIGUSR1)
        until("shares stay as they are")
    mesh.rmdir()
    mesh.write_text(good.replace("0.5", "0.7"))
    job.send_signal(signal.SIGUSR1)
    until("0.7")
    (tmp_path / "done").touch()
    try:
        job.communicate(timeout=PATIENCE_SECONDS)
    finally:
        late.cancel()
    assert job.returncode == 0, lines


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("runs/1", "runs/1"),
        (pathlib.Path("runs"), "runs"),
        ("~/runs", "{home}/runs"),
        ("~", "{home}"),
        ("file:///runs/a%20b", "/runs/a b"),
        ("file://localhost/runs", "/runs"),
        (pathlib.Path("file:///runs"), "/runs"),
        ("a:b", "a:b"),
    ],
    ids=str,
)
def test_where_to_write_is_a_path_of_this_machine(monkeypatch, tmp_path, given, meant):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = local_path(given, "run_dir", hxla.ConfigError)
    assert str(found) == meant.format(home=tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gs://bucket/x", "is an address"),
        (pathlib.Path("s3://bucket/x"), "is an address"),
        ("hdfs://name:8020/x", "is an address"),
        ("file://host/x", "is an address"),
        ("file://", "is empty"),
        (" ", "is empty"),
        ("~no_such_user/x", "names a user that is not known"),
        ("$SCRATCH/x", "expandvars"),
        (b"x", "is no path"),
        (True, "is no path"),
    ],
    ids=str,
)
def test_what_is_no_path_of_this_machine_is_refused(given, words):
    with pytest.raises(hxla.ConfigError, match=f"run_dir=.*{words}"):
        local_path(given, "run_dir", hxla.ConfigError)

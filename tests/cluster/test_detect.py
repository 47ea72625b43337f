"""`hxla devices` on this machine, and what it makes of NVML's answers.

The command runs for real, without a driver. Where cards are needed, functions of the real `pynvml`
are replaced by ones that answer as NVML does; where figures are, the clock.
"""

import dataclasses
import os
import re
import subprocess
import sys
import types

import jax
import pynvml
import pytest

from hxla import MeshError, Rate, load_cluster
from hxla.__main__ import main
from support.inside.cluster import _hardware, describe, detect, device_kind, dump_cluster
from support.inside.jax import multiprocessors
from support.inside.launch import num_gpus
from support.launched import PATIENCE_SECONDS
from support.paths import PYTHONPATH


def run_alone(folder, code, **environment):
    """Python code in a process without the settings of this one."""
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        cwd=folder,
        env=clean | {"PYTHONPATH": PYTHONPATH} | environment,
    )


@pytest.fixture(scope="module")
def no_driver():
    if num_gpus():
        pytest.skip("an NVIDIA driver is here")


COMMANDS = """
import sys, jax
from hxla.__main__ import main

def devices(*options):
    code = main(["devices", *options])
    for file in (sys.stdout, sys.stderr):
        print(f"code {code}", file=file)

devices()
devices("--measure", "--write", "x.toml")
jax.config.update("jax_platforms", "cpu")
devices("--write", "here.toml")
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory, no_driver):
    """Commands of one process, first for cards that are not there, then for the CPU.

    Returns their folder, and the exit code, the output and the errors of each.
    """
    folder = tmp_path_factory.mktemp("commands")
    ran = run_alone(folder, COMMANDS, JAX_PLATFORMS="cuda")
    assert ran.returncode == 0, ran.stderr
    parts = [re.split(r"code (\d)\n", text) for text in (ran.stdout, ran.stderr)]
    (*outs, _), (*errors, _) = parts
    return folder, list(zip(map(int, outs[1::2]), outs[::2], errors[::2], strict=True))


def test_without_a_driver_the_cores_are_the_devices(commands):
    folder, [*_, (code, out, error)] = commands
    assert code == 0, error
    cluster = load_cluster(str(folder / "here.toml"))
    assert [d.kind for d in cluster.devices] == ["cpu"] * len(os.sched_getaffinity(0))
    assert sum(d.memory_bytes for d in cluster.devices) > 2**28
    assert cluster.devices[0].rates == ()
    assert len([line for line in out.splitlines() if " cpu " in line]) == len(cluster.devices)


def test_a_platform_that_is_not_here_is_said_and_cannot_be_measured(commands):
    folder, [(code, out, error), (code_measured, _, error_measured), _] = commands
    assert code == 0
    assert "JAX found no devices" in error
    assert " cpu " in out
    assert code_measured == 2
    assert "nothing to measure: JAX found no devices" in error_measured
    assert not (folder / "x.toml").exists()


def test_a_file_that_is_there_or_whose_folder_is_missing_is_refused(tmp_path, no_driver, capsys):
    file = tmp_path / "here.toml"
    file.write_text("")
    assert main(["devices", "--write", str(file)]) == 2
    assert "here.toml exists: remove it" in capsys.readouterr().err
    assert main(["devices", "--write", str(tmp_path / "no" / "here.toml")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_more_devices_than_cores_are_said(no_driver, capsys):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert main(["devices"]) == 0
    finally:
        os.sched_setaffinity(0, cores)
    said = capsys.readouterr()
    assert f"{jax.device_count()} devices share 1 cores" in said.err
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[:2] for row in rows if "cpu" in row] == [
        [str(i), "cpu"] for i in range(jax.device_count())
    ]


@pytest.fixture
def stopwatch(monkeypatch):
    """Each measured computation runs once, and takes the next of these seconds, then the last."""
    seconds = []

    def timed(run):
        jax.block_until_ready(run())
        return seconds.pop(0) if len(seconds) > 1 else seconds[0]

    monkeypatch.setattr(_hardware, "median_seconds", timed)
    return seconds


def test_a_rate_is_what_was_done_over_the_seconds_it_took(stopwatch):
    [device, *_] = jax.local_devices()
    # From 256 on twice as large, as long as a product takes less than 20 ms.
    stopwatch[:] = [4e-3, 0.02]
    assert _hardware.matmul_flops_per_second(device, "float32") == 2 * 512**3 / 0.02
    stopwatch[:] = [0.5]
    assert _hardware.matmul_flops_per_second(device, "tensorfloat32") == 2 * 256**3 / 0.5
    assert _hardware.launch_seconds(device) == 0.5 / 128
    assert _hardware.copy_bytes_per_second(device, 1 << 20) == 2 * (1 << 20) / 0.5
    stopwatch[:] = [0.25, 0.5]  # the slower way counts
    assert _hardware.host_bytes_per_second(device, 1 << 20) == (1 << 20) / 0.5
    assert multiprocessors(device) is None


def test_devices_are_measured_and_written(tmp_path, no_driver, stopwatch, monkeypatch, capsys):
    two = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda: two)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the command changes it
    stopwatch[:] = [0.25]
    cores = os.sched_getaffinity(0)
    assert main(["devices", "--measure", "--write", str(tmp_path / "here.toml")]) == 0
    assert os.sched_getaffinity(0) == cores
    said = capsys.readouterr().out
    cluster = load_cluster(str(tmp_path / "here.toml"))
    device, other = cluster.devices
    assert device == other
    for dtype in ("float32", "bfloat16"):
        assert device.rate(dtype).measured
        assert device.rate(dtype).flops_per_second == pytest.approx(2 * 256**3 / 0.25, rel=1e-3)
        assert f"{dtype} TFLOP/s" in said
    assert device.memory_bytes_per_second > 0
    link = cluster.link(0, 1)
    sizes = [2**12, 2**16, 2**20, 2**24, 2**27]
    assert link.curve == tuple((s, pytest.approx(s / 0.25, rel=1e-3)) for s in sizes)
    assert link.bytes_per_second == pytest.approx(2**27 / 0.25, rel=1e-3)
    assert link.latency_seconds == pytest.approx(0.25, rel=1e-3)
    assert "0 - 1  0.5369 GB/s and 2.5e+05 us measured" in said


@pytest.mark.slow
def test_devices_are_measured_by_the_clock(tmp_path, no_driver):
    options = ["devices", "--measure", "--write", "here.toml"]
    code = f"import sys; from hxla.__main__ import main; sys.exit(main({options}))"
    flags = "--xla_force_host_platform_device_count=2"
    ran = run_alone(tmp_path, code, XLA_FLAGS=flags)
    assert ran.returncode == 0, ran.stderr
    cluster = load_cluster(str(tmp_path / "here.toml"))
    again = load_cluster_from(tmp_path, dump_cluster(cluster))
    assert again == cluster.model_copy(update={"file": ""})
    device, other = cluster.devices
    assert device == other
    # Any core since 2010 multiplies at 1 to 1000 GFLOP/s and copies at 0.5 to 200 GB/s.
    assert 1e9 < device.rate("float32").flops_per_second < 1e12
    assert 5e8 < device.memory_bytes_per_second < 2e11
    link = cluster.link(0, 1)
    assert 1e-7 < link.latency_seconds < 1e-2
    assert link.seconds(2**27) == pytest.approx(2**27 / link.bytes_per_second)


def load_cluster_from(folder, text):
    path = folder / "again.toml"
    path.write_text(text)
    return load_cluster(str(path)).model_copy(update={"file": ""})


class Cards:
    """Answers as NVML gives them for cards 0 and 1 joined by NVLink, and 2 over PCIe only."""

    names = ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 3090")
    switch = False

    def __init__(self, monkeypatch):
        self.links = {0: [1, 1], 1: [0, 0], 2: None}
        for name in (n for n in vars(type(self)) if n.startswith("nvml")):
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self):  # noqa: N802
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, card):  # noqa: N802
        return self.names[card].encode() if card == 2 else self.names[card]  # either is seen

    def nvmlDeviceGetUUID(self, card):  # noqa: N802
        return f"GPU-{card}"

    def nvmlDeviceGetMemoryInfo(self, card):  # noqa: N802
        return types.SimpleNamespace(total=(80 - card) << 30, free=(70 - card) << 30)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card):  # noqa: N802
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, card):  # noqa: N802
        return 8 if card == 2 else 16

    def nvmlDeviceGetPciInfo(self, card):  # noqa: N802
        return types.SimpleNamespace(busId=f"00000000:{card}B:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):  # noqa: N802
        return pynvml.NVML_TOPOLOGY_HOSTBRIDGE if other == 2 else pynvml.NVML_TOPOLOGY_SYSTEM

    def nvmlDeviceGetNvLinkState(self, card, link):  # noqa: N802
        if self.links[card] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(link < len(self.links[card]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, card, link):  # noqa: N802
        kinds = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        return kinds[self.switch]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card, link):  # noqa: N802
        return self.nvmlDeviceGetPciInfo(self.links[card][link])

    def nvmlDeviceGetFieldValues(self, card, fields):  # noqa: N802
        assert fields == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        value = types.SimpleNamespace(uiVal=25_000)
        return [types.SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value)]


def test_cards_that_jax_does_not_see_are_described_by_nvml(monkeypatch, tmp_path):
    Cards(monkeypatch)
    here = detect(2)
    assert num_gpus() == 3
    assert [(d.kind, d.memory_bytes >> 30, d.uuid) for d in here.devices] == [
        (name, 80 - i, f"GPU-{i}") for i, name in enumerate(Cards.names)
    ]
    assert [f >> 30 for f in here.free_bytes] == [70, 69, 68]
    assert any("JAX does not see the GPUs" in note for note in here.notes)
    wires = {wire.cards: (wire.name, wire.bytes_per_second) for wire in here.wires}
    assert wires[0, 1] == ("NV2", 50e9)
    # PCIe 4.0 x8: 16 GT/s on 8 lanes, 128 of 130 bits.
    assert wires[0, 2] == ("PHB", pytest.approx(16e9 * 8 / 8 * 128 / 130))
    cluster = describe(here, "three")
    assert cluster.link(0, 1).bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert load_cluster_from(tmp_path, dump_cluster(cluster)) == cluster


def test_through_a_switch_all_links_lead_everywhere(monkeypatch):
    cards = Cards(monkeypatch)
    cards.switch, cards.links = True, {0: [0] * 12, 1: [0] * 12, 2: [0] * 6}
    assert {w.cards: w.name for w in detect(2).wires} == {
        (0, 1): "NV12",
        (0, 2): "NV6",
        (1, 2): "NV6",
    }


class Handle:
    """What JAX says of a GPU; like ROCm it gives the first card's name to all."""

    platform = "gpu"
    device_kind = "the first card"

    def __init__(self, number, limit=None):
        self.local_hardware_id = number
        self._limit = limit

    def memory_stats(self):
        return self._limit and {"bytes_limit": self._limit}


def test_visible_cards_take_their_names_from_nvml_and_their_memory_from_jax(monkeypatch):
    Cards(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setattr(jax, "local_devices", lambda: [Handle(0, 18 << 30), Handle(1)])
    here = detect(2)
    assert [(d.kind, d.memory_bytes >> 30) for d in here.devices] == [
        ("NVIDIA GeForce RTX 3090", 18),
        ("NVIDIA A100 80GB PCIe", 80),
    ]
    assert device_kind(Handle(0)) == "NVIDIA GeForce RTX 3090"
    assert here.notes == ("JAX does not use 1 of 3 NVIDIA GPUs",)
    assert [(w.cards, w.name) for w in here.wires] == [((0, 1), "PHB")]


def test_like_devices_are_described_alike_by_their_median(monkeypatch, tmp_path):
    Cards(monkeypatch)
    here = detect(2)
    bandwidths = {(0, 1): 5e10, (0, 2): 1e10, (1, 2): 9e9}
    curves = {pair: ((4096.0, 1e8), (1e8, b)) for pair, b in bandwidths.items()}
    figures = ((1.234567e13, 1.8e12), (1.2e13, 1.7e12), (9e12, 9e11))
    launches = (3e-6, 5e-6, 1.23456e-5)
    measured = [
        device.model_copy(
            update={
                "rates": (Rate(dtype="float32", flops_per_second=rate, source="measured"),),
                "memory_bytes_per_second": memory,
                "launch_seconds": launch,
            }
        )
        for device, (rate, memory), launch in zip(here.devices, figures, launches, strict=True)
    ]
    here = dataclasses.replace(here, devices=tuple(measured), curves=curves)
    cluster = describe(here, "three")
    assert cluster.name == "three"
    rates = [d.rate("float32").flops_per_second for d in cluster.devices]
    assert rates == [1.217e13, 1.217e13, 9e12]
    assert [d.memory_bytes_per_second for d in cluster.devices] == [1.75e12, 1.75e12, 9e11]
    assert [d.launch_seconds for d in cluster.devices] == [4e-6, 4e-6, 1.235e-5]
    assert cluster.link(0, 1).curve[-1] == (1e8, 9e9)  # the slowest pair's
    assert cluster.link(0, 1).latency_seconds == pytest.approx(4096 / 1e8)
    assert load_cluster_from(tmp_path, dump_cluster(cluster)) == cluster


def test_the_files_of_two_machines_make_one_cluster(monkeypatch, tmp_path):
    Cards(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    first = dump_cluster(describe(detect(2), "both"))
    second = first.partition("\n")[2].replace('"node"', '"other"').replace("GPU-0", "GPU-9")
    link = "[[link]]\ngigabytes_per_second = 1\n"
    cluster = load_cluster_from(tmp_path, first + second + link)
    assert [(d.node, d.uuid) for d in cluster.devices] == [(0, "GPU-0"), (1, "GPU-9")]
    with pytest.raises(MeshError, match=r"'node' names an earlier node(.|\n)*GPU-0' is in"):
        load_cluster_from(tmp_path, first + first.partition("\n")[2] + link)

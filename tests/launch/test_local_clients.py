"""Accelerators that know their own process only, in one job with processors that know all."""

import os
import subprocess
import sys

import pytest

import hxla
from hxla import join
from support.inside.launch import place_of, process_environment
from support.paths import JOBS, PYTHONPATH
from support.process_results import results_of


@pytest.mark.slow
def test_they_train_with_others_to_the_same_bits(tmp_path):
    """Two of three processes have a backend of their own, which jax would make one for all."""
    told = results_of(
        *("local_clients_job.py", 3, "host", tmp_path),
        timeout=300,
        XLA_FLAGS="",
        HXLA_LOCAL_CLIENTS="1",
        PYTHONPATH=f"{JOBS / 'local_clients'}:{PYTHONPATH}",
    )
    wanted = results_of("local_clients_job.py", 3, "device", timeout=300, XLA_FLAGS="")
    for rank, (own, other) in enumerate(zip(told, wanted, strict=True)):
        assert not other["0"]["apart"]
        for found in own.values():
            assert (found["apart"], found["process"]) == (rank > 0, rank)
            assert found["sha256"] == other["0"]["sha256"]
            assert found["loss"] == other["0"]["loss"]
            assert found["measured"] > 0
        assert own["resumed"]["first step"] == 2


def test_each_process_has_its_own_card_and_the_backend_through_which_they_meet(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cpu, nvidia, amd = (hxla.Device(kind=kind) for kind in ("cpu", "NVIDIA L4", "AMD MI250X"))
    one = process_environment(1, nvidia, (nvidia, nvidia), None)
    assert "HXLA_LOCAL_CLIENTS" not in one
    unlike = (cpu, nvidia, amd, nvidia)
    places = [place_of(rank, unlike) for rank in range(4)]
    assert places == [0, 0, 0, 1]
    pairs = list(zip(places, unlike, strict=True))
    found = [process_environment(*pair, unlike, None) for pair in pairs]
    assert [env["JAX_PLATFORMS"] for env in found] == ["cpu", "cpu,cuda", "cpu,rocm", "cpu,cuda"]
    assert {env["HXLA_LOCAL_CLIENTS"] for env in found} == {"1"}
    # Those that are fast wait in the processors' collectives too.
    assert all("--xla_cpu_collective_timeout_seconds=7200" in env["XLA_FLAGS"] for env in found)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found[1:]] == ["0", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    found = [process_environment(*pair, unlike, None) for pair in pairs]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found[1:]] == ["5", "5", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(hxla.LaunchError, match=r"DEVICES=5 names 1 cards, .* number 2"):
        process_environment(*pairs[3], unlike, None)


def test_the_processor_must_be_named_first(monkeypatch):
    monkeypatch.setenv("HXLA_LOCAL_CLIENTS", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    with pytest.raises(hxla.LaunchError, match=r"'cuda,cpu' must name cpu first, such as cpu,cuda"):
        join()


@pytest.mark.slow
def test_a_card_that_is_not_there_is_one_clear_error(tmp_path):
    mesh = tmp_path / "mesh.toml"
    devices = '[[device]]\nkind = "cpu"\n[[device]]\nkind = "NVIDIA L4"\n'
    mesh.write_text(f'name = "x"\n{devices}')
    script = tmp_path / "script.py"
    script.write_text("import local_clients_job\nlocal_clients_job.trained(None, 1)\n")
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "--mesh", str(mesh), str(script)],
        env=os.environ | {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{JOBS}", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = ran.stdout + ran.stderr
    assert ran.returncode
    assert "NVIDIA L4 (NCCL) share no library for collectives: they meet in their hosts" in said
    assert "JAX found no devices: JAX_PLATFORMS=cpu,cuda names an accelerator, and none is" in said

"""Which cards and drivers the installed jax supports, and what to install where it does not."""

import tomllib

import pynvml
import pytest

from support.inside.cluster import REQUIREMENTS, Card, detect, extra_for, unsupported
from support.paths import ROOT


def card(name, *capability):
    return Card(
        index=0,
        name=name,
        uuid="GPU-0",
        total_bytes=1,
        free_bytes=1,
        pcie=None,
        capability=capability or None,
    )


V100, P100, T4 = card("Tesla V100", 7, 0), card("Tesla P100", 6, 0), card("Tesla T4", 7, 5)
H100, K80, UNKNOWN = card("NVIDIA H100", 9, 0), card("Tesla K80", 3, 7), card("?")


@pytest.mark.parametrize(
    ("cards", "driver", "extra"),
    [
        ([T4, H100], 580, "cuda13"),
        ([T4, H100], None, "cuda13"),
        ([T4], 550, "cuda12"),
        ([V100], 580, "cuda12"),
        ([P100, H100], 580, "cuda12"),
        ([H100], 470, None),
        ([K80], 580, None),
        ([UNKNOWN], None, "cuda13"),
    ],
)
def test_the_newest_cuda_that_supports_every_card_and_the_driver_is_named(cards, driver, extra):
    assert extra_for(cards, driver) == extra
    if extra is not None:
        cuda = int(extra.removeprefix("cuda"))
        assert list(unsupported(cards, driver, cuda)) == []


def test_a_card_that_cuda_13_does_not_support_is_named_with_the_extra_to_install():
    assert list(unsupported([V100, V100, T4, P100], 580, 13)) == [
        f"Tesla {name} has compute capability {capability}, and this jax with CUDA 13 needs 7.5 "
        "or more: pip uninstall jax-cuda13-plugin jax-cuda13-pjrt; pip install 'jax[cuda12]', "
        "hxla's extra cuda12"
        for name, capability in (("V100", "7.0"), ("P100", "6.0"))
    ]


def test_an_old_driver_is_named_and_a_card_that_nothing_supports_too():
    [said] = unsupported([T4], 535, 13)
    assert said.startswith("the NVIDIA driver is version 535, and this jax with CUDA 13 needs 580")
    assert said.endswith("pip install 'jax[cuda12]', hxla's extra cuda12")
    [said] = unsupported([K80], 525, 12)
    assert "capability 3.7" in said
    assert said.endswith("no version of jax that hxla supports can use all of these cards")
    assert list(unsupported([V100], 470, None)) == []  # a jax without CUDA


def test_each_extra_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for cuda in REQUIREMENTS:
        assert project["optional-dependencies"][f"cuda{cuda}"] == [f"jax[cuda{cuda}]"]


def test_the_driver_is_asked(monkeypatch):
    """NVML's answers for a V100 with driver 550, which this jax without CUDA does not see."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "Tesla V100",
        "nvmlDeviceGetUUID": lambda _: "GPU-0",
        "nvmlDeviceGetMemoryInfo": lambda _: pynvml.c_nvmlMemory_t(16 << 30, 16 << 30, 0),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (7, 0),
        "nvmlSystemGetDriverVersion": lambda: "550.54.14",
        "nvmlDeviceGetPciInfo": lambda _: pynvml.nvmlPciInfo_t(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert (
        "JAX does not see the GPUs: pip install 'jax[cuda12]', hxla's extra cuda12"
        in detect(2).notes
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX does not see the GPUs: unset JAX_PLATFORMS=cpu" in detect(2).notes

"""The device that was asked for, or a refusal that says why; never silently the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.config.run import DeviceName
from gptmill.runtime.device import choose_device, describe_device, explain_no_cuda, find_nvidia_gpus

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="torch can use this machine's GPU"
)
LISTING = """\
GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-1f0e8a2b-0000-0000-0000-000000000000)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2f0e8a2b-0000-0000-0000-000000000000)
  MIG 1g.10gb Device 0: (UUID: MIG-3f0e8a2b-0000-0000-0000-000000000000)
"""


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str, exit_code: int = 0) -> None:
    """A driver's tool that answers like the real one, alone in PATH."""
    (folder / "answer.txt").write_text(output, encoding="utf-8")
    tool = folder / "nvidia-smi"
    lines = ["#!/bin/sh", f"while IFS= read -r line; do echo \"$line\"; done < '{folder}/answer.txt'"]
    tool.write_text("\n".join([*lines, f"exit {exit_code}", ""]), encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture
def _no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_cpu_is_there_for_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTING)
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cpu", local_rank=7) == torch.device("cpu")


@needs_no_gpu
@pytest.mark.usefixtures("_no_driver")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert find_nvidia_gpus() == ""
    assert choose_device("auto") == torch.device("cpu")


@needs_no_gpu
@pytest.mark.usefixtures("_no_driver")
@pytest.mark.parametrize(("wanted", "name"), [("cuda", "NVIDIA"), ("mps", "MPS")])
def test_a_gpu_that_is_not_there_is_a_user_error_with_the_way_out(wanted: DeviceName, name: str) -> None:
    with pytest.raises(UserError, match="--device cpu") as error:
        choose_device(wanted)
    assert name in str(error.value)


@needs_no_gpu
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_named_and_refused_with_the_reason(
    wanted: DeviceName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTING)
    with pytest.raises(UserError, match="--device cpu") as error:
        choose_device(wanted)
    assert "NVIDIA GeForce RTX 3090, NVIDIA A100-SXM4-80GB, but torch cannot use it" in str(error.value)
    assert explain_no_cuda() in str(error.value)


@needs_no_gpu
def test_asking_for_mps_beside_an_nvidia_gpu_speaks_of_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTING)
    with pytest.raises(UserError, match="MPS"):
        choose_device("mps")


def test_the_driver_s_list_of_gpus_is_read_without_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTING)
    assert find_nvidia_gpus() == "this machine has NVIDIA GeForce RTX 3090, NVIDIA A100-SXM4-80GB"


def test_a_driver_without_gpus_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "No devices were found\n", exit_code=6)
    assert find_nvidia_gpus() == ""


@needs_no_gpu
@pytest.mark.parametrize(
    "complaint",
    [
        "Failed to initialize NVML: Driver/library version mismatch",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
        "NVIDIA driver is installed and running.",
    ],
    ids=["mismatch", "no driver"],
)
def test_auto_does_not_pass_over_a_driver_that_is_broken(
    complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, complaint + "\n", exit_code=9)
    with pytest.raises(UserError, match="--device cpu"):
        choose_device("auto")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_the_reason() -> None:
    assert "built without CUDA" in explain_no_cuda()
    assert torch.__version__ in explain_no_cuda()


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_variable_that_hides_the_gpu_is_the_reason(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert f"CUDA_VISIBLE_DEVICES={hidden!r}" in explain_no_cuda()


def test_the_cpu_is_described_with_its_threads() -> None:
    assert describe_device(torch.device("cpu")) == "CPU, 1 thread"

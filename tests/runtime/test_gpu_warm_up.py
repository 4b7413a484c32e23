"""The warm-up's operations work, and it holds up nothing: neither a CPU, nor a GPU that cannot be used."""

from __future__ import annotations

import threading

import pytest
import torch

from gptmill.runtime import gpu_warm_up


def test_the_operations_are_those_of_torch() -> None:
    gpu_warm_up.compute_once(torch.device("cpu"))


def test_a_cpu_needs_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_warm_up, "compute_once", lambda _device: pytest.fail("a CPU was warmed up"))
    gpu_warm_up.start_warm_up(torch.device("cpu"))
    assert all(thread.name != "GPU warm-up" for thread in threading.enumerate())


def test_a_gpu_that_fails_is_left_to_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_device: torch.device) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(gpu_warm_up, "compute_once", fail)
    monkeypatch.setattr(gpu_warm_up, "choose_precision", lambda _wanted, _device: "fp32")
    gpu_warm_up._warm_up(torch.device("cpu"))

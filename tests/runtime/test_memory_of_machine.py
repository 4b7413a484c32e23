"""The machine's memory: its peak grows with what is held, and running out of it is recognised."""

from __future__ import annotations

import pytest
import torch

from gptmill.runtime.memory import is_out_of_memory, read_device_memory, read_peak_memory

CPU = torch.device("cpu")


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert read_device_memory(CPU) is None


def test_the_peak_grows_by_what_is_held_and_stays_when_it_is_gone() -> None:
    before, size = read_peak_memory(CPU), 1 << 29
    held = torch.ones(size, dtype=torch.uint8)
    during = read_peak_memory(CPU)
    assert during >= held.nbytes
    del held
    assert read_peak_memory(CPU) >= during >= before


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(KeyboardInterrupt())

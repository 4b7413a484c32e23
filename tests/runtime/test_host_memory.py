"""Copies in host memory: bit for bit, apart from what they were copied from, and in pages of their own."""

from __future__ import annotations

import mmap

import pytest
import torch

from gptmill.runtime.host_memory import HostBuffer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_equal_and_stays_when_the_original_changes(device: str) -> None:
    tensors = {
        "odd": torch.randn(3, 5, device=device),
        "one": torch.tensor(7.0, device=device),
        "none": torch.empty(0, device=device),
        "half": torch.randn(9, device=device).bfloat16(),
        "turned": torch.randn(4, 6, device=device).t(),
        "bytes": torch.arange(7, dtype=torch.uint8, device=device),
    }
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    buffer = HostBuffer(tensors, torch.device(device))
    copied = buffer.fill(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    if device == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(copied[name], before[name]) for name in tensors)
    assert buffer.fits(tensors)
    assert not buffer.fits({**tensors, "odd": torch.zeros(3, 4)})
    assert not buffer.fits({"odd": tensors["odd"]})


@pytest.mark.parametrize("device", DEVICES)
def test_rooms_can_be_made_and_let_go_again_and_again(device: str) -> None:
    """Small ones too, which would share a page: locking one twice is an error."""
    tensors = {"small": torch.ones(10, device=device)}
    buffers = [HostBuffer(tensors, torch.device(device)) for _ in range(20)]
    del buffers[::2]
    buffers += [HostBuffer(tensors, torch.device(device)) for _ in range(20)]
    starts = {buffer.fill(tensors)["small"].data_ptr() // mmap.PAGESIZE for buffer in buffers}
    assert len(starts) == len(buffers)
    if device == "cuda":
        assert all(buffer._is_pinned for buffer in buffers)

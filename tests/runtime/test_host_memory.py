"""Copies in host memory: bit for bit, apart from what they were copied from, and in pages of their own."""

from __future__ import annotations

import mmap

import pytest
import torch

from gptmill.runtime.host_memory import HostCopy

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
    room = HostCopy(tensors, torch.device(device))
    copied = room.fill(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    if device == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(copied[name], before[name]) for name in tensors)
    assert room.fits(tensors)
    assert not room.fits({**tensors, "odd": torch.zeros(3, 4)})
    assert not room.fits({"odd": tensors["odd"]})


@pytest.mark.parametrize("device", DEVICES)
def test_rooms_can_be_made_and_let_go_again_and_again(device: str) -> None:
    """Small ones too, which would share a page: locking one twice is an error."""
    tensors = {"small": torch.ones(10, device=device)}
    rooms = [HostCopy(tensors, torch.device(device)) for _ in range(20)]
    del rooms[::2]
    rooms += [HostCopy(tensors, torch.device(device)) for _ in range(20)]
    starts = {room.fill(tensors)["small"].data_ptr() // mmap.PAGESIZE for room in rooms}
    assert len(starts) == len(rooms)
    if device == "cuda":
        assert all(room._is_locked for room in rooms)

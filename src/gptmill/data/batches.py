"""Batches as pure functions of their number. The whole state of training data is one integer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptmill.data.order import make_window_order
from gptmill.data.shards import SplitWindows


@dataclass(frozen=True)
class Batch:
    """Tokens and, one place on, the targets that they should predict."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """On the device; from pinned memory the copy overlaps with compute."""
        if device.type == "cpu":
            return self
        pinned = device.type == "cuda"
        tensors = [tensor.pin_memory() if pinned else tensor for tensor in (self.tokens, self.targets)]
        tokens, targets = (tensor.to(device, non_blocking=pinned) for tensor in tensors)
        return Batch(tokens, targets)


def read_train_batch(windows: SplitWindows, seed: int, start: int, size: int) -> Batch:
    """Training windows number start … start + size - 1 of the run, whoever asks for them."""
    numbers = np.arange(start, start + size, dtype=np.int64)
    rows = torch.from_numpy(windows.read(make_window_order(numbers, windows.num_windows, seed)))
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def read_val_batch(windows: SplitWindows, num_chosen: int, start: int, size: int, ignored_target: int) -> Batch:
    """Numbers start … start + size - 1 of `num_chosen` windows spread evenly over the split.

    Numbers past the end repeat the last window with all targets ignored, so that every batch has one shape.
    """
    numbers = np.arange(start, start + size, dtype=np.int64)
    beyond = numbers >= num_chosen
    places = np.minimum(numbers, num_chosen - 1) * windows.num_windows // num_chosen
    rows = torch.from_numpy(windows.read(places))
    targets = rows[:, 1:].clone()
    targets[torch.from_numpy(beyond)] = ignored_target
    return Batch(rows[:, :-1].contiguous(), targets)

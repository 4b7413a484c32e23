"""Random numbers as a pure function of (seed, step, global number of the micro-batch).

Reseeding at every micro-batch means that no generator state has to be saved: a resumed run draws the same numbers as
an uninterrupted one, on any number of ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def make_step_seed(seed: int, step: int, number: int) -> int:
    """A 32-bit seed, the largest that NumPy accepts, hashed so that neighbouring steps are independent."""
    (value,) = np.random.SeedSequence((seed, step, number)).generate_state(1)
    return int(value)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seeds Python, NumPy, and torch on the CPU and on the current device of this type.

    `torch.manual_seed` seeds every device type and records a stack trace for each that is not initialised, which is
    slow enough to matter in every step of a small model.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)

"""All randomness of a step as a pure function of (seed, step, rank).

Seeding anew at every step means that no generator's state has to be saved: a resumed run draws what the
unbroken one would have drawn.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def make_step_seed(seed: int, step: int, rank: int) -> int:
    """A 32-bit seed, the most that NumPy takes, well mixed so that neighbouring steps share nothing."""
    (value,) = np.random.SeedSequence((seed, step, rank)).generate_state(1)
    return int(value)


def seed_everything(seed: int, device: torch.device) -> None:
    """Python, NumPy, and torch on the CPU and on the current device of a type.

    `torch.manual_seed` does that for every type, and for those that do not work it writes down who has called it, in
    case that they ever will: so much in every step that small models feel it.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)

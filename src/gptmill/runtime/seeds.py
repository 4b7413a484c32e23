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


def seed_everything(seed: int) -> None:
    """Python, NumPy, torch on the CPU and torch on every accelerator."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

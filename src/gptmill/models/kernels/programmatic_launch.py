"""Programmatic dependent launch (Hopper and newer): a kernel starts while the one before it still runs.

It may do what does not depend on the one before, such as loading weights, and then waits for it. Kernels of a few
microseconds, each waiting for the last, otherwise spend as long on starting and draining as on their work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_CONTROL = True
except ImportError:  # an older Triton; kernels with EARLY = False do not compile the calls
    gdc_launch_dependents = gdc_wait = None
    HAS_CONTROL = False


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """From here on, what the kernel before has written can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def allow_next(EARLY: tl.constexpr):
    """Lets the next kernel start."""
    if EARLY:
        gdc_launch_dependents()


@cache
def make_launch_options() -> dict[str, Any]:
    """The options of a launch on this machine's GPU."""
    can_start_early = HAS_CONTROL and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can_start_early else {"EARLY": False}

"""Warns if an exact run resumes on the CPU with another number of threads, which round differently."""

from __future__ import annotations

from typing import Any

import torch

from gptmill.config.run import RunConfig
from gptmill.runs.events import Warned
from gptmill.runtime.world import World
from gptmill.training.resume_point import ResumePoint


def record_threads(config: RunConfig, world: World) -> dict[str, Any]:
    """What a checkpoint says about the threads of each rank, where they matter."""
    is_exact = config.machine.exact_ranks is True and world.device.type == "cpu"
    return {"threads": torch.get_num_threads()} if is_exact else {}


def warn_of_threads(config: RunConfig, world: World, resume_point: ResumePoint | None) -> list[Warned]:
    """What to say before the first step of a process, given the checkpoint that it starts from, if any."""
    if resume_point is None:
        return []
    checkpoint = resume_point.checkpoint
    before, now = checkpoint.values.get("threads"), record_threads(config, world).get("threads")
    if before is None or now is None or before == now:
        return []
    message = (
        f"a rank had {before} thread(s) until step {checkpoint.step:,} and has {now} now, and the CPU adds in another "
        f"order: the run no longer reproduces the uninterrupted one to the bit; set OMP_NUM_THREADS={before}"
    )
    return [Warned(checkpoint.step, "plan", message)]

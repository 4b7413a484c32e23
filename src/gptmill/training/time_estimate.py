"""How long a run takes on a GPU that is not at hand, from its FLOPs and an assumed MFU. A probe measures better."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptmill.config.model import Gelu, LearnedPositions, Moe
from gptmill.config.run import RunConfig
from gptmill.training.plan import TrainPlan
from gptmill.training.run_counts import RunCounts

# MFU of gptmill, compiled, on one H200, by parameters (docs/performance.md; 39M: enwik8 with CUDA graphs).
MEASURED_MFU = {
    "bf16": {39e6: 0.394, 124e6: 0.520, 355e6: 0.551, 774e6: 0.535, 1.56e9: 0.537},
    "fp8": {39e6: 0.394, 124e6: 0.586, 355e6: 0.604, 774e6: 0.576, 1.56e9: 0.568},
}
OTHER_COMPOSITION = 0.90  # of GPT-2's: custom-300m-modern reached 0.492
NOT_COMPILED = 0.56  # of the compiled model's: 337,694 against 601,872 tokens/s with 124M
NOT_FUSED = 0.81  # of that with fused kernels, which fp16 has not: 489,686 tokens/s (docs/models.md)
FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step
STARTUP_SECONDS = 15.0
COMPILE_SECONDS = 30.0
SAMPLE_TOKEN_SECONDS = 0.01
STALL_SECONDS_PER_BYTE = 0.03 / 1.49e9  # a save of 1.49 GB stalled training for 30 ms,
WRITE_SECONDS_PER_BYTE = 2.6 / 1.49e9  # and was durable after 2.6 s (docs/benchmarks.md)


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of a run by what they are spent on."""

    training: float
    evaluation: float
    """Validation losses and samples, tasks included where they were measured."""
    checkpoints: float
    startup: float
    """Start and end of the process: imports, compiling, and the last checkpoint."""
    tokens_per_second: float
    mfu: float | None
    basis: str
    """Where the figures come from, in words."""

    @property
    def total(self) -> float:
        return self.training + self.evaluation + self.checkpoints + self.startup


def assume_mfu(config: RunConfig, plan: TrainPlan) -> tuple[float, str]:
    """What gptmill reached at this size, and the words that say so."""
    curve = MEASURED_MFU["fp8" if plan.precision == "fp8" else "bf16"]
    mfu = interpolate(curve, plan.active_parameters or plan.parameters)
    model = config.model
    is_gpt2 = isinstance(model.feed_forward, Gelu) and isinstance(model.positions, LearnedPositions)
    mfu *= 1.0 if is_gpt2 else OTHER_COMPOSITION
    is_fused = plan.precision != "fp16" and config.machine.kernels != "none"
    mfu *= NOT_COMPILED if not config.machine.compile else 1.0 if is_fused else NOT_FUSED
    measured = "; experts were not measured" if isinstance(model.feed_forward, Moe) else ""
    return mfu, f"assumes an MFU of {mfu:.0%}, as gptmill reached with models of about this size on an H200{measured}"


def estimate_time(
    config: RunConfig, plan: TrainPlan, counts: RunCounts, mfu: float | None = None
) -> TimeEstimate | None:
    """Estimates by FLOPs; None for a device whose peak is unknown. Communication and tasks are not counted."""
    if plan.peak_flops_per_second is None:
        return None
    assumed, basis = assume_mfu(config, plan)
    if mfu is not None:
        assumed, basis = mfu, f"assumes an MFU of {mfu:.0%}, as given"
    rate = plan.ranks * plan.peak_flops_per_second * assumed
    evaluation = config.evaluation
    flops = (1 + evaluation.eval_train) * evaluation.eval_tokens * plan.flops_per_token * FORWARD_SHARE
    decode_steps = evaluation.sample_tokens if evaluation.num_samples else 0  # of all samples at once
    once = flops / rate + decode_steps * SAMPLE_TOKEN_SECONDS
    startup = STARTUP_SECONDS + COMPILE_SECONDS * config.machine.compile
    return TimeEstimate(
        training=plan.count_flops() / rate,
        evaluation=counts.evaluations * once,
        checkpoints=max(0, counts.saves - 1) * counts.checkpoint_bytes * STALL_SECONDS_PER_BYTE,
        startup=startup + counts.checkpoint_bytes * WRITE_SECONDS_PER_BYTE,
        tokens_per_second=rate / plan.flops_per_token,
        mfu=assumed,
        basis=basis,
    )


def interpolate(curve: dict[float, float], size: float) -> float:
    """The curve at a size, a power law between its points and constant beyond its ends."""
    sizes = sorted(curve)
    clamped = min(max(size, sizes[0]), sizes[-1])
    upper = max(1, next(number for number, known in enumerate(sizes) if known >= clamped))
    low, high = sizes[upper - 1], sizes[upper]
    share = math.log(clamped / low) / math.log(high / low)
    return float(curve[low] * (curve[high] / curve[low]) ** share)

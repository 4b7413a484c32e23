"""How often a run evaluates and saves, and what it keeps on disk and in host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from gptmill.config.model import Moe
from gptmill.config.run import RunConfig
from gptmill.models.parameters import ParameterCount, count_block_matrices
from gptmill.training.plan import TrainPlan

WEIGHT_BYTES = 4
STATE_BYTES = {"adamw": 8.0, "lion": 4.0, "adamw8bit": 2.1}  # of the optimizer, per parameter
USUAL_STATE_BYTES = 8.0
MOMENTUM_BYTES = 4.0  # Muon's only state of a matrix
LOG_BYTES = 420.0  # per logged step: a line of events.jsonl and one of log.txt
TRACKED_BYTES = 900.0  # more per logged step with TensorBoard


@dataclass(frozen=True)
class RunCounts:
    """Counts and bytes of a whole run; upper bounds where they depend on the losses."""

    evaluations: int
    """The first and the last step included."""
    scorings: int
    """Evaluations that also score tasks or other evaluators."""
    saves: int
    kept_checkpoints: int
    """At most at a time: rolling, epochs, milestones, best_model, latest_backup and the one being written."""
    checkpoint_bytes: int
    checkpoints_bytes: int
    log_bytes: int
    snapshot_bytes: int
    """Host memory for checkpoints on their way to disk, and for rollbacks."""


def count_run(config: RunConfig, plan: TrainPlan, parameters: ParameterCount) -> RunCounts:
    """Counts from the config alone. Every evaluation but the first may find a new best model, which is saved."""
    steps, checkpoints, evaluation = plan.max_steps, config.checkpoints, config.evaluation
    epochs = int(steps / plan.steps_per_epoch) if plan.steps_per_epoch >= checkpoints.checkpoint_freq else 0
    milestones = steps // checkpoints.milestone_freq if checkpoints.milestone_freq else 0
    freqs = [checkpoints.checkpoint_freq, evaluation.eval_freq, *filter(None, [checkpoints.milestone_freq])]
    saves = count_multiples(freqs, steps) + epochs + all(steps % freq for freq in freqs)
    rolling = min(checkpoints.keep_checkpoints, math.ceil(steps / checkpoints.checkpoint_freq))
    kept = min(saves, rolling + epochs + milestones + 2) + 1
    size = estimate_checkpoint_bytes(config, parameters)
    logged = math.ceil(steps / config.tracking.log_freq)
    per_step = LOG_BYTES + TRACKED_BYTES * config.tracking.use_tensorboard
    evaluations = 1 + math.ceil(steps / evaluation.eval_freq)
    scores = evaluation.eval_tasks is not None or evaluation.evaluators is not None
    scoring_freq = evaluation.eval_task_freq or evaluation.eval_freq
    return RunCounts(
        evaluations=evaluations,
        scorings=1 + math.ceil(steps / scoring_freq) if scores else 0,
        saves=saves,
        kept_checkpoints=kept,
        checkpoint_bytes=size,
        checkpoints_bytes=kept * size,
        log_bytes=round(logged * per_step),
        snapshot_bytes=size * (2 if config.guard.guard == "rollback" else 1),
    )


def count_multiples(freqs: list[int], last: int) -> int:
    """How many of the numbers 1 … last are a multiple of any of the frequencies."""
    total = 0
    for size in range(1, len(freqs) + 1):
        sign = 1 if size % 2 else -1
        total += sign * sum(last // math.lcm(*chosen) for chosen in combinations(freqs, size))
    return total


def estimate_checkpoint_bytes(config: RunConfig, parameters: ParameterCount) -> int:
    """Bytes of weights, optimizer state and, where kept, the moving average."""
    tag = config.optimizer.optimizer.tag
    state = parameters.total * STATE_BYTES.get(tag, USUAL_STATE_BYTES)
    if tag == "muon":
        matrices = min(parameters.blocks, _count_matrices(config, parameters))
        state -= matrices * (USUAL_STATE_BYTES - MOMENTUM_BYTES)
    averages = WEIGHT_BYTES * parameters.total if config.optimizer.ema_decay is not None else 0
    return round(WEIGHT_BYTES * parameters.total + state + averages)


def _count_matrices(config: RunConfig, parameters: ParameterCount) -> int:
    """The weights that Muon trains: the matrices of the blocks, all experts included."""
    if isinstance(config.model.feed_forward, Moe):
        return parameters.blocks
    return config.model.num_layers * count_block_matrices(config.model)

"""Smoke test: the smallest run that goes through the whole pipeline."""

from __future__ import annotations

from dataclasses import replace

from gptmill.config.run import RunConfig

SMOKE_EXAMPLES = 8  # of each task


def make_smoke_config(config: RunConfig, world_size: int) -> RunConfig:
    """One step of one window per rank on the CPU in fp32; evaluation, sampling and checkpoints are unchanged."""
    window = config.model.context_length
    return replace(
        config,
        training=replace(
            config.training,
            max_steps=1,
            mini_batch_size=1,
            total_batch_size=window * world_size,
            batch_size_warmup=None,
        ),
        optimizer=replace(config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, 1)),
        evaluation=replace(config.evaluation, eval_tokens=window, eval_task_limit=SMOKE_EXAMPLES),
        machine=replace(config.machine, device="cpu", precision="fp32", fp8_layers=None, compile=False),
    )

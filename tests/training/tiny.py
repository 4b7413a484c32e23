"""A training so small that a step takes milliseconds, built by the real parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmill.config.requests import PrepareRequest
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.data.batches import Batch, read_train_batch
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards import TokenShards, open_shards
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan, make_plan
from gptmill.training.state import TrainState, build_state
from gptmill.training.step import StepStats, train_step

CPU = World(0, 1, torch.device("cpu"))
FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "embd_size": 16,
    "num_heads": 2,
    "context_length": 16,
    "total_batch_size": 128,
    "mini_batch_size": 4,
    "max_steps": 50,
    "warmup_steps": 2,
    "eval_tokens": 256,
    "device": "cpu",
}


def make_config(**fields: Any) -> RunConfig:
    return build_config(RunConfig, {**FIELDS, **fields})


def make_shards(text_file: Path) -> TokenShards:
    """The text as bytes, a tenth of it for validation."""
    request = PrepareRequest(out=str(text_file.parent / "shards"), tokenizer="byte", val_fraction=0.1)
    folder, _ = prepare_corpus([str(text_file)], request, lambda _progress: None)
    return open_shards(folder)


@dataclass
class Tiny:
    """All that a training step needs."""

    config: RunConfig
    shards: TokenShards
    plan: TrainPlan
    state: TrainState

    def step(self, stop: StopFlag | None = None) -> StepStats:
        windows = self.shards.cut(self.shards.train, self.config.model.context_length)
        return train_step(self.state, windows, self.config, self.plan, CPU, stop or StopFlag())

    def read_next_batch(self) -> Batch:
        """All windows of the next step at once."""
        windows = self.shards.cut(self.shards.train, self.config.model.context_length)
        start, size = self.state.windows_read, self.plan.windows_per_step
        return read_train_batch(windows, self.config.training.seed, start, size)

    def copy_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.state.model.named_parameters()}


def open_tiny(shards: TokenShards, **fields: Any) -> Tiny:
    config = make_config(**fields)
    plan = make_plan(config, shards, CPU)
    return Tiny(config, shards, plan, build_state(config, plan, CPU))

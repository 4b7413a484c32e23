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
from gptmill.data.batches.batch import Batch, make_batch
from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.batches.row_reader import HostReader, Rows
from gptmill.data.batches.samplers import Sampler, build_sampler
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan, make_plan
from gptmill.training.skip_ranges import find_unskipped, make_starts
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
    corpora: Corpora
    sampler: Sampler
    plan: TrainPlan
    state: TrainState

    def step(self, stop: StopFlag | None = None) -> StepStats:
        state = self.state
        starts = make_starts(
            state.skipped_windows,
            state.windows_read,
            state.step,
            self.plan,
            CPU.rank,
            CPU.size,
            self.sampler.samples_per_batch,
        )
        with open_data_loader(self.sampler, self.reader, CPU.device, starts) as loader:
            return train_step(state, loader, self.config, self.plan, CPU, stop or StopFlag())

    @property
    def reader(self) -> HostReader:
        return make_reader(self.corpora)

    def read_next_batch(self) -> Batch:
        """All windows of the next step at once."""
        windows = self.plan.count_windows(self.state.step + 1)
        first = find_unskipped(self.state.skipped_windows, self.state.windows_read, windows)
        size = self.sampler.samples_per_batch
        parts = [self.reader.read(self.sampler.find(start)).tokens for start in range(first, first + windows, size)]
        return make_batch(Rows(torch.cat(parts)), IGNORE_INDEX, self.plan.separator)

    def copy_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.state.model.named_parameters()}


def make_reader(corpora: Corpora) -> HostReader:
    tokenizer = corpora.tokenizer
    return HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)


def plan_for(config: RunConfig, shards: TokenShards, world: World = CPU) -> TrainPlan:
    """The plan of a run on one corpus."""
    return make_plan(config, build_sampler(config, Corpora((shards,))), shards.tokenizer, world)


def open_tiny(corpora: TokenShards | Corpora, **fields: Any) -> Tiny:
    config = make_config(**fields)
    if isinstance(corpora, TokenShards):
        corpora = Corpora((corpora,))
    sampler = build_sampler(config, corpora)
    plan = make_plan(config, sampler, corpora.tokenizer, CPU, corpora.names)
    return Tiny(config, corpora, sampler, plan, build_state(config, plan, CPU))

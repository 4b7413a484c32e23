"""Trainings that several ranks share, each of a few steps. A test runs them on one rank in its own process; as a
program, this file runs them on all ranks, and rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny import make_config, make_reader
from torch import Tensor

from gptmill.config.run import ParallelName, RunConfig
from gptmill.data.batches.data_loader import DataLoader
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import open_shards
from gptmill.evals.loss import ValidationLoss
from gptmill.evals.samples import Samples
from gptmill.runs.checkpoints.content import Held, Shard
from gptmill.runtime.parallel.local_shards import reshard
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.world import World, open_world
from gptmill.training import state as training_state
from gptmill.training.dry_run import dry_run
from gptmill.training.plan import make_plan
from gptmill.training.skip_ranges import make_starts
from gptmill.training.snapshots import SnapshotBuffers
from gptmill.training.state import build_state
from gptmill.training.step import train_step
from gptmill.training.step_stats import StepStats

Tensors = dict[str, Tensor]
STEPS = 2
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "feed_forward": "swiglu", "bias": False}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"ema_decay": 0.9, "histogram_freq": 2, "use_tensorboard": True},
    "llama": {**LLAMA, "tied_head": False, "num_kv_heads": 1, "qk_norm": True, "gradient_checkpointing": "full"},
    "muon": {"optimizer": "muon", "num_layers": 1, "mtp_heads": 1, "gradient_checkpointing": "selective"},
    "dropout": {"optimizer": "muon", "value_embeddings": 1, "dropout": 0.1, "exact_ranks": False},
    "lion": {"optimizer": "lion", "max_lr": 1e-3, "num_layers": 1, "embd_size": 18},
    "experts": {"optimizer": "muon", "num_layers": 1, "feed_forward": "moe", "num_experts": 3, "router_aux_loss": 0.1},
    "zeros": {"keep_zeros": True, "zero_init": True, "grad_clip": None, "guard": "off"},
    "fused": {"gradient_checkpointing": "full"},
    "fp16": {"precision": "fp16", "num_layers": 1},
    "bf16": {"precision": "bf16", **LLAMA},
    "fp8": {"precision": "fp8-emulated", "fp8_layers": "all"},
}
FUSED = ("fused", "bf16")
SUMMED_AT_ONCE = ("experts", "lion")  # gradients of every micro-batch, as if whole ones did not fit


@dataclass
class Outcome:
    """What a training came to."""

    losses: list[float]
    norms: list[float]
    val_losses: list[float]
    """Of the weights, and of their EMA."""
    sample: str | None
    still: list[str]
    """Parameters of which nothing moved."""
    counted: int
    """Numbers in the histograms."""


class Training:
    """All that a step needs, on one rank of a world."""

    def __init__(self, config: RunConfig, corpora: Corpora, world: World) -> None:
        self.config, self.corpora, self.world = config, corpora, world
        self.sampler = build_sampler(config, corpora)
        self.plan = make_plan(config, self.sampler, corpora.tokenizer, world)
        self.state = build_state(config, self.plan, world)

    def step(self) -> StepStats:
        state, world = self.state, self.world
        starts = make_starts(
            [], state.windows_read, state.step, self.plan, world.data_rank, world.data_size,
            self.sampler.samples_per_batch,
        )  # fmt: skip
        loader = DataLoader(self.sampler, make_reader(self.corpora), world.device, starts, 0)
        return train_step(state, loader, self.config, self.plan, world, StopFlag())

    def evaluate(self) -> tuple[list[float], str | None]:
        model, config = self.state.model.eval(), self.config
        loss = ValidationLoss(config, self.corpora, self.world)
        with torch.no_grad():
            found = [loss.evaluate(model, 1).val_loss]
            if self.state.ema is not None:
                with self.state.ema.swapped(model):
                    found.append(loss.evaluate(model, 1).val_loss)
            samples = Samples(config.evaluation, self.corpora.tokenizer, self.world)
            sample = samples.evaluate(model, 1, lambda: False)
        model.train()
        reshard(model)
        return found, None if sample is None else sample.text

    def go_back(self) -> tuple[float, float]:
        """The loss of the next step, and that of the same step after a rollback."""
        kept = SnapshotBuffers(self.world.device, 1).take(self.state.make_checkpoint({}))
        first = self.step().read().loss
        self.state.restore(kept.checkpoint, "the snapshot", is_own=True)
        return first, self.step().read().loss

    def read_tensors(self) -> Tensors:
        """The whole state on rank 0, which puts the shards of all ranks together."""
        groups = self.state.make_checkpoint({}).tensors
        own = {f"{group}/{name}": item for group, named in groups.items() for name, item in named.items()}
        every: list[dict[str, Held]] = [own]
        if self.world.size > 1:
            every = [{} for _ in range(self.world.size)]
            dist.gather_object(own, every if self.world.is_main else None)
        whole: Tensors = {}
        for name, item in (pair for held in every for pair in held.items()):
            if not isinstance(item, Shard):
                whole[name] = item.detach().clone()
                continue
            target = whole.setdefault(name, torch.full(item.shape, torch.nan, dtype=item.dtype))
            ends = (start + length for start, length in zip(item.offset, item.tensor.shape, strict=True))
            target[tuple(map(slice, item.offset, ends))] = item.tensor
        return whole


def run_case(name: str, corpora: Corpora, world: World, steps: int = STEPS) -> tuple[Outcome, Tensors]:
    """Trains, evaluates and goes back; the tensors are those of rank 0."""
    fields = {"total_batch_size": 128, "mini_batch_size": 2, "sample_tokens": 4, "sample_prompt": "the", **CASES[name]}
    config, choose = make_config(**fields), training_state.choose_kernels
    if name in FUSED:
        training_state.choose_kernels = lambda *_values, **_options: "auto"
    training = Training(config, corpora, world)
    training_state.choose_kernels = choose
    training.state.reduces_every_micro_batch = name in SUMMED_AT_ONCE
    dry_run(training.state, config, training.plan, world)
    before = training.read_tensors()
    stats = [training.step() for _ in range(steps)]
    read = [one.read() for one in stats]
    val_losses, sample = training.evaluate()
    losses = [one.loss for one in read] + list(training.go_back())
    after = training.read_tensors()
    weights = [key for key in after if key.startswith("model/")] if world.is_main else []
    still = [key for key in weights if torch.equal(before[key], after[key])]
    counted = sum(int(one.histograms.counts.sum()) for one in stats if one.histograms is not None)
    return Outcome(losses, [one.grad_norm for one in read], val_losses, sample, still, counted), after


def run_all(strategy: ParallelName, names: Iterable[str], corpus: Path, out: Path, steps: int = STEPS) -> None:
    """Runs the cases on this rank; rank 0 writes their outcomes to the folder `out`."""
    corpora = Corpora((open_shards(corpus),))
    with open_world("cpu") as alone:
        world = arrange_ranks(alone, strategy)
        for name in names:
            outcome, tensors = run_case(name, corpora, world, steps)
            if world.is_main:
                (out / f"{name}.json").write_text(json.dumps(asdict(outcome)))
                save_file(tensors, out / f"{name}.safetensors")


def read_outcome(out: Path, name: str) -> tuple[Outcome, Tensors]:
    return Outcome(**json.loads((out / f"{name}.json").read_text())), load_file(out / f"{name}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    strategy, names, corpus, out, steps = sys.argv[1:]
    run_all(strategy, names.split(","), Path(corpus), Path(out), int(steps))  # type: ignore[arg-type]

"""TrainState: the one mutable thing in a run, and its way into a checkpoint and back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gptmill
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.data.corpora import Corpora
from gptmill.models.gpt import GPT, build_gpt
from gptmill.runs.checkpoints.storage import Checkpoint
from gptmill.runtime.precision import build_scaler
from gptmill.runtime.world import World
from gptmill.training.optimizers import build_optimizer
from gptmill.training.plan import TrainPlan


@dataclass
class TrainState:
    """Model, optimizer, and how far the run and its data are. Randomness needs no state: see runtime.seeds."""

    model: GPT
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    windows_read: int = 0
    val_loss: float | None = None
    skipped_windows: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of data that the run leaves out."""

    def hold_back_sync(self, *, is_last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch. Ranks exchange gradients in the last only; DDP must know before the forward."""
        if isinstance(self.forward, DistributedDataParallel) and not is_last:
            return self.forward.no_sync()
        return nullcontext()

    def make_checkpoint(self, config: RunConfig, corpora: Corpora) -> Checkpoint:
        """Everything that the rest of the run depends on."""
        values = {
            "windows_read": self.windows_read,
            "val_loss": self.val_loss,
            "corpus_sha256": corpora.sha256,
            "scaler": self.scaler.state_dict(),
            "config": list_values(config),
            "tokenizer": corpora.tokenizer.spec(),
            "tokenizer_fingerprint": corpora.fingerprint,
            "gptmill_version": gptmill.__version__,
            "torch_version": str(torch.__version__),
        }
        tensors = {"model": dict(self.model.state_dict()), "optimizer": self._name_optimizer_state()}
        return Checkpoint(self.step, tensors, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Becomes the state that was saved."""
        self.model.load_state_dict(checkpoint.tensors["model"])
        self._load_optimizer_state(checkpoint.tensors["optimizer"])
        if checkpoint.values["scaler"]:  # empty where the run was not in fp16 until now
            self.scaler.load_state_dict(checkpoint.values["scaler"])
        self.step = checkpoint.step
        self.windows_read = checkpoint.values["windows_read"]
        self.val_loss = checkpoint.values["val_loss"]

    def _name_optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as PARAMETER/KEY: names outlive the order of parameters, indices do not."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }

    def _load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        ordered = [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            state.setdefault(ordered.index(name), {})[key] = tensor
        packed: dict[str, Any] = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})


def build_state(config: RunConfig, plan: TrainPlan, world: World) -> TrainState:
    """A fresh state on the device, compiled and wrapped for the ranks as the config asks."""
    model = build_gpt(config.model, plan.padded_vocab_size, config.training.seed, plan.vocab_size).to(world.device)
    if config.machine.compile:
        model.compile()
    optimizer = build_optimizer(model, config.optimizer, world.device)
    forward: nn.Module = model
    if world.is_distributed:
        forward = DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    return TrainState(model, forward, optimizer, build_scaler(plan.precision, world.device))

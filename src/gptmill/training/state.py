"""TrainState: everything that changes during a run, and its conversion to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptmill.config.composition import FP8
from gptmill.config.errors import UserError
from gptmill.config.run import KernelChoice, RunConfig
from gptmill.models.context_parallel_gpt import ContextParallelGPT, share_rows
from gptmill.models.expert_parallel_moe import share_experts
from gptmill.models.fused.dispatch import MODELS, choose_kernels, is_small
from gptmill.models.fused.fp8_layers import use_fp8
from gptmill.models.gpt import GPT, build_gpt, build_meta_gpt
from gptmill.models.initialisation import init_parameter
from gptmill.models.kernels.compiler import list_kernel_options, prepare_compiler
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import LossConfig
from gptmill.models.own_model import build_own_model
from gptmill.runs.checkpoints.content import Checkpoint, Held, check_tensors
from gptmill.runs.checkpoints.sharded_state import Saved, hold, load, read_whole
from gptmill.runtime.compiling import cache_custom_autograd, list_compile_options, load_compiler, raise_recompile_limit
from gptmill.runtime.parallel.context_parallel import RankRows
from gptmill.runtime.parallel.expert_parallel import RankExperts
from gptmill.runtime.parallel.layouts import Layout
from gptmill.runtime.parallel.local_shards import is_fsdp
from gptmill.runtime.parallel.materialize import materialize
from gptmill.runtime.parallel.parallelize import parallelize
from gptmill.runtime.parallel.split_model import list_experts, split_model
from gptmill.runtime.precision import build_scaler, find_autocast_dtype
from gptmill.runtime.world import CP, EP, World
from gptmill.training.early_stop import EarlyStop
from gptmill.training.ema import EmaWeights
from gptmill.training.micro_batch import EagerPass, GraphedPass, choose_cuda_graphs
from gptmill.training.optimizers import OptimizerContainer, build_optimizer
from gptmill.training.optimizers.fsdp import build_fsdp_optimizer
from gptmill.training.plan import TrainPlan
from gptmill.training.reduction import PlainReduction, Reduction, build_reduction
from gptmill.training.saved_values import read_count, read_dict, read_number, read_spans
from gptmill.training.spike_detector import SpikeDetector
from gptmill.training.strategy import can_hold_gradients


@dataclass
class TrainState:
    """Model, optimizer, step and data position. Random numbers need no state: see runtime.seeds."""

    model: LanguageModel
    forward: nn.Module
    micro_batch_runner: EagerPass | GraphedPass
    optimizer: OptimizerContainer
    scaler: torch.amp.GradScaler
    spike_detector: SpikeDetector
    early_stop: EarlyStop
    reduction: Reduction = field(default_factory=PlainReduction)
    ema: EmaWeights | None = None
    step: int = 0
    windows_read: int = 0
    windows_jumped: int = 0
    """How many of them were skipped."""
    skipped_windows: list[tuple[int, int]] = field(default_factory=list)
    epochs_done: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    evaluated_at: int | None = None
    """The last step whose evaluation was completed: an interrupted evaluation runs again on resume."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """How parameters are split over ranks, by name; those that are not here are whole."""
    reduces_every_micro_batch: bool = False
    """Whether sharded gradients are summed over the ranks at once, where whole ones do not fit until the last."""
    is_updating: bool = False
    """Whether an update has begun and not ended: some weights are those of the next step, and saving would mix both."""

    def no_sync(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Skips the gradients' all-reduce in all micro-batches but the last. Must wrap the forward pass too."""
        if isinstance(self.forward, DistributedDataParallel) and not is_last:
            return self.forward.no_sync()
        if is_fsdp(self.forward):
            self.forward.set_requires_gradient_sync(is_last or self.reduces_every_micro_batch)
        return nullcontext()

    def make_checkpoint(self, origin: dict[str, Any]) -> Checkpoint[Held]:
        """Everything that the rest of the run depends on, and its `origin`. Shares the live tensors."""
        tensors = {"model": self.hold_weights(), "optimizer": self.optimizer.hold_state()}
        if self.ema is not None:
            tensors["ema"] = hold(self.ema.tensors(), self.layouts)
        values = {
            "windows_read": self.windows_read,
            "windows_jumped": self.windows_jumped,
            "skipped_windows": [list(span) for span in self.skipped_windows],
            "epochs_done": self.epochs_done,
            "train_loss": self.train_loss,
            "val_loss": self.val_loss,
            "evaluated_at": self.evaluated_at,
            "scaler": self.scaler.state_dict(),
            "guard": self.spike_detector.state_dict(),
            "early_stop": self.early_stop.state_dict(),
            **origin,
        }
        return Checkpoint(self.step, tensors, values)

    def hold_weights(self) -> dict[str, Held]:
        """The live weights that this rank has."""
        return hold(self.model.state_dict(), self.layouts)

    def restore(self, checkpoint: Checkpoint[Saved], source: str, *, is_own: bool = False) -> None:
        """Loads a checkpoint; raises UserError, naming `source`, for one that does not fit this run.

        One of this very process, `is_own`, does; it may lack what other ranks hold. If the run has changed its
        optimizer since, the optimizer state starts from zero.
        """
        model, optimizer, values = checkpoint.tensors["model"], checkpoint.tensors["optimizer"], checkpoint.values
        ema = checkpoint.tensors.get("ema")
        has_same_optimizer = self._has_same_optimizer(values)
        if not is_own:
            self._check(model, optimizer if has_same_optimizer else None, ema, source)
        try:
            spans = read_spans(values.get("skipped_windows"), "skipped_windows")
            read, jumped, epochs = (
                read_count(values.get(name), name) for name in ("windows_read", "windows_jumped", "epochs_done")
            )
            train_loss, val_loss = (read_number(values.get(name), name) for name in ("train_loss", "val_loss"))
            evaluated_at = values.get("evaluated_at")
            evaluated_at = None if evaluated_at is None else read_count(evaluated_at, "evaluated_at")
            scaler = read_dict(values.get("scaler"), "scaler")
            self.spike_detector.load_state_dict(values.get("guard", {}))
            self.early_stop.load_state_dict(values.get("early_stop", {}))
            if scaler:  # empty if the run was not in fp16 before
                self.scaler.load_state_dict(scaler)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"cannot resume from {source}: {error}; use another checkpoint") from None
        load(self.hold_weights(), model)
        if has_same_optimizer:
            self.optimizer.load_state(optimizer)
        else:
            self.optimizer.reset_state()
        if self.ema is not None and ema is not None:
            load(hold(self.ema.tensors(), self.layouts), ema)
        elif self.ema is not None:
            self.ema.load(dict(self.model.named_parameters()))
        self.step, self.windows_read, self.windows_jumped, self.skipped_windows = checkpoint.step, read, jumped, spans
        self.epochs_done, self.evaluated_at = epochs, evaluated_at
        self.train_loss, self.val_loss = train_loss, val_loss
        self.is_updating = False

    def _has_same_optimizer(self, values: dict[str, Any]) -> bool:
        """Whether the checkpoint was saved with the same kind of optimizer."""
        config = values.get("config")
        saved = config.get("optimizer") if isinstance(config, dict) else None
        return saved in (None, self.optimizer.kind)

    def _check(
        self,
        model: Mapping[str, Saved],
        optimizer: Mapping[str, Saved] | None,
        ema: Mapping[str, Saved] | None,
        source: str,
    ) -> None:
        """Raises UserError for missing, extra or misshapen tensors, and for an invalid step count."""
        check_tensors(model, self.hold_weights(), source)
        if self.ema is not None and ema is not None:
            check_tensors(ema, hold(self.ema.tensors(), self.layouts), f"the EMA in {source}")
        if optimizer is None:
            return
        check_tensors(optimizer, self.optimizer.describe_state(), f"the optimizer of {source}")
        steps = [read_whole(tensor) for name, tensor in optimizer.items() if name.endswith("/step")]
        if any(not step >= 0 for step in steps):
            raise UserError(f"the optimizer of {source} has an invalid step count; use another checkpoint")


def build_state(config: RunConfig, plan: TrainPlan, world: World) -> TrainState:
    """A fresh state on the device, compiled and wrapped for the ranks as the config asks."""
    micro_batch_tokens = config.training.mini_batch_size * config.model.context_length
    small = is_small(micro_batch_tokens, config.model.embd_size)
    is_graphed = choose_cuda_graphs(config, world, is_small=small)
    model, layouts = _build_model(config, plan, world, host_keeps_up=is_graphed or not small)
    experts = list_experts(layouts, world)
    forward = _share(model, config, plan, world, experts)
    is_exact = config.machine.exact_ranks is True
    if world.uses_fsdp:
        optimizer: OptimizerContainer = build_fsdp_optimizer(model, config.optimizer, world)
    else:
        optimizer = build_optimizer(model, config.optimizer, world.device, world, layouts, is_exact=is_exact)
    optimizer.init_state()
    optimizer.keeps_gradients = is_graphed
    reduction = build_reduction(
        model, world, is_exact=is_exact, is_sharded=optimizer.is_sharded, keeps_gradients=is_graphed, experts=experts
    )
    scaler = build_scaler(plan.precision, world.device)
    eager = EagerPass(forward, scaler, plan.precision, world.device)
    runner = GraphedPass(eager, model) if is_graphed and isinstance(model, GPT) else eager
    early_stop = EarlyStop(config.guard.early_stop_patience, config.guard.early_stop_min_delta)
    decay = config.optimizer.ema_decay
    ema = None if decay is None else EmaWeights.build(model, decay)
    detector = build_spike_detector(config)
    state = TrainState(model, forward, runner, optimizer, scaler, detector, early_stop, reduction, ema, layouts=layouts)
    state.reduces_every_micro_batch = world.uses_fsdp and not can_hold_gradients(config, plan, world)
    return state


def _build_model(
    config: RunConfig, plan: TrainPlan, world: World, *, host_keeps_up: bool
) -> tuple[LanguageModel, dict[str, Layout]]:
    """The implementation that wins on this device, split, quantized and compiled as the config asks."""
    training, machine = config.training, config.machine
    kernels: KernelChoice = "none"  # for layers that ranks share
    if machine.tensor_parallel == machine.context_parallel == 1:
        kernels = choose_kernels(
            machine.kernels,
            world.device,
            plan.precision,
            host_keeps_up=host_keeps_up,
            has_own_parts=bool(config.model.own_parts) or machine.expert_parallel > 1,
        )
    size = (config.model, plan.padded_vocab_size, training.seed, plan.vocab_size)
    is_own = "architecture" in config.model.own_parts
    kind = ContextParallelGPT if machine.context_parallel > 1 else MODELS[kernels]
    if uses_meta_device(config, world):
        model: LanguageModel = build_meta_gpt(config.model, plan.padded_vocab_size, plan.vocab_size, kind)
    else:
        model = build_own_model(*size) if is_own else build_gpt(*size, kind)
    layouts = split_model(model, world)  # before it is on the device, where the whole may not fit
    if world.axis_size(CP) > 1:
        share_rows(model, RankRows(world.find_group(CP)))
    if world.axis_size(EP) > 1:
        share_experts(model, RankExperts(world.find_group(EP)))
    if not world.uses_fsdp:
        model.to(world.device)  # FSDP moves this rank's part only
    model.loss_config = LossConfig(training.label_smoothing, training.z_loss, machine.loss_chunk, len(plan.corpora))
    model.set_activation_checkpointing(machine.gradient_checkpointing)
    if plan.precision in FP8:
        assert isinstance(model, GPT)
        layers = machine.fp8_layers or "blocks"  # the only choice when runs did not record it
        use_fp8(model, layers, emulated=plan.precision == "fp8-emulated")
    if machine.compile:
        load_compiler().join()
        prepare_compiler()
        cache_custom_autograd()
        raise_recompile_limit()
        mode = machine.compile_mode
        compile_model = model.compile_in_place if world.uses_fsdp else model.compile_parts
        compile_model(options=list_compile_options(mode) | list_kernel_options(kernels, mode))
    return model, layouts


def _share(model: LanguageModel, config: RunConfig, plan: TrainPlan, world: World, experts: Sequence[str]) -> nn.Module:
    """What a step calls in the place of the model; after this, every rank has its weights or its part of them."""
    if not world.uses_fsdp:
        return parallelize(model, world, experts=experts)
    model.isolate_blocks()
    dtype = find_autocast_dtype(plan.precision, world.device)
    forward = parallelize(model, world, model.list_blocks(), model.inference_methods, dtype)
    if uses_meta_device(config, world):
        generator = torch.Generator().manual_seed(config.training.seed)
        materialize(model, world.device, partial(init_parameter, config=config.model, generator=generator))
    return forward


def uses_meta_device(config: RunConfig, world: World) -> bool:
    """Whether a model has no memory until it is sharded. Parts of plug-ins initialise themselves, as a whole."""
    return world.uses_fsdp and not config.model.own_parts


def build_spike_detector(config: RunConfig) -> SpikeDetector:
    """A spike detector without history."""
    return SpikeDetector(config.guard, is_shuffled=config.data.order == "shuffle", grad_clip=config.optimizer.grad_clip)

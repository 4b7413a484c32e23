"""From a launch to a process that is ready to train: all that is opened, built and restored before the first step."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gptmill
from gptmill.config.errors import UserError
from gptmill.config.run import MachineConfig, RunConfig
from gptmill.config.schema import list_values
from gptmill.data.batches.data_loader import DataLoader
from gptmill.data.batches.on_device import load_on_device
from gptmill.data.batches.row_reader import HostReader, Reader
from gptmill.data.batches.samplers import Sampler, build_sampler
from gptmill.data.corpus_preparation import find_data_dir, needs_preparing, prepare_for_run
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.data.run_corpora import Corpora, open_corpora
from gptmill.data.shards.opening import holds_shards
from gptmill.data.tokenizers.protocol import check_fingerprint
from gptmill.evals import Evaluator, build_evaluators
from gptmill.inference.loading import check_size
from gptmill.models.fused.dispatch import describe_kernels
from gptmill.models.huggingface.layouts import describe_layout
from gptmill.runs.checkpoints.disk_space import check_disk_space
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.directory import RunDirectory, create_run, lock_run, save_config
from gptmill.runs.events import RunStarted
from gptmill.runs.history import record_crash
from gptmill.runs.trackers import TrackerGroup, open_trackers
from gptmill.runtime.attention_backend import choose_attention
from gptmill.runtime.compiling import load_compiler
from gptmill.runtime.determinism import set_deterministic
from gptmill.runtime.device import describe_device
from gptmill.runtime.precision import describe_precision, set_matmul_precision
from gptmill.runtime.signals import StopFlag, listen_for_stop
from gptmill.runtime.watchdog import Watchdog, open_watchdog
from gptmill.runtime.world import World, open_world
from gptmill.training.checkpointing import Checkpointer, list_due_tiers, open_checkpointer
from gptmill.training.dry_run import dry_run, refuse_too_large
from gptmill.training.micro_batch import GraphedPass, check_cuda_graphs
from gptmill.training.plan import TrainPlan, make_plan
from gptmill.training.resume_point import Start, read_resume_point
from gptmill.training.run_request import RunRequest
from gptmill.training.skip_ranges import make_starts
from gptmill.training.state import TrainState, build_spike_detector, build_state


@dataclass(frozen=True)
class Session:
    """What stays the same while a process trains."""

    config: RunConfig
    plan: TrainPlan
    world: World
    sampler: Sampler
    reader: Reader
    evaluators: list[Evaluator]
    run: RunDirectory
    saving: Checkpointer
    stop: StopFlag
    watchdog: Watchdog
    trackers: TrackerGroup
    first_step: int
    """Where this process began."""
    started: float
    """On the monotonic clock."""

    def measure_seconds(self) -> float:
        """How long this process has been at it."""
        return time.monotonic() - self.started

    def is_evaluation_due(self, state: TrainState) -> bool:
        is_time = state.step >= self.plan.max_steps or state.step % self.config.evaluation.eval_freq == 0
        return is_time and state.evaluated_at != state.step

    def is_snapshot_due(self, state: TrainState) -> bool:
        """Also where a process begins, so that there is always somewhere to go back to."""
        return state.step in (1, self.first_step) or state.step % self.config.guard.snapshot_freq == 0

    def is_something_due(self, state: TrainState) -> bool:
        """Whether the newest step's numbers are needed now."""
        is_last = state.step >= self.plan.max_steps
        tiers = list_due_tiers(state, self.config, self.plan, is_best=False, is_last=is_last)
        return bool(tiers) or self.is_evaluation_due(state) or self.is_snapshot_due(state)

    def open_data_loader(self, state: TrainState) -> DataLoader:
        """This rank's micro-batches, from where the run is."""
        starts = make_starts(
            state.skipped_windows, state.windows_read, state.step, self.plan, self.world.rank, self.world.size,
            self.sampler.samples_per_batch,
        )  # fmt: skip
        return DataLoader(self.sampler, self.reader, self.world.device, starts, self.config.data.prefetch_batches)


def open_session(launch: RunRequest, report_preparing: Report, stack: ExitStack) -> tuple[Session, TrainState]:
    """Opens, builds and restores. No run is written before all of it is sound."""
    config, started = launch.config, time.monotonic()
    set_deterministic(config.machine.deterministic)
    if config.machine.compile:
        load_compiler()
    world = stack.enter_context(open_world(config.machine.device))
    check_cuda_graphs(config, world)
    world.run_on_main(partial(prepare_if_needed, launch, report_preparing))
    corpora = open_corpora(config.data)
    sampler = build_sampler(config, corpora)
    plan = make_plan(config, sampler, corpora.tokenizer, world, corpora.names)
    set_matmul_precision(plan.precision)
    choose_attention(config.machine.attention_backend)
    start = read_resume_point(launch, world)
    if start is not None:
        check_size(config.model, plan.padded_vocab_size, start.checkpoint.tensors["model"], start.place)
    with refuse_too_large(plan.parameters, world.device):
        state = build_state(config, plan, world)
        if start is not None:
            plan = restore(state, start, corpora, launch, plan)
    dry_run(state, config, plan, world)
    evaluators = build_evaluators(config, corpora, world)
    reader = build_reader(config, corpora, world)
    run = open_run(launch, state, start, world, stack)
    stop = stack.enter_context(listen_for_stop(launch.deadline))
    guard = config.guard
    watchdog = stack.enter_context(
        open_watchdog(run.path, world.rank, world.size, guard.hang_factor, guard.hang_seconds)
    )
    origin = make_origin(config, corpora, start, world)
    saving = stack.enter_context(open_checkpointer(run, config, origin, world, state.step))
    trackers = stack.enter_context(
        open_trackers(run, config.tracking, state.step, is_evaluated=state.evaluated_at == state.step)
        if world.is_main
        else TrackerGroup([])
    )
    session = Session(
        config, plan, world, sampler, reader, evaluators, run, saving, stop, watchdog, trackers, state.step, started
    )
    trackers.track(describe_run(session, state, corpora, launch, start))
    return session, state


def prepare_if_needed(launch: RunRequest, report: Report) -> None:
    """Makes the shards where they do not exist; those that a run goes on with are told by their checksums."""
    data = launch.config.data
    if data.mixture is not None:
        return  # made of places that hold shards already
    is_settled = launch.resumed is not None or data.corpus is None
    if not (is_settled and holds_shards(find_data_dir(data))) and needs_preparing(data):
        prepare_for_run(data, report)


def restore(state: TrainState, start: Start, corpora: Corpora, launch: RunRequest, plan: TrainPlan) -> TrainPlan:
    """Becomes the state to start from, provided that it saw these very tokens and has steps left to do.

    Returns the plan of the rest: epochs are counted in what was read, whatever the batches were before.
    """
    checkpoint, config = start.checkpoint, launch.config
    check_fingerprint(str(checkpoint.values.get("tokenizer_fingerprint"))[:200], corpora.fingerprint, start.place)
    if checkpoint.values.get("corpus_sha256") != corpora.sha256 and not launch.allows_changes:
        shares = ", or in other shares" if len(corpora.shards) > 1 else ""
        raise UserError(
            f"{start.place} was trained on other tokens than {corpora.name} holds now{shares}; "
            f"start a new run, or add --allow_changes to go on with them"
        )
    state.restore(checkpoint, start.place)
    if launch.allows_changes and launch.changes:
        state.guard = build_spike_detector(config)  # what was usual may be so no longer
    if config.training.max_steps is None and config.training.steps_per_epoch is None:
        left = config.training.num_epochs * plan.windows_per_epoch - (state.windows_read - state.windows_jumped)
        plan = replace(plan, max_steps=max(1, plan.find_last_step(state.step, left)))
    if state.step > plan.max_steps:
        raise UserError(f"{start.place} has done {state.step} steps, more than max_steps {plan.max_steps}; raise it")
    return plan


def build_reader(config: RunConfig, corpora: Corpora, world: World) -> Reader:
    """Where rows of tokens are read from: the device's memory, or the host's files."""
    if config.data.data_on_device:
        return load_on_device(corpora, world.device)
    tokenizer = corpora.tokenizer
    return HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)


def open_run(
    launch: RunRequest, state: TrainState, start: Start | None, world: World, stack: ExitStack
) -> RunDirectory:
    """The run's folder, held against other processes: a new one, or that of the run that goes on."""
    config = launch.config
    assert config.tracking.run_name is not None
    run = RunDirectory(Path(config.tracking.logdir) / config.tracking.run_name)
    if world.is_main:
        stack.enter_context(lock_run(run))
        record_crash(run)
        warning = check_disk_space(run.checkpoints, estimate_size(state), config.checkpoints.keep_checkpoints)
        warnings = [f"{text}; going on from step {state.step} instead" for text in start.complaints] if start else []
        if launch.resumed is not None and start is not None:
            warnings.append(start.settle(run.checkpoints, config.checkpoints.keep_checkpoints))
        for text in filter(None, [*warnings, warning]):
            sys.stderr.write(f"warning: {text}\n")
        if launch.resumed is None:
            create_run(config.tracking.logdir, config.tracking.run_name, config)
        elif launch.changes:
            save_config(run, config)
    return run


def estimate_size(state: TrainState) -> int:
    """About what a checkpoint takes: the weights, the optimizer's state, and the average if there is one."""
    groups = state.make_checkpoint({}).tensors.values()
    return sum(int(tensor.nbytes) for tensors in groups for tensor in tensors.values())


def make_origin(config: RunConfig, corpora: Corpora, start: Start | None, world: World) -> dict[str, Any]:
    """What every checkpoint of this process says about where it comes from."""
    return {
        "config": list_values(config),
        "corpus_sha256": corpora.sha256,
        "tokenizer": corpora.tokenizer.spec(),
        "tokenizer_fingerprint": corpora.fingerprint,
        "gptmill_version": gptmill.__version__,
        "torch_version": str(torch.__version__),
        "code": make_code_fingerprint(),
        "randomness": "reseeded at every step from (seed, step, rank)",
        "ranks": world.size,
        "parent": start.parent if start else "",
    }


def describe_run(
    session: Session, state: TrainState, corpora: Corpora, launch: RunRequest, start: Start | None
) -> RunStarted:
    """The event that opens a run's log."""
    config, plan, world = session.config, session.plan, session.world
    recorded = "recorded as CUDA graphs" if isinstance(state.passes, GraphedPass) else ""
    precision, kernels = describe_precision(plan.precision, world.device), describe_kernels(state.model)
    return RunStarted(
        state.step,
        run=str(session.run.path),
        max_steps=plan.max_steps,
        tokens_per_step=plan.tokens_per_step,
        total_tokens=plan.count_tokens(),
        parameters=plan.parameters,
        active_parameters=plan.active_parameters,
        flops_per_token=plan.flops_per_token,
        peak_tflops=None if plan.peak_flops_per_second is None else plan.peak_flops_per_second / 1e12,
        optimizer=state.optimizer.describe(),
        layout=describe_layout(config.model),
        device=describe_device(world.device),
        precision=", ".join(filter(None, [precision, describe_compiling(config.machine), recorded, kernels])),
        ranks=world.size,
        corpus=corpora.name,
        tokenizer=corpora.fingerprint,
        version=gptmill.__version__,
        torch_version=str(torch.__version__),
        val_loss=state.val_loss,
        code=make_code_fingerprint(),
        data=corpora.sha256,
        resumed_from=start.path if start else "",
        parent=start.parent if start else "",
        changes=list(launch.changes),
    )


def describe_compiling(machine: MachineConfig) -> str:
    """For people; empty where there is nothing to say."""
    mode = machine.compile_mode
    if machine.compile:
        return "compiled" if mode == "default" else f"compiled ({mode})"
    return "" if mode == "default" else f"not compiled: compile_mode {mode} does nothing without --compile"

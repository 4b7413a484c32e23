"""Training, top to bottom: open the data, plan, build, restore; then step, log, evaluate and save until done."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch

import gptmill
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.feed import Feed, FeedStoppedError, open_feed
from gptmill.data.batches.resident import load_resident
from gptmill.data.batches.rows import HostReader, Reader
from gptmill.data.batches.streams import Stream, build_stream
from gptmill.data.corpora import Corpora, open_corpora
from gptmill.data.corpus import find_data_dir, needs_preparing, prepare_for_run
from gptmill.data.pipeline.progress import Report
from gptmill.data.shards.opening import holds_shards
from gptmill.data.tokenizers.protocol import check_fingerprint
from gptmill.evals import Evaluator, build_evaluators
from gptmill.runs.checkpoints.storage import load_newest_checkpoint, prune_checkpoints, save_checkpoint
from gptmill.runs.directory import RunDirectory, create_run, save_config
from gptmill.runs.events import CheckpointSaved, EvalDone, Event, RunFinished, RunStarted
from gptmill.runs.lock import lock_run
from gptmill.runs.trackers import TrackerGroup, open_trackers
from gptmill.runtime.device import describe_device
from gptmill.runtime.precision import set_matmul_precision
from gptmill.runtime.signals import listen_for_stop
from gptmill.runtime.world import World, open_world
from gptmill.training.launch import Launch
from gptmill.training.meter import Meter
from gptmill.training.plan import TrainPlan, make_plan
from gptmill.training.state import TrainState, build_state
from gptmill.training.step import train_step


@dataclass(frozen=True)
class Outcome:
    """How training ended; `stopped_by` is the number of the signal that ended it, 0 if it ran to its last step."""

    run: RunDirectory
    config: RunConfig
    max_steps: int
    stopped_by: int


def train(launch: Launch, report_preparing: Report) -> Outcome:
    """Runs a launch to its last step or until it is asked to stop. No run is written before all of it is sound."""
    config, started = launch.config, time.monotonic()
    with ExitStack() as stack:
        world = stack.enter_context(open_world(config.machine.device))
        world.run_on_main(partial(prepare_if_needed, launch, report_preparing))
        corpora = open_corpora(config.data)
        stream = build_stream(config, corpora)
        plan = make_plan(config, stream, corpora.tokenizer, world)
        set_matmul_precision(plan.precision)
        state = build_state(config, plan, world)
        if launch.resumed is not None:
            plan = restore(state, launch.resumed, corpora, config, plan, world)
        evaluators = build_evaluators(config, corpora, world)
        feed = open_train_feed(config, corpora, stream, state, world, stack)
        run = open_run(launch, world, stack)
        stop = stack.enter_context(listen_for_stop())
        trackers = stack.enter_context(
            open_trackers(run, config.tracking, state.step) if world.is_main else TrackerGroup([])
        )
        meter = Meter(plan, config.tracking.log_freq, trackers.track)

        trackers.track(describe_run(run, config, plan, corpora, world, state))
        if state.step == 0:
            evaluate(state, evaluators, trackers.track)
            meter.restart_clock()
        while state.step < plan.max_steps and not meter.stop_asked:
            try:
                stats = train_step(state, feed, config, plan, world, stop)
            except (UserError, FeedStoppedError) as error:
                # No data: nothing has changed since the last step, so that it can be saved.
                meter.flush()
                if state.step:
                    save(state, config, corpora, run, world, trackers.track)
                if isinstance(error, FeedStoppedError):
                    break
                raise
            meter.push(stats)
            is_last = state.step == plan.max_steps
            eval_due = is_last or state.step % config.evaluation.eval_freq == 0
            save_due = is_last or state.step % config.checkpoints.checkpoint_freq == 0
            if not (eval_due or save_due or meter.stop_asked):
                continue
            meter.flush()
            if eval_due:
                evaluate(state, evaluators, trackers.track)
            if save_due or meter.stop_asked:
                save(state, config, corpora, run, world, trackers.track)
            meter.restart_clock()
        is_done = state.step >= plan.max_steps
        trackers.track(RunFinished(state.step, "finished" if is_done else "stopped", time.monotonic() - started))
        # Another rank may have been asked to stop, and this one not.
        return Outcome(run, config, plan.max_steps, 0 if is_done else stop.signal_number or signal.SIGTERM)


def prepare_if_needed(launch: Launch, report: Report) -> None:
    """Makes the shards where they do not exist; those that a run goes on with are told by their checksums."""
    data = launch.config.data
    if data.mixture is not None:
        return  # made of places that hold shards already
    is_settled = launch.resumed is not None or data.corpus is None
    if not (is_settled and holds_shards(find_data_dir(data))) and needs_preparing(data):
        prepare_for_run(data, report)


def restore(
    state: TrainState, run: RunDirectory, corpora: Corpora, config: RunConfig, plan: TrainPlan, world: World
) -> TrainPlan:
    """The run's newest sound state, provided that it was trained on these very tokens and has steps left to do.

    Returns the plan of the rest: epochs are counted in what was read, whatever the batches were before.
    """
    checkpoint, complaints = load_newest_checkpoint(run.checkpoints, groups=("model", "optimizer"))
    for complaint in complaints if world.is_main else ():
        sys.stderr.write(f"warning: {complaint}; going on from step {checkpoint.step} instead\n")
    made_with = checkpoint.values["tokenizer_fingerprint"]
    check_fingerprint(made_with, corpora.fingerprint, f"run {run.path}")
    if checkpoint.values.get("corpus_sha256") != corpora.sha256:
        shares = ", or in other shares" if len(corpora.shards) > 1 else ""
        raise UserError(
            f"run {run.path} was trained on other tokens than {corpora.name} holds now{shares}; start a new run"
        )
    if config.training.max_steps is None and config.training.steps_per_epoch is None:
        left = config.training.num_epochs * plan.windows_per_epoch - checkpoint.values["windows_read"]
        plan = replace(plan, max_steps=max(1, checkpoint.step + left // plan.windows_per_step))
    if checkpoint.step > plan.max_steps:
        raise UserError(
            f"run {run.path} has done {checkpoint.step} steps, more than max_steps {plan.max_steps}; raise it"
        )
    state.restore(checkpoint)
    return plan


def open_train_feed(
    config: RunConfig, corpora: Corpora, stream: Stream, state: TrainState, world: World, stack: ExitStack
) -> Feed:
    """This rank's micro-batches, from where the run is."""
    if config.data.data_on_device:
        reader: Reader = load_resident(corpora, world.device)
    else:
        tokenizer = corpora.tokenizer
        reader = HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)
    first, stride = state.windows_read + world.rank * stream.units_per_batch, world.size * stream.units_per_batch
    return stack.enter_context(open_feed(stream, reader, world.device, count(first, stride)))


def open_run(launch: Launch, world: World, stack: ExitStack) -> RunDirectory:
    """The run's folder, held against other processes: a new one, or that of the run that goes on."""
    tracking = launch.config.tracking
    assert tracking.run_name is not None
    run = RunDirectory(Path(tracking.logdir) / tracking.run_name)
    if world.is_main:
        stack.enter_context(lock_run(run))
        if launch.resumed is None:
            create_run(tracking.logdir, tracking.run_name, launch.config)
        elif launch.changes:
            save_config(run, launch.config)
    return run


def evaluate(state: TrainState, evaluators: list[Evaluator], track: Callable[[Event], None]) -> None:
    """Asks every evaluator, and remembers the validation loss for the checkpoint."""
    state.model.eval()
    with torch.no_grad():
        for evaluator in evaluators:
            event = evaluator.evaluate(state.model, state.step)
            if isinstance(event, EvalDone):
                state.val_loss = event.val_loss
            if event is not None:
                track(event)
    state.model.train()


def save(
    state: TrainState,
    config: RunConfig,
    corpora: Corpora,
    run: RunDirectory,
    world: World,
    track: Callable[[Event], None],
) -> None:
    """Saves on the main rank, then lets go of the checkpoints that are too many."""
    if world.is_main:
        started = time.monotonic()
        info = save_checkpoint(run.checkpoints, state.make_checkpoint(config, corpora))
        prune_checkpoints(run.checkpoints, config.checkpoints.keep_checkpoints, state.step)
        track(CheckpointSaved(state.step, str(info.path), info.size_bytes, time.monotonic() - started))


def describe_run(
    run: RunDirectory, config: RunConfig, plan: TrainPlan, corpora: Corpora, world: World, state: TrainState
) -> RunStarted:
    """The event that opens a run's log."""
    return RunStarted(
        state.step,
        run=str(run.path),
        max_steps=plan.max_steps,
        tokens_per_step=plan.tokens_per_step,
        parameters=plan.parameters,
        device=describe_device(world.device),
        precision=plan.precision + (", compiled" if config.machine.compile else ""),
        ranks=world.size,
        corpus=corpora.name,
        tokenizer=corpora.fingerprint,
        version=gptmill.__version__,
        torch_version=str(torch.__version__),
        val_loss=state.val_loss,
    )

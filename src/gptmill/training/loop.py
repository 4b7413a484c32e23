"""Training, top to bottom: open everything; then evaluate and save where due, step, and judge the step, until done."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.data_loader import DataLoaderStoppedError
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import EvalDone, Event, RolledBack, RunCrashed, RunFinished
from gptmill.runtime.compiling import is_compiler_error
from gptmill.runtime.memory import read_peak_memory
from gptmill.training.broadcast import broadcast_checkpoint
from gptmill.training.checkpointing import list_due_tiers
from gptmill.training.metrics import Metrics
from gptmill.training.run_request import RunRequest
from gptmill.training.session import Session, open_session
from gptmill.training.skip_ranges import add_skip_range
from gptmill.training.spike_detector import Verdict
from gptmill.training.state import TrainState
from gptmill.training.step import train_step

MAX_REASON = 500
SPARE_SECONDS = 3.0  # beside the time that a step and a save are known to take, before a time limit


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    run: RunDirectory
    config: RunConfig
    max_steps: int
    reason: str
    exit_code: int


def train(launch: RunRequest, report_preparing: Report) -> Outcome:
    """Runs a launch to its last step, or until it is asked to stop, or has to."""
    with ExitStack() as stack:
        session, state = open_session(launch, report_preparing, stack)
        plan, world = session.plan, session.world
        memory = partial(read_peak_memory, world.device)
        meter = Metrics(plan, session.config.tracking.log_freq, state.guard, session.trackers.track, memory)
        loader = session.open_data_loader(state)
        stack.callback(lambda: loader.close())
        while True:
            try:
                attend(session, state, meter)
                if meter.stop_asked or state.step >= plan.max_steps or state.early_stop.is_due:
                    break
                beat = partial(session.watchdog.beat, state.step)
                stats = train_step(state, loader, session.config, plan, world, session.stop, beat)
            except Exception as error:
                if settle(session, state, meter, error):
                    break
                raise
            meter.push(stats)
            if meter.stop_asked or session.is_something_due(state):
                meter.flush()
            if meter.verdict.kind == "go_back" and go_back(session, state, meter):
                loader.close()
                loader = session.open_data_loader(state)
            elif meter.is_in_trouble:
                break
        return finish(session, state, meter)


def settle(session: Session, state: TrainState, meter: Metrics, error: Exception) -> bool:
    """Saves what there is after an error that left the state as it was; whether it only came of the wish to stop."""
    # Where one rank has stopped, the others fail in what they do together.
    fails_with_it = session.world.size > 1 or is_compiler_error(error)
    is_wanted = isinstance(error, DataLoaderStoppedError) or (fails_with_it and bool(session.stop))
    if is_wanted or isinstance(error, UserError):
        meter.flush()
        meter.stop_asked = True
        if meter.verdict.kind == "go_back" and session.world.size == 1:
            go_back(session, state, meter)
        if not meter.is_in_trouble:
            attend(session, state, meter)
        if not is_wanted:
            session.trackers.track(RunFinished(state.step, f"stopped: {error}", session.measure_seconds()))
    else:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        session.trackers.track(RunCrashed(state.step, reason[:MAX_REASON]))
    return is_wanted


def attend(session: Session, state: TrainState, meter: Metrics) -> None:
    """Evaluates, saves or keeps the state, where that is due and not done yet."""
    step, config, plan, saving = state.step, session.config, session.plan, session.saving
    if meter.newest is not None:
        state.train_loss = meter.newest.loss
    is_evaluated = False
    if session.is_evaluation_due(state) and not meter.stop_asked:
        is_evaluated = evaluate(session, state)
        meter.stop_asked = meter.stop_asked or not is_evaluated
    is_last = step >= plan.max_steps or state.early_stop.is_due
    is_best = is_evaluated and state.early_stop.best_step == step
    tiers = list_due_tiers(state, config, plan, is_best=is_best, is_last=is_last)
    if not session.is_evaluation_due(state):  # else it is evaluated and saved again, and ends its epoch then
        state.epochs_done = state.windows_read // plan.windows_per_epoch
    is_unsaved = step > 0 and (step != saving.saved_at or is_evaluated)
    if is_unsaved and (tiers or meter.stop_asked):
        saving.save(state, tiers, partial(session.watchdog.beat, step, "waiting for the checkpoint before"))
    elif session.is_snapshot_due(state):
        saving.take_snapshot(state)
    if is_evaluated or saving.saved_at == step:
        meter.restart_clock()
    for event in saving.collect():
        session.trackers.track(event)
    if meter.usual_seconds:  # before the first step is done, which may compile for minutes, nothing is usual
        session.watchdog.note_step_seconds(meter.usual_seconds)
    session.stop.margin_seconds = SPARE_SECONDS + 2 * meter.usual_seconds + 2 * saving.write_seconds


def evaluate(session: Session, state: TrainState) -> bool:
    """Asks every evaluator; False if the run was asked to stop meanwhile: it will evaluate again when it goes on."""
    events: list[Event] = []

    def is_stopped() -> bool:
        session.watchdog.beat(state.step, "evaluating")
        return bool(session.stop)

    state.model.eval()
    with torch.no_grad():
        for evaluator in session.evaluators:
            event = evaluator.evaluate(state.model, state.step, is_stopped)
            if isinstance(event, EvalDone) and state.average is not None:
                with state.average.swapped(state.model):
                    averaged = evaluator.evaluate(state.model, state.step, is_stopped)
                assert isinstance(averaged, EvalDone)
                event = replace(event, ema_loss=averaged.val_loss)
            if event is not None:
                events.append(event)
    state.model.train()
    if session.world.is_any(bool(session.stop)):
        return False
    for event in events:
        if isinstance(event, EvalDone):
            state.val_loss = event.val_loss
            if state.step > 0:
                state.early_stop.note(state.step, event.val_loss)
        session.trackers.track(event)
    state.evaluated_at = state.step
    return True


def go_back(session: Session, state: TrainState, meter: Metrics) -> bool:
    """Returns to a state from before the trouble and marks its data to be left out; False if there is no such state."""
    verdict, entry, spans = meter.verdict, meter.newest, state.skipped_windows
    assert entry is not None
    saving = session.saving
    older = saving.find_older(verdict.first_step - 1) or saving.find_older(entry.step - 1)
    checkpoint = broadcast_checkpoint(older, session.world)
    if checkpoint is None:
        reason = f"step {entry.step}: {verdict.reason}; there is no earlier state to go back to"
        meter.verdict = Verdict("give_up", reason)
        return False
    state.restore(checkpoint, f"the state of step {checkpoint.step}")
    state.guard.note_rollback(verdict, entry.step)
    state.skipped_windows = add_skip_range(spans, verdict.windows, state.windows_read)
    saving.go_back(state.step)
    meter.go_back()
    session.trackers.rewind(state.step)
    session.trackers.track(
        RolledBack(state.step, entry.step, verdict.reason, entry.loss, entry.grad_norm, list(verdict.windows))
    )
    return True


def finish(session: Session, state: TrainState, meter: Metrics) -> Outcome:
    """Waits for the last checkpoint, says how the run ended, and with which exit code."""
    is_durable = session.saving.finish(
        lambda: session.watchdog.beat(state.step, "waiting for the last checkpoint to be written")
    )
    for event in session.saving.collect():
        session.trackers.track(event)
    reason, code = "finished", 0
    if meter.is_in_trouble:
        reason, code = f"gave up: {meter.verdict.reason}", exit_codes.DIVERGED
    elif state.step < session.plan.max_steps and state.early_stop.is_due:
        reason = f"stopped early: {state.early_stop.reason()}"
    elif state.step < session.plan.max_steps or meter.stop_asked:
        reason, code = f"stopped {session.stop.describe()}", session.stop.exit_code
    if not is_durable and code != exit_codes.DIVERGED:
        reason, code = f"{reason}, but the last checkpoint could not be saved", exit_codes.NOT_SAVED
    session.trackers.track(RunFinished(state.step, reason, session.measure_seconds()))
    return Outcome(session.run, session.config, session.plan.max_steps, reason, code)

"""The training loop: open the session; then evaluate and save when due, step and log, until training is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.data_loader import DataLoaderStoppedError
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import EvalDone, Event, RolledBack, RunCrashed, RunFinished, Warned
from gptmill.runs.trackers import check_trackers
from gptmill.runtime.compiling import is_compiler_error
from gptmill.runtime.memory import read_peak_memory
from gptmill.runtime.parallel.local_shards import reshard
from gptmill.runtime.rank_store import RankFailedError
from gptmill.training.audit import CorruptionError
from gptmill.training.checkpointing import list_due_tiers
from gptmill.training.final_export import check_final_export, export_best
from gptmill.training.metrics import Metrics
from gptmill.training.micro_batch import EagerPass
from gptmill.training.pacing import Pacer, keep_pace
from gptmill.training.remedies import advise_on_divergence
from gptmill.training.run_request import RunRequest
from gptmill.training.session import Session, open_session
from gptmill.training.skip_ranges import add_skip_range
from gptmill.training.spike_detector import Verdict
from gptmill.training.state import TrainState
from gptmill.training.step import train_step
from gptmill.training.stop_agreement import agree_on_stop
from gptmill.training.straggler_check import BusyTimer

MAX_REASON = 500
SPARE_SECONDS = 3.0  # margin before a time limit, on top of the expected time of a step and a save


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    run: RunDirectory
    config: RunConfig
    max_steps: int
    reason: str
    exit_code: int


def train(request: RunRequest, report_preparing: Report) -> Outcome:
    """Trains until the last step, an early stop, divergence or a request to stop."""
    with ExitStack() as stack:
        check_final_export(request.config)
        check_trackers(request.config.tracking)
        session, state = open_session(request, report_preparing, stack)
        metrics = Metrics(
            session.plan,
            session.config.tracking.log_freq,
            state.spike_detector,
            session.track,
            partial(read_peak_memory, session.world.device),
            session.telemetry,
        )
        pacer = None
        if request.is_paced and request.deadline is not None:
            pacer = Pacer(request.deadline, request.most_paced_steps)
        busy = time_ranks(session, state)
        loader = session.open_data_loader(state)
        stack.callback(lambda: loader.close())
        while True:
            try:
                arrived = time.monotonic()
                evaluate_and_save(session, state, metrics)
                if pacer is not None:
                    pacer.note_pause(time.monotonic() - arrived)
                if metrics.stop_requested or session.is_finished(state):
                    break
                beat = partial(session.watchdog.beat, state.step)
                with session.say_if_slow(state, f"training step {state.step + 1:,}"):
                    stats = train_step(state, loader, session.config, session.plan, session.world, session.stop, beat)
                metrics.push(stats)  # reads the step before, whose errors on the device are raised here
                if busy is not None:
                    busy.add(stats.started)
                    session.watchdog.busy_seconds = busy.median_seconds
                if pacer is not None:
                    session = keep_pace(pacer, session, state, metrics)
                if metrics.stop_requested or session.is_something_due(state):
                    metrics.flush()
                if metrics.verdict.kind == "rollback" and roll_back(session, state, metrics):
                    loader.close()
                    loader = session.open_data_loader(state)
                    if pacer is not None:
                        pacer.forget()
                elif metrics.has_diverged:
                    break
            except Exception as error:
                end_at_error(session, state, metrics, error)
                break
        with record_failure(session, state):
            outcome, is_main = finish(session, state, metrics), session.world.is_main
    if is_main and outcome.exit_code == 0:
        export_best(outcome.run, outcome.config)
    return outcome


def time_ranks(session: Session, state: TrainState) -> BusyTimer | None:
    """Times this rank's own part of each step, to find stragglers; None where there is no other rank."""
    if session.world.size == 1 or not isinstance(state.micro_batch_runner, EagerPass):
        return None
    timer = BusyTimer(session.world.device)
    state.micro_batch_runner = replace(state.micro_batch_runner, on_backward=timer.mark)
    return timer


def evaluate_and_save(session: Session, state: TrainState, metrics: Metrics) -> None:
    """Evaluates, saves a checkpoint or takes a snapshot, whichever is due and not done yet."""
    step, checkpointer = state.step, session.checkpointer
    if metrics.newest is not None:
        state.train_loss = metrics.newest.loss
    is_evaluated = False
    if session.is_evaluation_due(state) and not metrics.stop_requested:
        is_evaluated = evaluate(session, state)
        metrics.stop_requested = metrics.stop_requested or not is_evaluated
    is_best = is_evaluated and state.early_stop.best_step == step
    is_last = session.is_finished(state)
    tiers = list_due_tiers(state, session.config, session.plan, is_best=is_best, is_last=is_last)
    # An interrupted evaluation runs again on resume; the epoch ends when it is done.
    if not session.is_evaluation_due(state):
        state.epochs_done = state.windows_read // session.plan.windows_per_epoch
    is_unsaved = step > 0 and (step != checkpointer.saved_at or is_evaluated)
    if is_unsaved and (tiers or metrics.stop_requested):
        beat = partial(session.watchdog.beat, step, "waiting for the previous checkpoint")
        checkpointer.save(state, tiers, beat, session.trackers.measure_files())
    elif session.is_snapshot_due(state):
        checkpointer.take_snapshot(state)
    if is_evaluated or checkpointer.saved_at == step:
        metrics.restart_clock()
    for event in checkpointer.collect():
        session.trackers.track(event)
    if metrics.median_step_seconds:  # unknown before the first step, which may compile for minutes
        session.watchdog.note_step_seconds(metrics.median_step_seconds)
    session.stop.margin_seconds = SPARE_SECONDS + 2 * metrics.median_step_seconds + 3 * checkpointer.write_seconds


def evaluate(session: Session, state: TrainState) -> bool:
    """Runs every evaluator; False if a stop was requested meanwhile, so that a resumed run evaluates again."""
    events: list[Event] = []

    def is_stopped() -> bool:
        session.watchdog.beat(state.step, "evaluating")
        # A rank that stopped by itself would leave the others waiting for it in their next forward pass.
        return bool(session.stop) and not session.world.shares_forward

    state.model.eval()
    with torch.no_grad(), session.say_if_slow(state, f"evaluating step {state.step:,}"):
        for evaluator in session.evaluators:
            event = evaluator.evaluate(state.model, state.step, is_stopped)
            if isinstance(event, EvalDone) and state.ema is not None:
                with state.ema.swapped(state.model):
                    ema_event = evaluator.evaluate(state.model, state.step, is_stopped)
                assert isinstance(ema_event, EvalDone)
                event = replace(event, ema_loss=ema_event.val_loss)
            if event is not None:
                events.append(event)
    state.model.train()
    reshard(state.model)
    if session.world.any_rank(bool(session.stop)):
        return False
    for event in events:
        if isinstance(event, EvalDone):
            state.val_loss = event.val_loss
            if state.step > 0:
                state.early_stop.note(state.step, event.val_loss)
        session.track(event)
    state.evaluated_at = state.step
    return True


def roll_back(session: Session, state: TrainState, metrics: Metrics) -> bool:
    """Restores a state from before the loss spike and skips the data that caused it; False if there is none."""
    verdict, spike = metrics.verdict, metrics.newest
    assert spike is not None
    checkpointer, skip_ranges = session.checkpointer, state.skipped_windows
    checkpoint = checkpointer.find_older(verdict.first_step - 1) or checkpointer.find_older(spike.step - 1)
    if checkpoint is None:
        reason = f"step {spike.step}: {verdict.reason}; there is no earlier state to roll back to"
        metrics.verdict = Verdict("give_up", reason)
        return False
    state.restore(checkpoint, f"the state of step {checkpoint.step}", is_own=True)
    state.spike_detector.note_rollback(verdict, spike.step)
    state.skipped_windows = add_skip_range(skip_ranges, verdict.windows, state.windows_read)
    checkpointer.roll_back(state.step)
    metrics.roll_back()
    session.trackers.rewind(state.step)
    session.track(
        RolledBack(state.step, spike.step, verdict.reason, spike.loss, spike.grad_norm, list(verdict.windows))
    )
    return True


def end_at_error(session: Session, state: TrainState, metrics: Metrics, error: Exception) -> None:
    """Saves the state where the error left it intact; raises the error unless it only follows a request to stop."""
    session.watchdog.beat(state.step, session.watchdog.last_beat.doing)
    with record_failure(session, state):
        if isinstance(session.failures.settle(error), RankFailedError):
            raise error
        # Once one rank stops, the collectives of the others fail; a signal also kills torch.compile's worker processes.
        may_follow_stop = session.world.size > 1 or is_compiler_error(error)
        is_stop = isinstance(error, DataLoaderStoppedError) or (may_follow_stop and bool(session.stop))
        if is_stop or isinstance(error, UserError):
            metrics.flush()
            metrics.stop_requested = True
            if metrics.verdict.kind == "rollback" and session.world.size == 1:
                roll_back(session, state, metrics)
            # What ranks hold together is complete only where all of them are at the same step.
            if not (metrics.has_diverged or session.checkpointer.is_joint or state.is_updating):
                evaluate_and_save(session, state, metrics)
        if not is_stop:
            raise error


@contextmanager
def record_failure(session: Session, state: TrainState) -> Iterator[None]:
    """Records the error that ends the run and raises it: the first one, since others only follow, of any rank."""
    try:
        yield
    except Exception as error:
        cause = session.failures.settle(error)
        if isinstance(cause, CorruptionError):
            session.trackers.track(Warned(state.step, "audit", str(cause)))
        event: Event = RunCrashed(state.step, str(cause))
        if not isinstance(cause, UserError):
            event = RunCrashed(state.step, " ".join(f"{type(cause).__name__}: {cause}".split())[:MAX_REASON])
        elif not isinstance(cause, RankFailedError):
            event = RunFinished(state.step, f"stopped: {cause}", session.measure_seconds())
        session.trackers.track(event)
        raise cause from cause.__cause__


def finish(session: Session, state: TrainState, metrics: Metrics) -> Outcome:
    """Waits for the last checkpoint, then reports how the run ended and with which exit code."""
    is_durable = session.checkpointer.finish(
        lambda: session.watchdog.beat(state.step, "waiting for the last checkpoint to be written")
    )
    for event in session.checkpointer.collect():
        session.trackers.track(event)
    max_steps = session.plan.max_steps
    reason, code = "finished", 0
    if metrics.has_diverged:
        are_bad_alone = session.world.device.type == "cuda" and metrics.has_bad_gradients_only
        remedies = advise_on_divergence(session.config, session.plan, state.step, has_bad_gradients_only=are_bad_alone)
        reason, code = f"gave up: {metrics.verdict.reason}; {remedies}", exit_codes.DIVERGED
    elif state.step < max_steps and state.early_stop.is_due:
        reason = f"stopped early: {state.early_stop.reason()}"
    elif state.step < max_steps or metrics.stop_requested:
        agree_on_stop(session.stop, session.world.ranks)
        reason, code = f"stopped {session.stop.describe()}", session.stop.exit_code
    if not is_durable and code != exit_codes.DIVERGED:
        reason, code = f"{reason}, but the last checkpoint could not be saved", exit_codes.NOT_SAVED
    session.trackers.track(RunFinished(state.step, reason, session.measure_seconds()))
    return Outcome(session.run, session.config, max_steps, reason, code)

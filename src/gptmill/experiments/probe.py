"""Probe: measures a config on this machine by a short real training in a child process, which leaves no run behind.

What it measures is what a run of that config does, evaluation and checkpoint included; only the number of steps and,
with much gradient accumulation, of micro-batches per step is smaller.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gptmill.config import exit_codes
from gptmill.config.durations import format_duration
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.config.serialization import dump_toml, format_flags
from gptmill.config.validation import check_config
from gptmill.data.corpus_preparation import find_data_dir, make_prepare_command, needs_preparing
from gptmill.experiments.child_run import Say
from gptmill.experiments.trial_plan import TrialPlan, plan_trial
from gptmill.experiments.trials import UNTRACKED, TrialError, Trials, open_trials_folder
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import (
    EVALUATIONS,
    CheckpointSaved,
    Event,
    RunFinished,
    RunStarted,
    ScoresDone,
    StepLogged,
)

STEPS = 20
NAME, RESTARTED = "probe", "restarted"
RECIPE = "probe.toml"

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class ProbeResult:
    """What a short training took. Seconds are wall-clock; a part that was not reached or not asked for is 0."""

    step_seconds: float
    """One step of the run, by the median after the warm-up."""
    tokens_per_step: int
    """Of all ranks."""
    startup_seconds: float
    """From the start of the process to the first step: imports, building and the dry run. With torch.compile, of a
    process that finds what is compiled in the cache, as the run after the probe will."""
    compile_seconds: float
    """How much longer that took the first time, when it had to be compiled."""
    evaluation_seconds: float
    """One evaluation: validation loss and sample."""
    scoring_seconds: float
    """The tasks and other evaluators of one evaluation."""
    stall_seconds: float
    """How long a checkpoint blocks training."""
    finish_seconds: float
    """From the end of the last evaluation to the exit of the process: the last checkpoint becomes durable."""
    checkpoint_seconds: float
    """From the start of a save until it is durable; training goes on meanwhile."""
    checkpoint_bytes: int
    peak_memory_bytes: int
    """Peak of the device's allocations on a GPU; of the process's resident memory elsewhere. 0 if unknown."""
    log_bytes_per_step: float
    device: str
    precision: str
    parameters: int
    mfu: float | None
    """Model FLOPs utilisation; None where the device's peak is unknown."""
    is_noisy: bool
    """Whether equal steps took very different times, as on a busy machine."""
    is_cut_short: bool
    """By the time limit: fewer steps were measured than asked for, and what comes after them was not."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    def estimate_seconds(self, steps: float, evaluations: int = 0, scorings: int = 0, saves: int = 0) -> float:
        """Wall-clock seconds of a process that trains so many steps; of the saves, the last one ends it."""
        repeated = steps * self.step_seconds + evaluations * self.evaluation_seconds + scorings * self.scoring_seconds
        return self.startup_seconds + repeated + max(0, saves - 1) * self.stall_seconds + self.finish_seconds


def probe(
    config: RunConfig,
    *,
    steps: int = STEPS,
    ranks: int = 1,
    evaluates: bool = True,
    time_limit_seconds: float | None = None,
    say: Say = lambda _: None,
) -> ProbeResult:
    """Measures `steps` steps of a config whose corpus is prepared; Ctrl-C ends the child and raises KeyboardInterrupt.

    With several `ranks` it measures the share of one, without the communication between them. Without `evaluates`,
    evaluation and checkpoint are skipped. At the time limit the steps so far are used; raises UserError if there are
    fewer than two, or if the training fails.
    """
    _check(config, steps, ranks)
    deadline = math.inf if time_limit_seconds is None else time.monotonic() + time_limit_seconds
    plan = _plan_steps(config, steps, ranks)
    with open_trials_folder(None, config.tracking.logdir) as folder:
        (folder / RECIPE).write_text(dump_toml(config), encoding="utf-8")
        flags = {**plan.list_flags(), **_list_flags(config, folder, plan.last_step, evaluates=evaluates)}
        trials = Trials(folder, [str(folder / RECIPE), *format_flags(flags)], plan.last_step, say)
        started = time.time()
        try:
            if evaluates:
                trials.train(NAME, deadline=deadline)
            else:
                trials.train_until(NAME, plan.last_step, [], {}, deadline)
        except TrialError as error:
            raise _explain(error) from None
        result = read_result(RunDirectory(folder / NAME), plan, ranks, started, time.time())
        if result is not None and config.machine.compile and evaluates:
            result = _restart(result, trials, deadline)
    if result is None:
        raise UserError(
            f"the probe did not finish two steps within {format_duration(time_limit_seconds or 0)}; allow more time, "
            f"or use a smaller model or --total_batch_size"
        )
    return result


def _restart(result: ProbeResult, trials: Trials, deadline: float) -> ProbeResult:
    """Starts once more, to tell compiling, which is done only once, from the rest of the startup."""
    started = time.time()
    run = trials.train_until(RESTARTED, 1, [], {}, deadline)
    if run is None:  # the time is up
        return result
    evaluation = result.evaluation_seconds + result.scoring_seconds
    again = _measure_startup(read_events(run.events), started, result.step_seconds, evaluation)
    startup = min(result.startup_seconds, again)
    return replace(result, startup_seconds=startup, compile_seconds=result.startup_seconds - startup)


def _check(config: RunConfig, steps: int, ranks: int) -> None:
    if "RANK" in os.environ:
        raise UserError("a probe starts its own process; run it without torchrun")
    if steps < 2:
        raise UserError(f"a probe of {steps} steps measures nothing; take at least 2")
    check_config(config, ranks)
    if config.data.mixture is None and needs_preparing(config.data):
        raise UserError(
            f"a probe trains on the prepared corpus, and {find_data_dir(config.data)} holds none; prepare it first: "
            f"{make_prepare_command(config.data)}"
        )


def _plan_steps(config: RunConfig, steps: int, ranks: int) -> TrialPlan:
    """As many steps as asked for, half of them short ones where the run accumulates over many micro-batches."""
    plan = plan_trial(config, config.training.mini_batch_size, ranks, steps)
    return (
        plan_trial(config, config.training.mini_batch_size, ranks, max(2, steps // 2)) if plan.has_short_steps else plan
    )


def _list_flags(config: RunConfig, folder: Path, last_step: int, *, evaluates: bool) -> dict[str, Any]:
    """The flags that make a run of the config a short one, which no tracker and no mirror hears of."""
    flags: dict[str, Any] = {
        "logdir": str(folder),
        "log_freq": 1,
        "trackers": None,
        **UNTRACKED,
        "milestone_freq": None,
        "mirror_to": None,
        "export_best": None,
        "init_from": None,
        "early_stop_patience": None,
        "context_warmup": None,
        "eval_task_freq": None,
    }
    if evaluates:
        # One save in the middle, so that later steps report the memory that it takes, and one at the end.
        return {**flags, "max_steps": last_step, "eval_freq": last_step, "checkpoint_freq": last_step // 2 + 1}
    window = config.model.context_length
    return {**flags, "eval_tokens": window, "sample_tokens": 0, "eval_tasks": None, "evaluators": None}


def read_result(run: RunDirectory, plan: TrialPlan, ranks: int, started: float, ended: float) -> ProbeResult | None:
    """Computes the result from the run's files; None if there are too few steps."""
    events = read_events(run.events, missing_ok=True)
    steps = {event.step: event for event in _select(events, StepLogged)}
    starts, saves = _select(events, RunStarted), _select(events, CheckpointSaved)
    if len(steps) < 2 or not starts:
        return None
    seconds = {number: step.seconds for number, step in steps.items()}
    is_complete, last = plan.last_step in steps, steps[max(steps)]
    step_seconds = _estimate_step(plan, seconds, is_complete=is_complete)
    tokens = plan.run_micro_batches * plan.micro_batch_tokens
    final = _read_evaluation(events, last.step)
    has_finished = bool(_select(events, RunFinished))
    usual = final if has_finished else _read_evaluation(events, 0)  # the first one may also compile
    return ProbeResult(
        step_seconds=step_seconds,
        tokens_per_step=tokens * ranks,
        startup_seconds=_measure_startup(events, started, step_seconds, usual.total_seconds),
        compile_seconds=0.0,
        evaluation_seconds=usual.seconds,
        scoring_seconds=usual.scoring_seconds,
        stall_seconds=max((save.stalled_seconds for save in saves), default=0.0),
        finish_seconds=ended - max(final.end, last.time) if has_finished else 0.0,
        checkpoint_seconds=max((save.seconds for save in saves), default=0.0),
        checkpoint_bytes=max((save.size_bytes for save in saves), default=0),
        peak_memory_bytes=round(1e9 * max(step.memory_gb for step in steps.values())),
        log_bytes_per_step=_measure_logs(run) / len(steps),
        device=starts[-1].device,
        precision=starts[-1].precision,
        parameters=starts[-1].parameters,
        mfu=None if last.mfu is None else last.mfu * tokens / step_seconds / last.tokens_per_second,
        is_noisy=is_complete and plan.is_noisy(seconds),
        is_cut_short=not is_complete,
    )


def _estimate_step(plan: TrialPlan, seconds: dict[int, float], *, is_complete: bool) -> float:
    """Seconds of one step of the run."""
    if is_complete:
        return plan.run_micro_batches * plan.micro_batch_tokens / plan.estimate_speed(seconds)
    parts = {step: plan.micro_batches if step > plan.last_short_step else 1 for step in seconds}
    later = [each / parts[step] for step, each in seconds.items() if step > 1]  # the first one warms up
    return plan.run_micro_batches * statistics.median(later)


def _measure_startup(events: list[Event], started: float, step_seconds: float, evaluation_seconds: float) -> float:
    """Seconds to the end of the first step, less a step and an evaluation as they usually are.

    What the first ones took longer belongs to the startup. If they were faster, as before the machine got busy, only
    what they took is subtracted: the rest did not happen before that step.
    """
    step = _select(events, StepLogged)[0]
    evaluation = min(evaluation_seconds, _read_evaluation(events, 0).total_seconds)
    return max(0.0, step.time - started - min(step_seconds, step.seconds) - evaluation)


class _Evaluation(NamedTuple):
    seconds: float
    scoring_seconds: float
    end: float

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.scoring_seconds


def _read_evaluation(events: list[Event], step: int) -> _Evaluation:
    """How long the evaluation at a step took; it starts when the step is logged, or the run."""
    done = [event for event in events if event.step == step and isinstance(event, EVALUATIONS)]
    started = [event.time for event in events if event.step == step and isinstance(event, StepLogged | RunStarted)]
    if not done or not started:
        return _Evaluation(0.0, 0.0, 0.0)
    end = max(event.time for event in done)
    scoring = sum(event.seconds for event in _select(done, ScoresDone))
    return _Evaluation(max(0.0, end - max(started) - scoring), scoring, end)


def _measure_logs(run: RunDirectory) -> int:
    return sum(path.stat().st_size for path in (run.events, run.text_log) if path.exists())


def _select(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def _explain(error: TrialError) -> UserError:
    """What the user can act on: the sentence of a user error, or the whole failure."""
    if error.exit_code == exit_codes.USER_ERROR and not error.is_out_of_memory:
        return UserError(error.reason)
    return error

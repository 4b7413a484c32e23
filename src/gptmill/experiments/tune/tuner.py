"""Finds the fastest settings of a recipe on this machine by short trials, each a child process.

A trial only trains: it is killed after enough steps, before it would evaluate or save.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gptmill.config import exit_codes
from gptmill.config.durations import format_duration, parse_duration
from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import TuneRequest
from gptmill.config.run import RunConfig
from gptmill.config.serialization import check_extension_path, format_flags
from gptmill.config.validation import check_config
from gptmill.config.value_syntax import parse_stages
from gptmill.experiments.child_run import Say
from gptmill.experiments.trial_plan import TrialPlan, plan_trial
from gptmill.experiments.trials import UNTRACKED, TrialError, Trials, open_trials_folder
from gptmill.experiments.tune.search import (
    BudgetExhaustedError,
    Search,
    SearchSpace,
    Setting,
    TrialResult,
    list_divisors,
)
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import RunStarted, StepLogged
from gptmill.runtime.precision import is_slow

CPU = torch.device("cpu")
THREADS_VARIABLE = "OMP_NUM_THREADS"
MAX_NOTE_CHARS = 90


@dataclass(frozen=True)
class Tuning:
    """All trials and the best one; None if tuning was interrupted before any succeeded."""

    results: list[TrialResult]
    best: TrialResult | None
    is_interrupted: bool
    is_cut_short: bool
    """By the time limit or the maximum number of trials."""

    def list_flags(self, config: RunConfig) -> dict[str, Any]:
        """Returns the flags of the best setting for a run of this config."""
        if self.best is None:
            return {}
        setting, machine = self.best.setting, config.machine
        flags: dict[str, Any] = {
            "mini_batch_size": setting.mini_batch_size,
            "compile": setting.compile_mode is not None,
        }
        if setting.compile_mode is not None and setting.compile_mode != machine.compile_mode:
            flags["compile_mode"] = setting.compile_mode
        return flags if setting.precision is None else {**flags, "precision": setting.precision}


def tune(recipe: str | None, flags: dict[str, Any], given: set[str], request: TuneRequest, say: Say) -> Tuning:
    """Tunes what no flag has set; Ctrl-C ends it with the results so far."""
    deadline = _check_request(request, recipe)
    config = make_config(recipe, flags)
    space = make_search_space(config, given, request)
    with open_trials_folder(None, config.tracking.logdir) as folder:
        arguments = [*([recipe] if recipe else []), *format_flags({**flags, **_shorten(config, folder)})]
        runner = TrialRunner(Trials(folder, arguments, request.steps, say), config, request, deadline, say)
        search = Search(space, runner.measure)
        is_interrupted = is_complete = False
        try:
            is_complete = search.run()
        except KeyboardInterrupt:
            is_interrupted = True
    if search.best is None and not is_interrupted:
        raise UserError(_explain_failure(search.results, request))
    return Tuning(search.results, search.best, is_interrupted, not is_complete and not is_interrupted)


def make_search_space(config: RunConfig, given: set[str], request: TuneRequest) -> SearchSpace:
    """Returns what to try: every micro-batch size that divides the batch, and whatever no flag has set."""
    training, machine = config.training, config.machine
    own_size, is_fixed = training.mini_batch_size, "mini_batch_size" in given
    check_config(config if is_fixed else _set_size(config, 1), request.ranks)
    stages = parse_stages(training.batch_size_warmup, "") if training.batch_size_warmup else ()
    batch = math.gcd(training.total_batch_size, *(stage.size for stage in stages))
    sizes = (own_size,) if is_fixed else list_divisors(batch // (config.model.context_length * request.ranks))
    return SearchSpace(
        sizes,
        Setting(own_size, machine.compile_mode if machine.compile else None),
        tries_compile_modes=not given & {"compile", "compile_mode"},
        tries_precision=machine.precision == "auto" and "precision" not in given and not is_slow("bf16", CPU),
        tries_threads=THREADS_VARIABLE not in os.environ,
        max_trials=request.max_trials,
    )


class TrialRunner:
    """Measures settings by trials."""

    def __init__(self, trials: Trials, config: RunConfig, request: TuneRequest, deadline: float, say: Say) -> None:
        self._trials = trials
        self._config = config
        self._request = request
        self._deadline = deadline
        self._say = say
        self._seconds: list[float] = []
        self._has_succeeded = False

    def measure(self, setting: Setting, left: int) -> TrialResult:
        """Runs a trial; raises UserError if it fails for a user error and none has succeeded before."""
        number, started, clock = len(self._seconds) + 1, time.time(), time.monotonic()
        self._say(f"{number}. {setting.describe()}")
        plan = plan_trial(self._config, setting.mini_batch_size, self._request.ranks, self._request.steps)
        try:
            run = self._trials.train_until(
                f"trial-{number}",
                plan.last_step,
                format_flags({**plan.list_flags(), **_list_values(setting)}),
                {} if setting.threads is None else {THREADS_VARIABLE: str(setting.threads)},
                self._deadline,
            )
        except TrialError as error:
            if error.exit_code == exit_codes.USER_ERROR and not error.is_out_of_memory and not self._has_succeeded:
                raise UserError(error.reason) from None
            result = _make_failure(setting, error)
        else:
            if run is None:
                raise BudgetExhaustedError
            result = read_result(run, setting, plan, started)
            self._has_succeeded = True
        self._seconds.append(time.monotonic() - clock)
        outcome = f"{result.tokens_per_second:,.0f} tokens/s" if result.has_succeeded else result.note
        estimate = format_duration(left * statistics.fmean(self._seconds))
        self._say(f"   {outcome}" + (f"; at most {left} more trials, {estimate}" if left else ""))
        return result


def read_result(run: RunDirectory, setting: Setting, plan: TrialPlan, started: float) -> TrialResult:
    """Computes a trial's result from its events."""
    events = read_events(run.events)
    (start,) = (event for event in events if isinstance(event, RunStarted))
    steps = {event.step: event for event in events if isinstance(event, StepLogged)}
    seconds = {number: step.seconds for number, step in steps.items()}
    speed = plan.estimate_speed(seconds)
    last = steps[plan.last_step]
    return TrialResult(
        setting,
        speed,
        mfu=None if last.mfu is None else last.mfu * speed / last.tokens_per_second,
        memory_gb=max(step.memory_gb for step in steps.values()),
        device=start.device,
        note=f"first step after {steps[1].time - started:.0f} s"
        + (", noisy step times: is the machine busy?" if plan.is_noisy(seconds) else ""),
    )


def _check_request(request: TuneRequest, recipe: str | None) -> float:
    """Returns the deadline in monotonic time; raises UserError for an invalid request."""
    if "RANK" in os.environ:
        raise UserError("tuning starts its own processes; run it without torchrun, with --ranks N")
    for name in ("steps", "ranks", "max_trials"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if request.write is not None:
        check_extension_path(Path(request.write), recipe, may_overwrite=request.overwrite)
    if request.time_limit is None:
        return math.inf
    try:
        return time.monotonic() + parse_duration(request.time_limit)
    except ValueError as error:
        raise UserError(f"--time_limit {request.time_limit}: {error}") from None


def _shorten(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Returns the flags of every trial: nothing but steps, each of them logged."""
    return {
        "logdir": str(folder),
        "log_freq": 1,
        **UNTRACKED,
        "eval_tokens": config.model.context_length,
        "sample_tokens": 0,
        "eval_tasks": None,
        "eval_task_freq": None,
        "keep_checkpoints": 1,
        "milestone_freq": None,
        "mirror_to": None,
        "init_from": None,
        "early_stop_patience": None,
        "guard": "warn",  # takes no snapshots
        "context_warmup": None,
    }


def _list_values(setting: Setting) -> dict[str, Any]:
    values: dict[str, Any] = {"mini_batch_size": setting.mini_batch_size, "compile": setting.compile_mode is not None}
    if setting.compile_mode is not None:
        values["compile_mode"] = setting.compile_mode
    return values if setting.precision is None else {**values, "precision": setting.precision}


def _set_size(config: RunConfig, mini_batch_size: int) -> RunConfig:
    return replace(config, training=replace(config.training, mini_batch_size=mini_batch_size))


def _make_failure(setting: Setting, error: TrialError) -> TrialResult:
    if error.is_out_of_memory:
        return TrialResult(setting, note="out of memory", is_out_of_memory=True)
    reason = " ".join(error.reason.split())
    shown = reason if len(reason) <= MAX_NOTE_CHARS else reason[: MAX_NOTE_CHARS - 3] + "..."
    return TrialResult(setting, note=f"failed: {shown}")


def _explain_failure(results: list[TrialResult], request: TuneRequest) -> str:
    if not results:
        return f"--time_limit {request.time_limit} was reached during the first trial; allow more"
    if all(result.is_out_of_memory for result in results):
        return (
            "out of memory in every trial, down to a mini_batch_size of "
            f"{min(result.setting.mini_batch_size for result in results)}; use --gradient_checkpointing full, a "
            f"shorter --context_length or a smaller model"
        )
    return f"no trial succeeded; {results[-1].setting.describe()} {results[-1].note}; does gptmill train work with it?"

"""Finds the fastest settings of a recipe on this machine by short trainings, each of them a process of its own.

Of a trial only steps are wanted: it neither evaluates at its end nor saves, and is ended when it has done enough.
"""

from __future__ import annotations

import json
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
from gptmill.experiments.trials import Say, TrialError, Trials, open_trials_folder
from gptmill.experiments.tune.search import EnoughError, Result, Scope, Search, Setting, list_divisors
from gptmill.experiments.tune.trial_plan import TrialPlan, plan_trial
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.precision import is_slow

CPU = torch.device("cpu")
THREADS = "OMP_NUM_THREADS"
MAX_NOTE = 90


@dataclass(frozen=True)
class Tuning:
    """What was tried and what is best; without a best one where it was interrupted too early."""

    results: list[Result]
    best: Result | None
    is_interrupted: bool
    is_cut_short: bool
    """By the time or the number of trials that were allowed."""

    def list_flags(self, config: RunConfig) -> dict[str, Any]:
        """The values of the best setting that a run of this config should be given."""
        if self.best is None:
            return {}
        setting, own = self.best.setting, config.machine
        flags: dict[str, Any] = {
            "mini_batch_size": setting.mini_batch_size,
            "compile": setting.compile_mode is not None,
        }
        if setting.compile_mode is not None and setting.compile_mode != own.compile_mode:
            flags["compile_mode"] = setting.compile_mode
        return flags if setting.precision is None else {**flags, "precision": setting.precision}


def tune(recipe: str | None, flags: dict[str, Any], given: set[str], request: TuneRequest, say: Say) -> Tuning:
    """Tries what the user has not given by a flag; Ctrl-C ends it with what is known by then."""
    deadline = _check_request(request, recipe)
    config = make_config(recipe, flags)
    scope = make_scope(config, given, request)
    with open_trials_folder(None, config.tracking.logdir) as folder:
        arguments = [*([recipe] if recipe else []), *format_flags({**flags, **_quieten(config, folder)})]
        runner = Runner(Trials(folder, arguments, request.steps, say), config, request, deadline, say)
        search = Search(scope, runner.measure)
        is_interrupted = is_whole = False
        try:
            is_whole = search.run()
        except KeyboardInterrupt:
            is_interrupted = True
    if search.best is None and not is_interrupted:
        raise UserError(_explain_nothing(search.results, request))
    return Tuning(search.results, search.best, is_interrupted, not is_whole and not is_interrupted)


def make_scope(config: RunConfig, given: set[str], request: TuneRequest) -> Scope:
    """What there is to try: every batch that divides the run's, and what no flag has settled."""
    training, machine = config.training, config.machine
    own_size, is_settled = training.mini_batch_size, "mini_batch_size" in given
    check_config(config if is_settled else _set_size(config, 1), request.ranks)
    stages = parse_stages(training.batch_size_warmup, "") if training.batch_size_warmup else ()
    batch = math.gcd(training.total_batch_size, *(stage.size for stage in stages))
    sizes = (own_size,) if is_settled else list_divisors(batch // (config.model.context_length * request.ranks))
    return Scope(
        sizes,
        Setting(own_size, machine.compile_mode if machine.compile else None),
        tries_modes=not given & {"compile", "compile_mode"},
        tries_precision=machine.precision == "auto" and "precision" not in given and not is_slow("bf16", CPU),
        tries_threads=THREADS not in os.environ,
        max_trials=request.max_trials,
    )


class Runner:
    """Measures settings by trainings."""

    def __init__(self, trials: Trials, config: RunConfig, request: TuneRequest, deadline: float, say: Say) -> None:
        self._trials = trials
        self._config = config
        self._request = request
        self._deadline = deadline
        self._say = say
        self._seconds: list[float] = []
        self._has_worked = False

    def measure(self, setting: Setting, left: int) -> Result:
        """A trial; raises UserError where the very first one shows that no training is possible."""
        number, began, clock = len(self._seconds) + 1, time.time(), time.monotonic()
        self._say(f"{number}. {setting.describe()}")
        plan = plan_trial(self._config, setting.mini_batch_size, self._request.ranks, self._request.steps)
        try:
            run = self._trials.train_until(
                f"trial-{number}",
                plan.last_step,
                format_flags({**plan.list_flags(), **_list_values(setting)}),
                {} if setting.threads is None else {THREADS: str(setting.threads)},
                self._deadline,
            )
        except TrialError as error:
            if error.exit_code == exit_codes.USER_ERROR and not error.is_out_of_memory and not self._has_worked:
                raise UserError(error.reason) from None
            result = _describe_failure(setting, error)
        else:
            if run is None:
                raise EnoughError
            result = read_result(run, setting, plan, began)
            self._has_worked = True
        self._seconds.append(time.monotonic() - clock)
        told = f"{result.tokens_per_second:,.0f} tokens/s" if result.is_sound else result.note
        about = format_duration(left * statistics.fmean(self._seconds))
        self._say(f"   {told}" + (f"; at most {left} more, {about}" if left else ""))
        return result


def read_result(run: RunDirectory, setting: Setting, plan: TrialPlan, began: float) -> Result:
    """What a trial's events tell of it."""
    lines = run.events.read_text(encoding="utf-8").split("\n")[:-1]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    (started,) = (event for event in events if event["event"] == "RunStarted")
    steps = {event["step"]: event for event in events if event["event"] == "StepLogged"}
    seconds = {step: event["seconds"] for step, event in steps.items()}
    speed = plan.estimate_speed(seconds)
    last = steps[plan.last_step]
    mfu = last.get("mfu")
    return Result(
        setting,
        speed,
        mfu=None if mfu is None else mfu * speed / last["tokens_per_second"],
        memory_gb=max(event["memory_gb"] for event in steps.values()),
        device=started["device"],
        note=f"first step after {steps[1]['time'] - began:.0f} s"
        + (", uneven steps: is the machine busy?" if plan.is_uneven(seconds) else ""),
    )


def _check_request(request: TuneRequest, recipe: str | None) -> float:
    """The time, on the monotonic clock, when it must have ended; raises UserError for what cannot be done."""
    if "RANK" in os.environ:
        raise UserError("tuning starts processes of its own; call it without torchrun, and give it --ranks N")
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


def _quieten(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What is different in every trial: nothing but steps is done, and each of them is logged."""
    return {
        "logdir": str(folder),
        "log_freq": 1,
        "use_tensorboard": False,
        "eval_tokens": config.model.context_length,
        "sample_tokens": 0,
        "keep_checkpoints": 1,
        "milestone_freq": None,
        "mirror_to": None,
        "early_stop_patience": None,
        "guard": "warn",  # which takes no snapshots
        "context_warmup": None,
    }


def _list_values(setting: Setting) -> dict[str, Any]:
    values: dict[str, Any] = {"mini_batch_size": setting.mini_batch_size, "compile": setting.compile_mode is not None}
    if setting.compile_mode is not None:
        values["compile_mode"] = setting.compile_mode
    return values if setting.precision is None else {**values, "precision": setting.precision}


def _set_size(config: RunConfig, mini_batch_size: int) -> RunConfig:
    return replace(config, training=replace(config.training, mini_batch_size=mini_batch_size))


def _describe_failure(setting: Setting, error: TrialError) -> Result:
    if error.is_out_of_memory:
        return Result(setting, note="out of memory", ran_out=True)
    reason = " ".join(error.reason.split())
    return Result(setting, note="failed: " + (reason if len(reason) <= MAX_NOTE else reason[: MAX_NOTE - 3] + "..."))


def _explain_nothing(results: list[Result], request: TuneRequest) -> str:
    if not results:
        return f"--time_limit {request.time_limit} was over before the first trial was; allow more"
    if all(result.ran_out for result in results):
        return (
            "out of memory in every trial, down to a mini_batch_size of "
            f"{min(result.setting.mini_batch_size for result in results)}; use --gradient_checkpointing full, a "
            f"shorter --context_length or a smaller model"
        )
    return f"no trial worked; {results[-1].setting.describe()} {results[-1].note}; does gptmill train work with it?"

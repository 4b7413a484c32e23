"""The monitor: events in, warnings out. It reads no clock and no device, and never changes what is trained.

Each warning is one sentence with the run's numbers and what to do. A process compares its steps with its own only: the
ones before may have run on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gptmill.config.run import RunConfig
from gptmill.runs.events import (
    EvalDone,
    Event,
    RolledBack,
    RunStarted,
    SampleDrawn,
    ScoresDone,
    StepLogged,
    TrainEvalDone,
    Warned,
)
from gptmill.training.cpu_check import CpuCheck, CpuRun
from gptmill.training.learning_checks import Check, GradNormCheck, OverfittingCheck, PlateauCheck
from gptmill.training.loss_checks import GapCheck, NonFiniteCheck, NotLearningCheck
from gptmill.training.machine_checks import (
    DataWaitCheck,
    EvaluationTimeCheck,
    MemoryCheck,
    MfuCheck,
    TemperatureCheck,
    ThrottlingCheck,
    ThroughputCheck,
    UtilizationCheck,
)
from gptmill.training.plan import TrainPlan
from gptmill.training.remedies import advise_on_divergence, advise_on_speed
from gptmill.training.straggler_check import ReadBusy, StragglerCheck

MIN_MFU_PARAMETERS = 10_000_000
UNUSUAL_STEPS = 3  # at the start and after a reset: compilation, an empty prefetch queue, cold caches


class Monitor:
    """Shows every event of a process to every check; one that fails is reported and removed."""

    def __init__(self, checks: Sequence[Check], stage_ends: Sequence[int] = ()) -> None:
        self._checks = list(checks)
        self._stage_ends = stage_ends
        self._stage: int | None = None
        self._unusual_steps = UNUSUAL_STEPS

    def check(self, event: Event) -> list[Warned]:
        """What to warn of after this event."""
        if isinstance(event, RunStarted | RolledBack):
            self._reset()
        elif isinstance(event, StepLogged):
            return self._ask(event, lambda check: check.see_step(event)) if self._is_usual(event) else []
        elif isinstance(event, EvalDone):
            return self._ask(event, lambda check: check.see_eval(event))
        elif isinstance(event, TrainEvalDone):
            return self._ask(event, lambda check: check.see_train_eval(event))
        elif isinstance(event, ScoresDone | SampleDrawn):
            return self._ask(event, lambda check: check.see_pause(event.time))
        return []

    def _is_usual(self, event: StepLogged) -> bool:
        """Whether the step can be compared with others; in another stage of a warm-up, only with those to come."""
        stage = sum(event.step > end for end in self._stage_ends)
        if self._stage not in (None, stage):
            self._reset()
        self._stage = stage
        self._unusual_steps -= 1
        return self._unusual_steps < 0

    def _reset(self) -> None:
        self._unusual_steps = UNUSUAL_STEPS
        for check in self._checks:
            check.reset()

    def _ask(self, event: Event, see: Callable[[Check], str]) -> list[Warned]:
        warnings = []
        for check in list(self._checks):
            try:
                text = see(check)
            except Exception as error:  # a monitor never hurts the run
                self._checks.remove(check)
                text = f"{type(check).__name__} failed ({error}) and is off for the rest of this process"
            if text:
                warnings.append(Warned(event.step, check.about, f"step {event.step:,}: {text}"))
        return warnings


def build_monitor(
    config: RunConfig,
    plan: TrainPlan,
    device_bytes: int | None,
    read_busy: ReadBusy | None = None,
    cpu: CpuRun | None = None,
) -> Monitor:
    """The checks that the config asks for.

    `device_bytes` is the memory of the GPU, `read_busy` tells ranks apart, and `cpu` is known for a run on a CPU.
    """
    options, eval_train = config.monitor, config.evaluation.eval_train
    checks: list[Check] = []
    norm_limits = options.warn_grad_norm, options.warn_grad_norm_rise
    if norm_limits != (None, None):
        checks.append(GradNormCheck(*norm_limits, config.optimizer.warmup_steps))
    # In any other order the loss follows the data.
    if options.warn_plateau_steps is not None and config.data.order == "shuffle":
        checks.append(PlateauCheck(options.warn_plateau_steps, plan.max_steps, config.optimizer.max_lr))
    if options.warn_memory is not None:
        checks.append(MemoryCheck(options.warn_memory, device_bytes))
    if options.warn_straggler is not None and read_busy is not None:
        checks.append(StragglerCheck(options.warn_straggler, read_busy))
    if options.warn_cpu is not None and cpu is not None:
        checks.append(CpuCheck(options.warn_cpu, cpu))
    by_limit: list[tuple[Callable[[float], Check], float | None]] = [
        (OverfittingCheck, options.warn_overfitting),
        (ThroughputCheck, options.warn_throughput),
        (EvaluationTimeCheck, options.warn_eval_time),
        (DataWaitCheck, options.warn_data_wait),
        (TemperatureCheck, options.warn_temperature),
        (ThrottlingCheck, options.warn_throttling),
        (lambda limit: UtilizationCheck(limit, advise_on_speed(config, plan)), options.warn_utilization),
        (partial(GapCheck, dropout=config.model.dropout, eval_train=eval_train), options.warn_overfitting_gap),
    ]
    if plan.parameters >= MIN_MFU_PARAMETERS:  # no GPU is fast at less
        by_limit.append((lambda limit: MfuCheck(limit, advise_on_speed(config, plan)), options.warn_mfu))
    checks += [build(limit) for build, limit in by_limit if limit is not None]
    checks += _build_loss_checks(config, plan)
    stages = *plan.context_warmup, *plan.batch_size_warmup
    return Monitor(checks, [stage.last_step for stage in stages])


def _build_loss_checks(config: RunConfig, plan: TrainPlan) -> list[Check]:
    optimizer, steps = config.optimizer, config.monitor.warn_not_learning
    remedies = advise_on_divergence(config, plan, optimizer.warmup_steps)
    checks: list[Check] = []
    if config.guard.guard != "rollback":  # which acts on it, and says so
        checks.append(NonFiniteCheck(remedies, gradients_count=plan.precision != "fp16"))
    if steps is not None:
        checks.append(NotLearningCheck(steps, optimizer.warmup_steps, plan.vocab_size, optimizer.max_lr))
    return checks

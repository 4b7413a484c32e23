"""Everything between a run request and the first step: open the run, plan, build, restore."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.trust import remember_run
from gptmill.data.batches.data_loader import DataLoader
from gptmill.data.batches.row_reader import Reader
from gptmill.data.batches.samplers import Sampler
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.evals import Evaluator, build_evaluators
from gptmill.runs.checkpoints.sharded_state import saves_jointly
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import Event
from gptmill.runs.slow_notice import say_if_slow
from gptmill.runs.trackers import TrackerGroup
from gptmill.runtime.attention_backend import set_attention_backend
from gptmill.runtime.compiling import forget_compiled, load_compiler
from gptmill.runtime.determinism import set_deterministic
from gptmill.runtime.flight_recorder import set_up_flight_recorder
from gptmill.runtime.host_allocator import keep_freed_memory, keep_large_blocks
from gptmill.runtime.host_usage import read_host_room
from gptmill.runtime.memory import read_device_memory
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.precision import set_matmul_precision
from gptmill.runtime.ranks import has_ranks
from gptmill.runtime.signals import StopFlag, listen_for_stop
from gptmill.runtime.telemetry import Telemetry, open_telemetry
from gptmill.runtime.torch_settings import restore_torch_settings
from gptmill.runtime.watchdog import Watchdog, open_watchdog
from gptmill.runtime.world import World, open_world
from gptmill.training.audit import check_audit
from gptmill.training.checkpointing import Checkpointer, list_due_tiers
from gptmill.training.cpu_check import find_cpu_run
from gptmill.training.dry_run import dry_run
from gptmill.training.host_memory_check import check_state_fits, has_ample_memory
from gptmill.training.initial_weights import (
    broadcast_initial_weights,
    read_initial_source,
    record_source,
)
from gptmill.training.micro_batch import check_cuda_graphs
from gptmill.training.monitor import Monitor, build_monitor
from gptmill.training.plan import TrainPlan
from gptmill.training.preflight import check_machine
from gptmill.training.provenance import describe_run, make_origin
from gptmill.training.rank_failures import RankFailures, open_rank_failures
from gptmill.training.restoring import build_or_restore
from gptmill.training.resume_point import hold_run, read_resume_point
from gptmill.training.run_data import build_reader, open_run_data
from gptmill.training.run_opening import (
    check_logs,
    estimate_size,
    list_start_warnings,
    open_run,
    open_run_trackers,
)
from gptmill.training.run_request import RunRequest
from gptmill.training.shared_folder import check_shared_folder, join_writers
from gptmill.training.skip_ranges import make_starts
from gptmill.training.state import TrainState
from gptmill.training.straggler_check import make_busy_reader
from gptmill.training.strategy import choose_strategy


@dataclass(frozen=True)
class Session:
    """What stays the same while this process trains."""

    config: RunConfig
    plan: TrainPlan
    world: World
    sampler: Sampler
    reader: Reader
    evaluators: list[Evaluator]
    run: RunDirectory
    checkpointer: Checkpointer
    stop: StopFlag
    watchdog: Watchdog
    failures: RankFailures
    trackers: TrackerGroup
    monitor: Monitor
    telemetry: Telemetry
    shows_progress: bool
    """Whether this process prints what it is doing."""
    first_step: int
    """The step at which this process started."""
    started: float
    """time.monotonic() at the start of this process."""

    def track(self, event: Event) -> None:
        """Passes an event to the trackers, followed by what the monitor has to say about it."""
        self.trackers.track(event)
        for warning in self.monitor.check(event):
            self.trackers.track(warning)

    def measure_seconds(self) -> float:
        """Seconds since this process started."""
        return time.monotonic() - self.started

    def is_finished(self, state: TrainState) -> bool:
        return state.step >= self.plan.max_steps or state.early_stop.is_due

    def is_evaluation_due(self, state: TrainState) -> bool:
        is_time = state.step >= self.plan.max_steps or state.step % self.config.evaluation.eval_freq == 0
        return is_time and state.evaluated_at != state.step

    def is_snapshot_due(self, state: TrainState) -> bool:
        """Also at the first step of a process, so that there is always a state to roll back to."""
        return state.step in (1, self.first_step) or state.step % self.config.guard.snapshot_freq == 0

    def is_something_due(self, state: TrainState) -> bool:
        """Whether an evaluation, checkpoint or snapshot is due, which needs the metrics of the newest step."""
        is_last = state.step >= self.plan.max_steps
        tiers = list_due_tiers(state, self.config, self.plan, is_best=False, is_last=is_last)
        return bool(tiers) or self.is_evaluation_due(state) or self.is_snapshot_due(state)

    def say_if_slow(self, state: TrainState, doing: str) -> AbstractContextManager[None]:
        """Shows signs of life at the start of a process; later the logged steps do, of which the first comes late."""
        is_starting = state.step <= self.first_step + 1
        return say_if_slow(doing) if self.shows_progress and is_starting else nullcontext()

    def open_data_loader(self, state: TrainState) -> DataLoader:
        """This rank's micro-batches from the current data position on."""
        world = self.world
        starts = make_starts(
            state.skipped_windows, state.windows_read, state.step, self.plan, world.data_rank, world.data_size,
            self.sampler.samples_per_batch, is_exact=state.reduction.is_exact,
        )  # fmt: skip
        return DataLoader(self.sampler, self.reader, self.world.device, starts, self.config.data.prefetch_batches)


def open_session(request: RunRequest, report_preparing: Report, stack: ExitStack) -> tuple[Session, TrainState]:
    """Builds or restores the state and opens the run. Writes nothing before everything has been validated."""
    config, started = request.config, time.monotonic()
    world = open_machine(config, stack)
    with world.together():
        check_machine(config, world, is_new=request.resumed is None)
        source = read_initial_source(request, world)
        data = open_run_data(request, world, report_preparing)
        host_room = read_host_room()  # before any rank has built its model
    world = arrange_ranks(world, choose_strategy(config, world, partial(data.plan, config, world)), config.machine)
    plan = data.plan(config, world)
    set_matmul_precision(plan.precision)
    run = hold_run(request, world, stack)
    is_joint = saves_jointly(world)
    token = check_shared_folder(run.checkpoints, world) if is_joint else ""
    resume_point = read_resume_point(request, world, is_joint=is_joint)
    weights = None
    if resume_point is None:
        weights = broadcast_initial_weights(source, request, data.corpora, plan, world)
    request = record_source(request, weights)
    config = request.config
    with world.together():
        check_state_fits(config, plan, world, host_room)
    if has_ample_memory(config, plan, world, host_room):
        stack.enter_context(keep_large_blocks())
    state, plan = build_or_restore(request, plan, world, data.corpora, resume_point, weights)
    shows_progress = world.is_main and not request.is_quiet
    try_step(state, config, plan, world, stack, host_room, shows_progress=shows_progress)
    data.finish_verification(world)
    evaluators = build_evaluators(config, data.corpora, world, data.tasks, plan.max_steps)
    reader = build_reader(config, data.corpora, world)
    stop = stack.enter_context(listen_for_stop(request.deadline))
    origin = make_origin(config, data.corpora, resume_point, world)
    writers = join_writers(token, state.make_checkpoint(origin), world) if is_joint else None
    checkpointer = stack.enter_context(Checkpointer(run, config, origin, world, state.step, writers))
    size_bytes = estimate_size(state) if writers is None else writers.total_bytes
    open_run(run, request, state, size_bytes, resume_point, world)
    hang_limits = (config.guard.hang_factor, config.guard.hang_seconds)
    watchdog = stack.enter_context(open_watchdog(run.path, world.rank, world.size, *hang_limits, peers=world.ranks))
    failures = stack.enter_context(open_rank_failures(run, world, watchdog, stop))
    damaged = check_logs(run, resume_point) if world.is_main else []
    trackers = stack.enter_context(open_run_trackers(run, request, state, world))
    trackers.track(describe_run(request, run, plan, world, state, data.corpora, resume_point))
    if world.is_main:
        remember_run(list_values(config))
    for warning in [*damaged, *list_start_warnings(config, plan, world, state, data, resume_point)]:
        trackers.track(warning)
    cpu = find_cpu_run(config, plan, world.size) if world.device.type == "cpu" else None
    monitor = build_monitor(config, plan, read_device_memory(world.device), make_busy_reader(world, watchdog), cpu)
    telemetry = stack.enter_context(open_telemetry(world))
    session = Session(
        config, plan, world, data.sampler, reader, evaluators, run, checkpointer, stop, watchdog, failures,
        trackers, monitor, telemetry, shows_progress=shows_progress, first_step=state.step, started=started,
    )  # fmt: skip
    return session, state


def open_machine(config: RunConfig, stack: ExitStack) -> World:
    """The ranks and their device, with torch's settings as the config asks; the stack restores them."""
    stack.enter_context(restore_torch_settings())
    set_deterministic(config.machine.deterministic)
    set_attention_backend(config.machine.attention_backend)
    if config.machine.compile:
        load_compiler()
    if has_ranks():
        prefix = Path(config.tracking.logdir, config.tracking.run_name or "", "flight_recorder_rank_")
        stack.enter_context(set_up_flight_recorder(prefix))
    world = stack.enter_context(open_world(config.machine.device))
    if world.device.type == "cpu":
        stack.enter_context(keep_freed_memory())
    check_cuda_graphs(config, world)
    check_audit(config, world.device)
    return world


def try_step(
    state: TrainState,
    config: RunConfig,
    plan: TrainPlan,
    world: World,
    stack: ExitStack,
    host_room: int | None,
    *,
    shows_progress: bool,
) -> None:
    """The dry run, which finds out whether a step fits into memory, and compiles what the config asks to."""
    if config.machine.compile:
        stack.callback(forget_compiled)
    with say_if_slow(describe_dry_run(config)) if shows_progress else nullcontext():
        dry_run(state, config, plan, world, host_room)


def describe_dry_run(config: RunConfig) -> str:
    compiling = ", and compiling the model" if config.machine.compile else ""
    return f"trying {config.training.mini_batch_size} x {config.model.context_length:,} tokens{compiling}"

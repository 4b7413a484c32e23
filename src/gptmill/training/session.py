"""Everything between a run request and the first step: open the run, plan, build, restore."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
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
from gptmill.evals.loss import check_validation
from gptmill.evals.task_evaluator import describe_cropped, load_eval_tasks
from gptmill.inference.loading import check_size
from gptmill.runs.checkpoints.disk_space import check_disk_space
from gptmill.runs.checkpoints.sharded_state import saves_jointly
from gptmill.runs.directory import RunDirectory, create_run, save_config
from gptmill.runs.events import Event, Warned
from gptmill.runs.history import record_crash
from gptmill.runs.slow_notice import say_if_slow
from gptmill.runs.trackers import TrackerGroup, open_trackers
from gptmill.runtime.attention_backend import set_attention_backend
from gptmill.runtime.compiling import forget_compiled, load_compiler
from gptmill.runtime.determinism import set_deterministic
from gptmill.runtime.flight_recorder import set_up_flight_recorder
from gptmill.runtime.host_usage import read_available_memory
from gptmill.runtime.memory import read_device_memory, read_host_memory
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.precision import set_matmul_precision
from gptmill.runtime.ranks import has_ranks
from gptmill.runtime.signals import StopFlag, listen_for_stop
from gptmill.runtime.telemetry import Telemetry, open_telemetry
from gptmill.runtime.torch_settings import restore_torch_settings
from gptmill.runtime.watchdog import Watchdog, open_watchdog
from gptmill.runtime.world import World, open_world
from gptmill.training.audit import check_audit
from gptmill.training.checkpointing import Checkpointer, list_due_tiers, open_checkpointer
from gptmill.training.dry_run import dry_run, refuse_too_large
from gptmill.training.host_memory_check import check_state_fits
from gptmill.training.initial_weights import (
    InitialWeights,
    broadcast_initial_weights,
    read_initial_source,
    record_source,
)
from gptmill.training.launch import check_same_data
from gptmill.training.micro_batch import check_cuda_graphs
from gptmill.training.monitor import Monitor, build_monitor
from gptmill.training.plan import TrainPlan, check_step_time, make_plan
from gptmill.training.plan_warnings import warn_of_plan
from gptmill.training.plugin_fingerprints import check_plugins
from gptmill.training.preflight import check_machine
from gptmill.training.provenance import describe_run, make_origin
from gptmill.training.rank_failures import RankFailures, open_rank_failures
from gptmill.training.resume_point import ResumePoint, hold_run, read_resume_point
from gptmill.training.run_request import RunRequest
from gptmill.training.schedule_warnings import warn_of_schedule
from gptmill.training.shared_folder import check_shared_folder, join_writers
from gptmill.training.skip_ranges import make_starts
from gptmill.training.state import TrainState, build_spike_detector, build_state
from gptmill.training.straggler_check import make_busy_reader
from gptmill.training.strategy import choose_strategy
from gptmill.training.thread_warning import warn_of_threads


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
        world.run_on_main(partial(prepare_if_needed, request, report_preparing))
        corpora = open_corpora(config.data)
        sampler = build_sampler(config, corpora)
        no_validation = check_validation(config, corpora)
        tasks = load_eval_tasks(config, corpora.tokenizer)
        check_same_data(world.ranks, corpora.sha256, corpora.name)
        host_room = read_available_memory() or read_host_memory()  # before any rank has built its model
    strategy = choose_strategy(
        config, world, lambda: make_plan(config, sampler, corpora.tokenizer, world, corpora.names)
    )
    world = arrange_ranks(world, strategy, config.machine)
    plan = make_plan(config, sampler, corpora.tokenizer, world, corpora.names)
    set_matmul_precision(plan.precision)
    run = hold_run(request, world, stack)
    is_joint = saves_jointly(world)
    token = check_shared_folder(run.checkpoints, world) if is_joint else ""
    resume_point = read_resume_point(request, world, is_joint=is_joint)
    weights = None
    if resume_point is None:
        weights = broadcast_initial_weights(source, request, corpora, plan, world)
    request = record_source(request, weights)
    config = request.config
    with world.together():
        check_state_fits(config, plan, world, host_room)
    state, plan = build_or_restore(request, plan, world, corpora, resume_point, weights)
    if config.machine.compile:
        stack.callback(forget_compiled)
    shows_progress = world.is_main and not request.is_quiet
    with say_if_slow(describe_dry_run(config)) if shows_progress else nullcontext():
        dry_run(state, config, plan, world, host_room)
    evaluators = build_evaluators(config, corpora, world, tasks, plan.max_steps)
    reader = build_reader(config, corpora, world)
    stop = stack.enter_context(listen_for_stop(request.deadline))
    origin = make_origin(config, corpora, resume_point, world)
    writers = join_writers(token, state.make_checkpoint(origin), world) if is_joint else None
    checkpointer = stack.enter_context(open_checkpointer(run, config, origin, world, state.step, writers))
    size_bytes = estimate_size(state) if writers is None else writers.total_bytes
    open_run(run, request, state, size_bytes, resume_point, world)
    hang_limits = (config.guard.hang_factor, config.guard.hang_seconds)
    watchdog = stack.enter_context(open_watchdog(run.path, world.rank, world.size, *hang_limits, peers=world.ranks))
    failures = stack.enter_context(open_rank_failures(run, world, watchdog, stop))
    is_evaluated, is_quiet = state.evaluated_at == state.step, request.is_quiet
    trackers = TrackerGroup([])
    if world.is_main:
        trackers = open_trackers(run, config.tracking, state.step, is_evaluated=is_evaluated, is_quiet=is_quiet)
    stack.enter_context(trackers)
    trackers.track(describe_run(request, run, plan, world, state, corpora, resume_point))
    if no_validation:
        trackers.track(Warned(state.step, "validation", no_validation))
    if cropped := describe_cropped(tasks, config.model.context_length):
        trackers.track(Warned(state.step, "tasks", cropped))
    warnings = warn_of_schedule(config, plan, state, resume_point) + warn_of_threads(config, world, resume_point)
    for warning in warnings:
        trackers.track(warning)
    if resume_point is None and world.is_main:
        for warning in warn_of_plan(config, plan, corpora):
            trackers.track(warning)
    monitor = build_monitor(config, plan, read_device_memory(world.device), make_busy_reader(world, watchdog))
    telemetry = stack.enter_context(open_telemetry(world))
    session = Session(
        config, plan, world, sampler, reader, evaluators, run, checkpointer, stop, watchdog, failures,
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
    check_cuda_graphs(config, world)
    check_audit(config, world.device)
    return world


def build_or_restore(
    request: RunRequest,
    plan: TrainPlan,
    world: World,
    corpora: Corpora,
    resume_point: ResumePoint | None,
    weights: InitialWeights | None,
) -> tuple[TrainState, TrainPlan]:
    """A fresh state, one with the weights of another model, or one restored; and the plan of its remaining steps."""
    config = request.config
    if resume_point is not None:
        tensors = resume_point.checkpoint.tensors["model"]
        check_size(config.model, plan.padded_vocab_size, tensors, resume_point.description)
    with refuse_too_large(world.device):
        check_step_time(plan, world)
        state = build_state(config, plan, world)
        if resume_point is not None:
            plan = restore(state, resume_point, corpora, request, plan)
        elif weights is not None:
            weights.load(state)
    return state, plan


def describe_dry_run(config: RunConfig) -> str:
    compiling = ", and compiling the model" if config.machine.compile else ""
    return f"trying {config.training.mini_batch_size} x {config.model.context_length:,} tokens{compiling}"


def prepare_if_needed(request: RunRequest, report: Report) -> None:
    """Tokenizes the corpus into shards where there are none; a resumed run checks the existing ones by checksum."""
    data = request.config.data
    if data.mixture is not None:
        return  # a mixture refers to prepared corpora only
    is_resumed = request.resumed is not None and request.resumed.has_checkpoints
    uses_existing = is_resumed or data.corpus is None
    if not (uses_existing and holds_shards(find_data_dir(data))) and needs_preparing(data):
        prepare_for_run(data, report)


def restore(
    state: TrainState, resume_point: ResumePoint, corpora: Corpora, request: RunRequest, plan: TrainPlan
) -> TrainPlan:
    """Loads the checkpoint into the state; raises UserError if it saw other tokens or has no steps left.

    Returns the plan of the remaining steps: epochs count the windows read so far, whatever the batch size was.
    """
    checkpoint, source, config = resume_point.checkpoint, resume_point.description, request.config
    check_fingerprint(str(checkpoint.values.get("tokenizer_fingerprint"))[:200], corpora.fingerprint, source)
    if checkpoint.values.get("corpus_sha256") != corpora.sha256 and not request.allows_changes:
        weights = ", or with other mixture weights" if len(corpora.shards) > 1 else ""
        raise UserError(
            f"{source} was trained on other tokens than {corpora.name} holds now{weights}; "
            f"start a new run, or add --allow_changes to resume on the new tokens"
        )
    check_plugins(checkpoint.values.get("plugins"), config, corpora.tokenizer.name, source, request.allows_changes)
    state.restore(checkpoint, source)
    if request.allows_changes and request.changes:
        state.spike_detector = build_spike_detector(config)  # its statistics may no longer hold
    trained = state.windows_read - state.windows_jumped
    plan = replace(plan, max_steps=plan.find_max_steps(config.training, state.step, trained))
    if state.step > plan.max_steps:
        raise UserError(f"{source} is at step {state.step}, beyond max_steps {plan.max_steps}; raise --max_steps")
    return plan


def build_reader(config: RunConfig, corpora: Corpora, world: World) -> Reader:
    """Reads rows of tokens from device memory or from memory-mapped files on the host."""
    if config.data.data_on_device:
        return load_on_device(corpora, world.device)
    tokenizer = corpora.tokenizer
    return HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)


def open_run(
    run: RunDirectory,
    request: RunRequest,
    state: TrainState,
    checkpoint_bytes: int,
    resume_point: ResumePoint | None,
    world: World,
) -> None:
    """Creates the run's directory, or opens that of the resumed run; on rank 0, which holds its lock."""
    config = request.config
    assert config.tracking.run_name is not None
    if world.is_main:
        warning = check_disk_space(run.checkpoints, checkpoint_bytes, config.checkpoints.keep_checkpoints)
        record_crash(run)
        warnings = []
        if resume_point is not None:
            warnings = [f"{text}; resuming from step {state.step} instead" for text in resume_point.complaints]
        if resume_point is not None and resume_point.is_own:
            warnings.append(resume_point.make_latest(run.checkpoints, config.checkpoints.keep_checkpoints))
        for text in filter(None, [*warnings, warning]):
            sys.stderr.write(f"warning: {text}\n")
        if resume_point is None or not resume_point.is_own:
            create_run(config.tracking.logdir, config.tracking.run_name, config)
        elif request.changes:
            save_config(run, config)


def estimate_size(state: TrainState) -> int:
    """Bytes of the tensors in a checkpoint: weights, optimizer state and, where kept, the EMA."""
    groups = state.make_checkpoint({}).tensors.values()
    return sum(int(tensor.nbytes) for tensors in groups for tensor in tensors.values())

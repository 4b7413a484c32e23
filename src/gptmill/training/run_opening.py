"""Opens the folder of a run that starts or resumes, and says what is worth knowing before the first step."""

from __future__ import annotations

import sys

from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.config.trust import take_admitted
from gptmill.evals.task_evaluator import describe_cropped
from gptmill.runs.append_file import Extent
from gptmill.runs.checkpoints.disk_space import check_disk_space
from gptmill.runs.directory import RunDirectory, create_run, save_config
from gptmill.runs.events import RolledBack, RunStarted, Warned
from gptmill.runs.history import read_history, record_crash
from gptmill.runs.trackers import TrackerGroup, open_trackers
from gptmill.runs.trackers.run_files import set_aside_damaged
from gptmill.runtime.world import World
from gptmill.training.plan import TrainPlan
from gptmill.training.plan_warnings import warn_of_plan
from gptmill.training.resume_point import ResumePoint
from gptmill.training.run_data import RunData
from gptmill.training.run_request import RunRequest
from gptmill.training.saved_values import read_count, read_dict, read_list, read_number
from gptmill.training.schedule_warnings import warn_of_schedule
from gptmill.training.state import TrainState
from gptmill.training.thread_warning import warn_of_threads


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


def check_logs(run: RunDirectory, resume_point: ResumePoint | None) -> list[Warned]:
    """Compares the logs of a resumed run with what its checkpoint recorded. Call it before they are rewound.

    Says nothing of logs that were cut to an earlier step meanwhile, or whose damage has been reported.
    """
    if resume_point is None or not resume_point.is_own:
        return []
    step = resume_point.checkpoint.step
    try:
        logs = read_dict(resume_point.checkpoint.values.get("logs"), "logs")
        recorded = {
            name: Extent(*(read_count(number, name) for number in read_list(numbers, name, length=2)))
            for name, numbers in logs.items()
            if name != "time"
        }
        recorded_at = read_number(logs["time"], "time") or 0.0
    except (ValueError, KeyError):  # a checkpoint of an older version has no such record
        return []
    for entry in read_history(run):
        is_cut = isinstance(entry, RunStarted | RolledBack) and entry.step < step
        if entry.time > recorded_at and (is_cut or (isinstance(entry, Warned) and entry.about == "logs")):
            return []
    return [Warned(step, "logs", sentence) for sentence in set_aside_damaged(run, recorded)]


def estimate_size(state: TrainState) -> int:
    """Bytes of the tensors in a checkpoint: weights, optimizer state and, where kept, the EMA."""
    groups = state.make_checkpoint({}).tensors.values()
    return sum(int(tensor.nbytes) for tensors in groups for tensor in tensors.values())


def open_run_trackers(run: RunDirectory, request: RunRequest, state: TrainState, world: World) -> TrackerGroup:
    """The trackers of rank 0; other ranks have none."""
    if not world.is_main:
        return TrackerGroup([])
    is_evaluated = state.evaluated_at == state.step
    return open_trackers(run, request.config.tracking, state.step, is_evaluated=is_evaluated, is_quiet=request.is_quiet)


def list_start_warnings(
    config: RunConfig, plan: TrainPlan, world: World, state: TrainState, data: RunData, resume_point: ResumePoint | None
) -> list[Warned]:
    """What will be missing or differ from what a reader of the config expects."""
    found = [
        Warned(state.step, "trust", f"trusted {what}, which only the run named")
        for what in take_admitted(list_values(config))
    ]
    if data.no_validation:
        found.append(Warned(state.step, "validation", data.no_validation))
    if cropped := describe_cropped(data.tasks, config.model.context_length):
        found.append(Warned(state.step, "tasks", cropped))
    found += warn_of_schedule(config, plan, state, resume_point)
    found += warn_of_threads(config, world, resume_point)
    if resume_point is None and world.is_main:
        found += warn_of_plan(config, plan, data.corpora)
    return found

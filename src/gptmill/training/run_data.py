"""What a run reads: its corpora in the order of training, tokenized before if need be, and the tasks that score it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptmill.config.run import RunConfig
from gptmill.data.batches.on_device import load_on_device
from gptmill.data.batches.row_reader import HostReader, Reader
from gptmill.data.batches.samplers import Sampler, build_sampler
from gptmill.data.corpus_preparation import find_data_dir, needs_preparing, prepare_for_run
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.data.run_corpora import Corpora, open_corpora
from gptmill.data.shards.opening import holds_shards
from gptmill.data.shards.verification import verify_portion
from gptmill.evals.loss import check_validation
from gptmill.evals.task_evaluator import EncodedTask, load_eval_tasks
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunStarted
from gptmill.runs.history import read_history
from gptmill.runtime.world import World
from gptmill.training.launch import check_same_data
from gptmill.training.plan import TrainPlan, make_plan
from gptmill.training.run_request import RunRequest


@dataclass(frozen=True)
class RunData:
    """The data of a run, the same on all ranks."""

    corpora: Corpora
    sampler: Sampler
    tasks: Sequence[EncodedTask]
    no_validation: str
    """Why there is no validation loss; empty if there is one."""
    verification: Future[None] | None
    """Of a portion of the corpora, on rank 0."""

    def plan(self, config: RunConfig, world: World) -> TrainPlan:
        return make_plan(config, self.sampler, self.corpora.tokenizer, world, self.corpora.names)

    def finish_verification(self, world: World) -> None:
        """Raises UserError on all ranks if a file of the corpora changed."""
        world.run_on_main(lambda: None if self.verification is None else self.verification.result())


def open_run_data(request: RunRequest, world: World, report: Report) -> RunData:
    """Rank 0 prepares the corpus where it is not; raises UserError for data that do not fit the config."""
    config = request.config
    world.run_on_main(partial(prepare_if_needed, request, report))
    corpora = open_corpora(config.data, is_recorded=bool(request.resumed or request.parent))
    verification = start_verification(config, corpora) if world.is_main else None
    sampler = build_sampler(config, corpora)
    no_validation = check_validation(config, corpora)
    tasks = load_eval_tasks(config, corpora.tokenizer)
    check_same_data(world.ranks, corpora.sha256, corpora.name)
    return RunData(corpora, sampler, tasks, no_validation, verification)


def start_verification(config: RunConfig, corpora: Corpora) -> Future[None]:
    """Verifies a portion of the corpora beside what else a start does, another one at each start of the run."""
    name = config.tracking.run_name or ""
    entries = read_history(RunDirectory(Path(config.tracking.logdir, name)))
    turn = zlib.crc32(name.encode()) + sum(isinstance(entry, RunStarted) for entry in entries)
    pool = ThreadPoolExecutor(1, "verification")
    verification = pool.submit(verify_portion, corpora.shards, turn)
    pool.shutdown(wait=False)
    return verification


def prepare_if_needed(request: RunRequest, report: Report) -> None:
    """Tokenizes the corpus into shards where there are none; a resumed run checks the existing ones by checksum."""
    data = request.config.data
    if data.mixture is not None:
        return  # a mixture refers to prepared corpora only
    is_resumed = request.resumed is not None and request.resumed.has_checkpoints
    uses_existing = is_resumed or data.corpus is None
    if not (uses_existing and holds_shards(find_data_dir(data))) and needs_preparing(data):
        prepare_for_run(data, report)


def build_reader(config: RunConfig, corpora: Corpora, world: World) -> Reader:
    """Reads rows of tokens from device memory or from memory-mapped files on the host."""
    if config.data.data_on_device:
        return load_on_device(corpora, world.device)
    tokenizer = corpora.tokenizer
    return HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)

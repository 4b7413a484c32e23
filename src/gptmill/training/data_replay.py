"""Data replay: the rows that a given step of a run was trained on, recomputed from its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.errors import UserError
from gptmill.config.recipes import read_saved_config
from gptmill.config.trust import load_trusted_plugins
from gptmill.config.value_syntax import find_stage, parse_stages
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import open_corpora
from gptmill.data.shards.passages import Extract, SplitReader
from gptmill.runs.checkpoints.selection import load_chosen
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import RunStarted
from gptmill.training.skip_ranges import find_step_windows


@dataclass(frozen=True)
class Row:
    """One row of a step's batch and its position in the corpus."""

    corpus: str
    shard: str
    start: int
    length: int
    extracts: list[Extract]


def replay_step(run: RunDirectory, step: int) -> Iterator[Row]:
    """Yields the rows of a step; raises UserError if the run has not done it or the tokens have changed."""
    config = read_saved_config(run.config)
    if step < 1:
        raise UserError(f"--step {step}: the first step of a run is 1")
    events = read_events(run.events)
    starts = [event for event in events if isinstance(event, RunStarted)]
    if not starts:
        raise UserError(f"{run.events} does not say where the run started; restore it from a copy")
    last = max((event.step for event in events), default=0)
    if step > last:
        raise UserError(f"--step {step}: run {run.path} has done {last} steps; give one of them")
    load_trusted_plugins(config.plugins.plugin)  # of which the tokenizer may be one
    corpora = open_corpora(config.data, is_recorded=True)
    skipped_windows: list[tuple[int, int]] = []
    if run.has_checkpoints:
        values = load_chosen(run.checkpoints, "latest", groups=()).checkpoint.values
        skipped_windows = [(first, end) for first, end in values.get("skipped_windows", [])]
        if values.get("corpus_sha256") != corpora.sha256:
            raise UserError(f"run {run.path} was trained on other tokens or scores than {corpora.name} holds now")
    sampler = build_sampler(config, corpora)
    training = config.training
    if step <= starts[0].step:
        raise UserError(f"--step {step}: run {run.path} started at step {starts[0].step}, from {starts[0].parent}")
    # total_batch_size may change on resume; mini_batch_size only changes which micro-batch a row is in.
    # Steps of the parent run, if there is one, are assumed to have the batch size of this run's first step.
    stages = parse_stages(training.batch_size_warmup, "") if training.batch_size_warmup else ()
    sizes = [
        (find_stage(stages, number) or _find_tokens(starts, number)) // config.model.context_length
        for number in range(1, step + 1)
    ]
    readers = [SplitReader(shards, "train") for shards in corpora.shards]
    rows_per_sample = training.mini_batch_size // sampler.samples_per_batch  # of a window, or a group of documents
    first, end = find_step_windows(skipped_windows, [size // rows_per_sample for size in sizes])
    for sample in range(first, end, sampler.samples_per_batch):
        rows = sampler.find(sample)
        lengths = [rows.width] * len(rows.starts) if rows.lengths is None else rows.lengths.tolist()
        for corpus, shard, start, length in zip(rows.corpora, rows.shards, rows.starts, lengths, strict=True):
            if length:
                shards = corpora.shards[corpus]
                name = shards.manifest.train.shards[shard].file
                extracts = readers[corpus].read(int(shard), int(start), length)
                yield Row(shards.location, name, int(start), length, extracts)


def _find_tokens(starts: list[RunStarted], step: int) -> int:
    """Tokens of a step outside the batch-size warm-up, as logged by the process that did it."""
    return next((start.tokens_per_step for start in reversed(starts) if start.step < step), starts[0].tokens_per_step)

"""What a step of a run was trained on: the answer that an order without state gives at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.data.batches.streams import build_stream
from gptmill.data.corpora import open_corpora
from gptmill.data.shards.passages import Extract, SplitReader
from gptmill.runs.directory import RunDirectory


@dataclass(frozen=True)
class Row:
    """One row of a step's batches, and where it stands."""

    corpus: str
    shard: str
    start: int
    length: int
    extracts: list[Extract]


def read_step(run: RunDirectory, step: int) -> Iterator[Row]:
    """The rows of a step, provided that the run kept its batch size from the start."""
    config = build_config(RunConfig, load_recipe(str(run.config)))
    if step < 1:
        raise UserError(f"--step {step}: the first step of a run is 1")
    corpora = open_corpora(config.data)
    stream = build_stream(config, corpora)
    training = config.training
    batches = training.total_batch_size // (training.mini_batch_size * config.model.context_length)
    readers = [SplitReader(shards, "train") for shards in corpora.shards]
    first = (step - 1) * batches
    for batch in range(first, first + batches):
        places = stream.find(batch * stream.units_per_batch)
        lengths = [places.width] * len(places.starts) if places.lengths is None else places.lengths.tolist()
        for corpus, shard, start, length in zip(places.corpora, places.shards, places.starts, lengths, strict=True):
            if length:
                shards = corpora.shards[corpus]
                name = shards.manifest.train.shards[shard].file
                extracts = readers[corpus].read(int(shard), int(start), length)
                yield Row(shards.address, name, int(start), length, extracts)

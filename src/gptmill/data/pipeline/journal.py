"""The progress journal of a preparation, saved next to its shards, from which a killed one resumes."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptmill.config.json_text import read_json
from gptmill.data.cleaning import CleaningReport
from gptmill.data.files import write_durably
from gptmill.data.pipeline.chunks import START, Chunk, Position
from gptmill.data.pipeline.prepare_job import MAX_RAISED_FRACTION
from gptmill.data.pipeline.shard_writer import WriterState
from gptmill.data.sources import DefectReport

FILE_NAME = "journal.json"
MIN_VAL_TOKENS = 2049  # one window of a context length of 2048, even from a small corpus
VERSION = 2


@dataclass
class Journal:
    """Everything that the rest of a preparation depends on. The attributes are the keys of the JSON file."""

    origin: dict[str, Any]
    """The sources and options of the preparation; a journal of other ones is ignored."""
    tokenizer: dict[str, Any] | None = None
    """The spec of the tokenizer, once it is trained."""
    val_limit: int = 0
    """Pieces whose random draw is below this go to validation."""
    position: Position = START
    chunks: int = 0
    source_bytes: int = 0
    text_bytes: int = 0
    train: WriterState = field(default_factory=WriterState)
    val: WriterState = field(default_factory=WriterState)
    lowest_draws: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (-draw, tokens): the training pieces that move first if validation is too small."""
    report: CleaningReport = field(default_factory=CleaningReport)
    defects: DefectReport = field(default_factory=DefectReport)

    def __post_init__(self) -> None:
        self._drawn_tokens = sum(tokens for _, tokens in self.lowest_draws)

    def advance(self, chunk: Chunk) -> None:
        """Records that the chunk is written."""
        self.position = chunk.next
        self.chunks += 1
        self.source_bytes += chunk.source_bytes

    def record_draw(self, draw: int, tokens: int) -> None:
        """Keeps the training pieces with the lowest random draws, just enough for a validation split."""
        if self._drawn_tokens >= MIN_VAL_TOKENS and -draw < self.lowest_draws[0][0]:
            return  # the common case
        heapq.heappush(self.lowest_draws, (-draw, tokens))
        self._drawn_tokens += tokens
        while self._drawn_tokens - self.lowest_draws[0][1] >= MIN_VAL_TOKENS:
            self._drawn_tokens -= heapq.heappop(self.lowest_draws)[1]

    def find_raised_limit(self) -> int | None:
        """Returns the `val_limit` that makes validation at least one window, or None if it is or cannot be."""
        missing = min(MIN_VAL_TOKENS, MAX_RAISED_FRACTION * (self.train.tokens + self.val.tokens)) - self.val.tokens
        limit = None
        for draw, tokens in sorted(((-draw, tokens) for draw, tokens in self.lowest_draws))[: self.train.documents - 1]:
            if missing <= 0:
                break
            limit, missing = draw + 1, missing - tokens
        return limit

    def save(self, folder: Path) -> None:
        content = {
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            "version": VERSION,
            "position": [self.position.file_number, self.position.chunk],
            "train": self.train.to_json(),
            "val": self.val.to_json(),
            "report": self.report.to_json(),
            "defects": self.defects.to_json(),
        }
        write_durably(folder / FILE_NAME, json.dumps(content))


def read_journal(folder: Path, origin: dict[str, Any]) -> Journal | None:
    """Returns the journal of an earlier preparation of the same sources and options, or None."""
    try:
        content: dict[str, Any] = read_json(folder / FILE_NAME)
        if content.pop("version") != VERSION or content["origin"] != origin:
            return None
        return Journal(
            **{
                **content,
                "position": Position(*content["position"]),
                "train": WriterState.from_json(content["train"]),
                "val": WriterState.from_json(content["val"]),
                "lowest_draws": [(draw, tokens) for draw, tokens in content["lowest_draws"]],
                "report": CleaningReport.from_json(content["report"]),
                "defects": DefectReport.from_json(content["defects"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

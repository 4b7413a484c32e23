"""How far a preparation is, kept beside what it has written, so that a killed one goes on."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptmill.data.cleaning import CleaningReport
from gptmill.data.files import write_durably
from gptmill.data.pipeline.chunks import START, Chunk, Position
from gptmill.data.pipeline.shard_writer import WriterState

FILE_NAME = "journal.json"
MIN_VAL_TOKENS = 2049  # one window of the usual context, even from a small corpus
VERSION = 1
MAX_RAISED_FRACTION = 0.1


@dataclass
class Journal:
    """Everything that the rest of a preparation depends on."""

    origin: dict[str, Any]
    """What is being prepared; a journal of something else is of no use."""
    tokenizer: dict[str, Any] | None = None
    """Its spec, once it is learnt."""
    val_limit: int = 0
    """Pieces that drew a number below this go to validation."""
    position: Position = START
    chunks: int = 0
    source_bytes: int = 0
    text_bytes: int = 0
    train: WriterState = field(default_factory=WriterState)
    val: WriterState = field(default_factory=WriterState)
    lowest_draws: list[tuple[int, int]] = field(default_factory=list)
    """(-draw, tokens) of the pieces of training that are the first to move if validation is too short: a heap."""
    report: CleaningReport = field(default_factory=CleaningReport)

    def __post_init__(self) -> None:
        self._drawn_tokens = sum(tokens for _, tokens in self.lowest_draws)

    def advance(self, chunk: Chunk) -> None:
        """The chunk is written."""
        self.position = chunk.next
        self.chunks += 1
        self.source_bytes += chunk.source_bytes

    def remember_draw(self, draw: int, tokens: int) -> None:
        """Keeps the lowest draws of training, no more than would make a validation split."""
        if self._drawn_tokens >= MIN_VAL_TOKENS and -draw < self.lowest_draws[0][0]:
            return  # the usual case
        heapq.heappush(self.lowest_draws, (-draw, tokens))
        self._drawn_tokens += tokens
        while self._drawn_tokens - self.lowest_draws[0][1] >= MIN_VAL_TOKENS:
            self._drawn_tokens -= heapq.heappop(self.lowest_draws)[1]

    def find_raised_limit(self) -> int | None:
        """The limit at which validation is long enough for a window, if it is not and other documents can move."""
        wanted = min(MIN_VAL_TOKENS, MAX_RAISED_FRACTION * (self.train.tokens + self.val.tokens)) - self.val.tokens
        limit = None
        for draw, tokens in sorted(((-draw, tokens) for draw, tokens in self.lowest_draws))[: self.train.documents - 1]:
            if wanted <= 0:
                break
            limit, wanted = draw + 1, wanted - tokens
        return limit

    def save(self, folder: Path) -> None:
        content = {
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            "version": VERSION,
            "position": [self.position.file_number, self.position.chunk],
            "train": self.train.to_json(),
            "val": self.val.to_json(),
            "report": self.report.to_json(),
        }
        write_durably(folder / FILE_NAME, json.dumps(content))


def read_journal(folder: Path, origin: dict[str, Any]) -> Journal | None:
    """The journal of an earlier preparation of the very same thing, if there is one."""
    try:
        content: dict[str, Any] = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
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
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

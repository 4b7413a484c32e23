"""A corpus that is about to be prepared: its files, and how they are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptmill.config.requests import PrepareRequest
from gptmill.data.pipeline.encoding import DRAWS
from gptmill.data.sources import Source, SourceFile

FEW_DOCUMENTS = 5  # fewer expected in validation than this, and the tail of each document is fairer
MIN_VAL_BYTES = 8192  # a window of validation, even from a small corpus
MAX_RAISED_FRACTION = 0.1


@dataclass(frozen=True)
class OpenedCorpus:
    """The sources, what was asked for, and the description of both that goes into the manifest."""

    source: Source
    val_source: Source | None
    request: PrepareRequest
    origin: dict[str, Any]

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files; those of a validation source come last."""
        return self.source.files + (self.val_source.files if self.val_source else ())

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes + (self.val_source.size_bytes if self.val_source else 0)

    @property
    def first_val_file(self) -> int:
        return len(self.source.files)

    @property
    def tail_fraction(self) -> float | None:
        """The share of each document that goes to validation; None where whole documents go."""
        request = self.request
        is_few = self.source.one_document_per_file and len(self.source.files) * request.val_fraction < FEW_DOCUMENTS
        if self.val_source or request.split == "documents" or (request.split == "auto" and not is_few):
            return None
        raised = min(MAX_RAISED_FRACTION, MIN_VAL_BYTES / max(self.source.size_bytes, 1))
        return max(request.val_fraction, raised)

    @property
    def draws_documents(self) -> bool:
        """Whether whole documents are drawn into validation by their content."""
        return self.val_source is None and self.tail_fraction is None

    @property
    def val_limit(self) -> int:
        """What a piece must draw less than to go to validation."""
        return round(self.request.val_fraction * DRAWS) if self.draws_documents else 1

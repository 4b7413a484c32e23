"""A preparation job: the files of the corpus and how they are split into training and validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptmill.config.requests import PrepareRequest
from gptmill.data.pipeline.encoding import DRAW_RANGE
from gptmill.data.sources import Source, SourceFile

FEW_DOCUMENTS = 5  # with fewer expected validation documents, the tail of each document is a fairer split
MIN_VAL_BYTES = 8192  # about one window of validation, even from a small corpus
MAX_RAISED_FRACTION = 0.1  # of a small corpus, whose validation split is raised to one window


@dataclass(frozen=True)
class PrepareJob:
    """The sources, the request, and the description of both that goes into the manifest."""

    source: Source
    val_source: Source | None
    request: PrepareRequest
    origin: dict[str, Any]

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files; those of the validation source come last."""
        return self.source.files + (self.val_source.files if self.val_source else ())

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes + (self.val_source.size_bytes if self.val_source else 0)

    @property
    def first_val_file(self) -> int:
        return len(self.source.files)

    @property
    def has_val(self) -> bool:
        """Whether there is a validation split."""
        return self.val_source is not None or self.request.val_fraction > 0

    @property
    def tail_fraction(self) -> float | None:
        """The fraction of each document that goes to validation; None if whole documents do."""
        request = self.request
        is_few = self.source.one_document_per_file and len(self.source.files) * request.val_fraction < FEW_DOCUMENTS
        if self.val_source or not request.val_fraction:
            return None
        if request.split == "documents" or (request.split == "auto" and not is_few):
            return None
        raised = min(MAX_RAISED_FRACTION, MIN_VAL_BYTES / max(self.source.size_bytes, 1))
        return max(request.val_fraction, raised)

    @property
    def draws_documents(self) -> bool:
        """Whether whole documents are assigned to validation by random draws, which are hashes of their text."""
        return self.val_source is None and self.tail_fraction is None

    @property
    def val_limit(self) -> int:
        """Pieces whose random draw is below this go to validation."""
        return round(self.request.val_fraction * DRAW_RANGE) if self.draws_documents else 1

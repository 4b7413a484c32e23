"""Stops files that expand to far more text than they store: decompression bombs."""

from __future__ import annotations

from gptmill.data.sources.failures import ReadingError

FREE_BYTES = 16 * 2**20  # that any file may expand to: small files of repeated text reach high ratios


class ExpansionLimit:
    """The ratio of expanded to stored bytes that one file must not exceed; None for no limit."""

    def __init__(self, uri: str, max_ratio: float | None) -> None:
        self._uri = uri
        self._max_ratio = max_ratio

    def check(self, expanded_bytes: int, stored_bytes: int) -> None:
        """Raises ReadingError if so many stored bytes must not expand to so many."""
        if self._max_ratio is None or expanded_bytes <= FREE_BYTES:
            return
        ratio = expanded_bytes / max(stored_bytes, 1)
        if ratio > self._max_ratio:
            raise ReadingError(
                f"{self._uri} expands {ratio:,.0f}-fold so far ({expanded_bytes:,} bytes from {stored_bytes:,}), more "
                f"than --max_expansion {self._max_ratio:g} allows; leave it out, or raise the limit if you trust it "
                f"(none: no limit)"
            )

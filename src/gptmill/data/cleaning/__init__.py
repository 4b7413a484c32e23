"""Cleaning of a corpus: Unicode repair, quality filters and deduplication. Every step is off by default.

Repairs and filters are pure functions of one document and run in any number of processes; deduplication runs in one
process, in corpus order. Knows no source files, tokens or shards.
"""

from __future__ import annotations

from gptmill.data.cleaning.checks import check_cleaning
from gptmill.data.cleaning.cleaner import Cleaner, Drop
from gptmill.data.cleaning.cleaning_report import CleaningReport
from gptmill.data.cleaning.duplicates import DuplicateIndex

__all__ = ["Cleaner", "CleaningReport", "Drop", "DuplicateIndex", "check_cleaning"]

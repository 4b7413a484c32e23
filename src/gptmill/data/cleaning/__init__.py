"""Cleaning: what is repaired in a corpus and what is dropped from it. Every step is off unless asked for.

Repairs and filters are pure functions of one document, run in any number of processes; duplicates are found in one
place, in corpus order. Knows nothing of files of text, tokens or shards.
"""

from __future__ import annotations

from gptmill.data.cleaning.checks import check_cleaning
from gptmill.data.cleaning.cleaner import Cleaner
from gptmill.data.cleaning.cleaning_report import CleaningReport
from gptmill.data.cleaning.duplicates import DuplicateIndex

__all__ = ["Cleaner", "CleaningReport", "DuplicateIndex", "check_cleaning"]

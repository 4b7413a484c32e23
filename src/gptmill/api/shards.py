"""Prepares and opens shards with their progress shown. Imports no torch, which takes longer than many such calls."""

from __future__ import annotations

from pathlib import Path

from gptmill.api.progress import report_nothing, show_amount, show_preparing
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.data.shards.shard_manifest import Manifest


def run_preparation(sources: list[str], request: PrepareRequest, *, progress: bool = True) -> tuple[Path, Manifest]:
    """Prepares as requested, with the progress shown or not: what gptmill prepare and `prepare` have in common."""
    if not progress:
        return prepare_corpus(sources, request, report_nothing)
    with show_preparing() as report:
        return prepare_corpus(sources, request, report)


def open_and_check(path: str, tokenizer: str | None = None) -> TokenShards:
    """Opens a prepared corpus, or token files of another project; their checksums may take a while."""
    with show_amount("checking") as report:
        return open_shards(path, tokenizer, report=report)

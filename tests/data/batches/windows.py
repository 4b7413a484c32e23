"""Corpora whose tokens count up, so that a row shows where it was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gptmill.config.requests import PrepareRequest
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.data.batches.row_reader import HostReader
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import SplitWindows, TokenShards, open_shards

CONTEXT_LENGTH = 8
END_OF_TEXT = (1 << 16) - 1


def make_windows(num_windows: int, first: int = 0) -> SplitWindows:
    """Tokens count up over two shards, so that a window's first token identifies it."""
    cut = CONTEXT_LENGTH * (num_windows // 3) + 1
    tokens = np.arange(first, first + CONTEXT_LENGTH * num_windows + 1, dtype=np.uint16)
    windows = SplitWindows((tokens[:cut], tokens[cut - 1 :]), CONTEXT_LENGTH)
    assert windows.num_windows == num_windows
    return windows


def make_reader(*windows: SplitWindows) -> HostReader:
    return HostReader([part.arrays for part in windows], END_OF_TEXT, 1 << 16)


def make_config(**fields: Any) -> RunConfig:
    """A run with 16 tokens per window and 4 windows per micro-batch."""
    return build_config(
        RunConfig, {"context_length": 16, "mini_batch_size": 4, "total_batch_size": 128, "eval_tokens": 64, **fields}
    )


def prepare(folder: Path, texts: list[str], shard_tokens: int = 100_000) -> TokenShards:
    """Prepares each text as one document of bytes, the last tenth of it for validation."""
    source = folder.with_name(folder.name + "-text")
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    request = PrepareRequest(
        out=str(folder), tokenizer="byte", val_fraction=0.1, split="tail", shard_tokens=shard_tokens
    )
    return open_shards(prepare_corpus([str(source)], request, lambda _progress: None)[0])


def make_train_reader(corpora: Corpora) -> HostReader:
    tokenizer = corpora.tokenizer
    return HostReader([shards.train for shards in corpora.shards], tokenizer.end_of_text, tokenizer.vocab_size)

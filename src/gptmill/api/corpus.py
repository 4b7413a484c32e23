"""Corpus: tokenized text on disk: its tokens, documents and batches, read as they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gptmill.api.configuration import Recipe
from gptmill.api.shards import open_and_check, run_preparation
from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.keywords import build_request
from gptmill.config.requests import PrepareRequest
from gptmill.config.run import TrainingConfig
from gptmill.config.trust import name_addresses
from gptmill.data.batches.batch_stream import BatchOrder, BatchStream
from gptmill.data.shards.documents import read_document_tokens
from gptmill.data.shards.opening import TokenShards
from gptmill.data.shards.shard_manifest import Manifest
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, decode

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")
ORDERS: tuple[BatchOrder, ...] = ("shuffle", "shards", "sequential")


@dataclass(frozen=True, repr=False)
class Corpus:
    """A prepared corpus. Its shards are memory-mapped: nothing is read before it is used."""

    shards: TokenShards

    @property
    def path(self) -> Path:
        return self.shards.folder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.shards.tokenizer

    @property
    def info(self) -> Manifest:
        """The content of manifest.json: counts, shards, source and cleaning."""
        return self.shards.manifest

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits."""
        return self.info.train.tokens + self.info.val.tokens

    @property
    def fingerprint(self) -> str:
        """Identifies the tokens: where it is equal, so is every window."""
        return self.info.corpus_sha256

    def tokens(self, split: SplitName = "train") -> Sequence[TokenArray]:
        """The tokens of a split, one memory-mapped array per shard."""
        _check({"split": (split, SPLITS)})
        return self.shards.train if split == "train" else self.shards.val

    def document_tokens(self, split: SplitName = "train", start: int = 0) -> Iterator[TokenArray]:
        """The tokens of each document, from document number `start` on; each begins with end_of_text."""
        _check({"split": (split, SPLITS)}, {"start": (start, 0)})
        starts = self.shards.train_starts if split == "train" else self.shards.val_starts
        return read_document_tokens(self.tokens(split), starts, start)

    def documents(self, split: SplitName = "train", start: int = 0) -> Iterator[str]:
        """The text of each document, from document number `start` on."""
        return (decode(self.tokenizer, tokens.tolist()) for tokens in self.document_tokens(split, start))

    def batches(
        self,
        batch_size: int,
        context_length: int,
        split: SplitName = "train",
        *,
        seed: int = TrainingConfig.seed,
        order: BatchOrder = "shuffle",
        start: int = 0,
    ) -> BatchStream:
        """Endless batches of windows, from window number `start` on, as a training run with this seed reads them.

        Its `position`, or `state_dict()`, is all that is needed to go on later.
        """
        _check(
            {"split": (split, SPLITS), "order": (order, ORDERS)},
            {"batch_size": (batch_size, 1), "context_length": (context_length, 1), "start": (start, 0)},
        )
        return BatchStream(self.tokens(split), self.tokenizer, batch_size, context_length, seed, order, start)

    def __repr__(self) -> str:
        train, val = self.info.train.tokens, self.info.val.tokens
        return (
            f"Corpus({self.shards.location!r}, {train:,} training and {val:,} validation tokens, {self.tokenizer.name})"
        )


def prepare(
    *sources: Recipe, out: Recipe | None = None, tokenizer: Recipe = "gpt2", progress: bool = True, **options: Any
) -> Corpus:
    """Tokenizes sources into shards and opens them; a folder that holds exactly these already is opened at once.

    Sources and options are those of gptmill prepare: val_fraction, text_field, drop_duplicates, …
    """
    if not sources:
        raise UserError("prepare needs a source: a file, a folder, a URL or the name of a corpus")
    request = build_request(PrepareRequest, {"out": out, "tokenizer": tokenizer, **options})
    names = [os.fspath(source) for source in sources]
    name_addresses(names)
    folder, _ = run_preparation(names, request, progress=progress)
    return open_corpus(folder)


def open_corpus(path: Recipe, tokenizer: str | None = None) -> Corpus:
    """Opens a prepared corpus, or token files of another project, whose tokenizer may be named."""
    name_addresses([os.fspath(path)])
    return Corpus(open_and_check(os.fspath(path), tokenizer))


def _check(choices: dict[str, tuple[str, Sequence[str]]], counts: dict[str, tuple[int, int]] | None = None) -> None:
    """Raises ConfigError for values that are not among the choices, and for numbers below their minimum."""
    problems = [
        Problem(f"{name} = {value!r}", f"expected one of {', '.join(known)}")
        for name, (value, known) in choices.items()
        if value not in known
    ]
    for name, (number, least) in (counts or {}).items():
        if not isinstance(number, int) or number < least:
            problems.append(Problem(f"{name} = {number!r}", f"expected a whole number of at least {least}"))
    if problems:
        raise ConfigError(problems)

"""The prepared corpora that a run reads, and their mixture weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.run import DataConfig
from gptmill.config.value_syntax import parse_mixture
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.corpus_preparation import find_data_dir
from gptmill.data.shards.external_formats import find_external_files
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.data.shards.scores import hash_scores
from gptmill.data.tokenizers import Tokenizer, is_lost


@dataclass(frozen=True)
class Corpora:
    """One or several corpora of one tokenizer, in the order in which they were given."""

    shards: tuple[TokenShards, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)
    score: str | None = None  # that a curriculum follows

    @property
    def tokenizer(self) -> Tokenizer:
        return self.shards[0].tokenizer

    @property
    def fingerprint(self) -> str:
        return self.shards[0].manifest.fingerprint

    @cached_property
    def mixture(self) -> MixtureWeights:
        return MixtureWeights(self.weights)

    @property
    def sha256(self) -> str:
        """Identifies tokens, weights and scores: where it is equal, so is every window."""
        hashes = [shards.manifest.corpus_sha256 for shards in self.shards]
        if self.score is not None:
            parts = zip(hashes, self.shards, strict=True)
            hashes = [f"{digest} {hash_scores(shards, self.score)}" for digest, shards in parts]
        if len(hashes) == 1:
            return hashes[0]
        lines = [f"{weight} {digest}" for weight, digest in zip(self.mixture.weights, hashes, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(shards.location for shards in self.shards)

    @property
    def name(self) -> str:
        """The locations, with their shares if there are several."""
        if len(self.shards) == 1:
            return self.shards[0].location
        parts = zip(self.shards, self.weights, strict=True)
        return ", ".join(f"{shards.location} ({float(weight / sum(self.weights)):.3g})" for shards, weight in parts)


def open_corpora(config: DataConfig, *, is_recorded: bool = False) -> Corpora:
    """Opens the corpora of a run; raises UserError if their tokenizers differ.

    A run that `is_recorded` may have lost the file of its tokenizer, which its corpora and checkpoints hold too.
    """
    score = config.score if config.order == "curriculum" else None
    if config.mixture is None:
        return Corpora((_open(find_data_dir(config), config, is_recorded),), score=score)
    weights = parse_mixture(config.mixture)
    opened = tuple(_open(location, config, is_recorded) for location in weights)
    first = opened[0]
    for other in opened[1:]:
        if other.manifest.fingerprint != first.manifest.fingerprint:
            raise UserError(
                f"tokenizer mismatch in the mixture: {first.location} was prepared with {first.manifest.fingerprint}, "
                f"{other.location} with {other.manifest.fingerprint}; prepare them with the same tokenizer"
            )
    return Corpora(opened, tuple(weights.values()), score)


def _open(location: str, config: DataConfig, is_recorded: bool) -> TokenShards:
    name = config.tokenizer
    if is_recorded and name is not None and is_lost(name) and not find_external_files(Path(location)):
        name = None
    return open_shards(location, name, cache_bytes=round(config.cache_gb * 1e9))

"""The prepared corpora that a run reads, and in what shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from gptmill.config.errors import UserError
from gptmill.config.run import DataConfig
from gptmill.config.value_syntax import parse_mixture
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.corpus_preparation import find_data_dir
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.data.shards.scores import hash_scores
from gptmill.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpora:
    """One corpus or several of one tokenizer, in the order in which they were named."""

    shards: tuple[TokenShards, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)
    score: str | None = None  # the one that the order follows

    @property
    def tokenizer(self) -> Tokenizer:
        return self.shards[0].tokenizer

    @property
    def fingerprint(self) -> str:
        return self.shards[0].manifest.fingerprint

    @cached_property
    def shares(self) -> MixtureWeights:
        return MixtureWeights(self.weights)

    @property
    def sha256(self) -> str:
        """Names the tokens and the shares: equal, and every window is the same."""
        hashes = [shards.manifest.corpus_sha256 for shards in self.shards]
        if self.score is not None:
            parts = zip(hashes, self.shards, strict=True)
            hashes = [f"{digest} {hash_scores(shards, self.score)}" for digest, shards in parts]
        if len(hashes) == 1:
            return hashes[0]
        lines = [f"{share} {digest}" for share, digest in zip(self.shares.weights, hashes, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(shards.address for shards in self.shards)

    @property
    def name(self) -> str:
        """The folders, with their shares where there are several."""
        if len(self.shards) == 1:
            return self.shards[0].address
        parts = zip(self.shards, self.weights, strict=True)
        return ", ".join(f"{shards.address} ({float(weight / sum(self.weights)):.3g})" for shards, weight in parts)


def open_corpora(config: DataConfig) -> Corpora:
    """Opens all that the run reads; raises UserError where it does not go together."""
    score = config.score if config.order == "curriculum" else None
    if config.mixture is None:
        return Corpora((_open(find_data_dir(config), config),), score=score)
    weights = parse_mixture(config.mixture)
    opened = tuple(_open(place, config) for place in weights)
    first = opened[0]
    for other in opened[1:]:
        if other.manifest.fingerprint != first.manifest.fingerprint:
            raise UserError(
                f"tokenizer mismatch in the mixture: {first.address} was prepared with {first.manifest.fingerprint}, "
                f"{other.address} with {other.manifest.fingerprint}; prepare them with the same tokenizer"
            )
    return Corpora(opened, tuple(weights.values()), score)


def _open(place: str, config: DataConfig) -> TokenShards:
    return open_shards(place, config.tokenizer, cache_bytes=round(config.cache_gb * 1e9))

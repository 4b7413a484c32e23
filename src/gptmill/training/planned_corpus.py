"""The corpus of a planned run: read where it is prepared, else taken from the user's word or from the size of the text.

Downloads and prepares nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.run import DataConfig, RunConfig
from gptmill.config.value_syntax import parse_mixture
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.corpus_preparation import DEFAULT_TOKENIZER, find_data_dir, make_prepare_command
from gptmill.data.remote_fs import is_remote
from gptmill.data.run_corpora import Corpora, open_corpora
from gptmill.data.shards.opening import holds_shards
from gptmill.data.tokenizers import build_tokenizer
from gptmill.training.plan import CorpusSize

# Known without building the tokenizer; of characters, a guess, since only the text itself can tell.
VOCAB_SIZES = {"gpt2": 50_257, "char": 128}
BYTES_PER_TOKEN = {"byte": 1.0, "char": 1.0}
USUAL_BYTES_PER_TOKEN = 4.4  # English prose in GPT-2's tokens
MAX_SHARDS = 4  # whose document lengths are read
PLAIN_TEXT = (".txt", ".md", ".py", ".text")


@dataclass(frozen=True)
class PlannedCorpus:
    """The training split, as far as it is known."""

    name: str
    size: CorpusSize
    tokens: int | None
    """Of the training split; None if unknown."""
    source: str
    """How the number of tokens is known: prepared, given, estimated or unknown."""
    median_document_tokens: int | None = None
    advice: str = ""
    """What to do to know more."""


def read_planned_corpus(config: RunConfig, given_tokens: float | None) -> PlannedCorpus:
    """Reads the corpus where it is prepared; raises UserError if nothing tells how long the run is."""
    if given_tokens is None and _is_prepared(config.data):
        corpora = open_corpora(config.data)
        sampler, tokenizer = build_sampler(config, corpora), corpora.tokenizer
        size = CorpusSize(
            tokenizer.vocab_size, sampler.samples_per_epoch, sampler.samples_per_batch, tokenizer.end_of_text
        )
        total = sum(shards.manifest.train.tokens for shards in corpora.shards)
        return PlannedCorpus(corpora.name, size, total, "prepared", find_median_length(corpora))
    tokens, source = _find_tokens(config.data, given_tokens)
    advice = "" if source == "given" else _advise(config.data)
    training = config.training
    if tokens is None and training.max_steps is None and training.steps_per_epoch is None:
        raise UserError(
            f"the number of steps follows from the corpus, which is not prepared: {advice}; or give --max_steps, or "
            f"--corpus_tokens"
        )
    window = config.model.context_length
    samples_per_batch = 1 if config.data.documents == "whole" else training.mini_batch_size
    per_sample = training.mini_batch_size * window if config.data.documents == "whole" else window
    # Without tokens, an epoch is never used: the steps are given.
    samples = max(1, (tokens or training.total_batch_size * (training.max_steps or 1)) // per_sample)
    size = CorpusSize(_guess_vocab_size(config.data), samples, samples_per_batch, end_of_text=0)
    return PlannedCorpus(_find_name(config.data), size, tokens, source, advice=advice)


def _is_prepared(data: DataConfig) -> bool:
    if data.mixture is not None:
        return all(holds_shards(folder) for folder in parse_mixture(data.mixture))
    if data.data_dir is None and data.corpus is None:
        return False
    return holds_shards(find_data_dir(data))


def _find_name(data: DataConfig) -> str:
    return data.mixture or data.data_dir or data.corpus or "no corpus"


def _advise(data: DataConfig) -> str:
    if data.mixture is not None:
        missing = next(folder for folder in parse_mixture(data.mixture) if not holds_shards(folder))
        return f"gptmill prepare TEXT --out {missing}"
    if data.corpus is None and data.data_dir is None:
        return "name one with --corpus or --data_dir"
    return make_prepare_command(data)


def _find_tokens(data: DataConfig, given: float | None) -> tuple[int | None, str]:
    """The tokens of the training split and how they are known."""
    if given is not None:
        return round(given), "given"
    path = Path(data.corpus) if data.corpus and not is_remote(data.corpus) else None
    if path is None or not path.is_file() or path.suffix not in PLAIN_TEXT:
        return None, "unknown"
    per_token = BYTES_PER_TOKEN.get(data.tokenizer or DEFAULT_TOKENIZER, USUAL_BYTES_PER_TOKEN)
    return round((1 - data.val_fraction) * path.stat().st_size / per_token), "estimated"


def _guess_vocab_size(data: DataConfig) -> int:
    name = data.tokenizer or DEFAULT_TOKENIZER
    return VOCAB_SIZES[name] if name in VOCAB_SIZES else build_tokenizer(name, ()).vocab_size


def find_median_length(corpora: Corpora) -> int | None:
    """The median length of the documents in the first shards; None for a remote corpus, which would be downloaded."""
    lengths = []
    for shards in corpora.shards:
        if is_remote(shards.location):
            return None
        sizes = shards.cut(shards.train, 1).lengths
        for number in range(min(len(sizes), MAX_SHARDS)):
            starts = shards.train_starts[number]
            if len(starts):
                lengths.append(np.diff(np.append(starts, sizes[number])))
    return int(np.median(np.concatenate(lengths))) if lengths else None

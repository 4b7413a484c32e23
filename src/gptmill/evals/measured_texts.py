"""The tokens that a loss is measured of: a text file, or a split of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gptmill.config.errors import UserError
from gptmill.config.regular_files import read_regular
from gptmill.config.run import RunConfig
from gptmill.data.run_corpora import open_corpora
from gptmill.data.shards.opening import TokenShards, open_shards
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import TokenArray, check_fingerprint, make_fingerprint

SplitName = Literal["train", "val"]


@dataclass(frozen=True)
class MeasuredText:
    """Streams of tokens, each with one more than it has predictions."""

    name: str
    streams: Sequence[TokenArray]
    overlaps: bool
    """Whether windows overlap by half a context unless a stride is given; in a split they do not, as in training."""
    separator: int | None = None
    """The token between documents that must not attend to each other."""


def read_text(path: Path, tokenizer: Tokenizer) -> MeasuredText:
    """A text file as one document."""
    try:
        text = read_regular(path).decode()
    except OSError as error:
        raise UserError(f"cannot read --text {path}: {error.strerror or error}; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path} is not UTF-8 at byte {error.start}; convert it first") from None
    try:
        tokens = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"--text {path}: {error}") from None
    start = np.array([tokenizer.end_of_text], dtype=np.int64)
    return MeasuredText(str(path), [np.concatenate([start, tokens])], overlaps=True)


def open_split(
    split: SplitName, data_dir: str | None, config: RunConfig | None, tokenizer: Tokenizer
) -> list[MeasuredText]:
    """A split of the corpus in `data_dir`, or of all corpora of the run; documents are masked if the run masks them."""
    is_masked = config is not None and config.data.documents != "packed"
    if data_dir is not None:
        corpora: Sequence[TokenShards] = [open_shards(data_dir)]
    elif config is not None:
        corpora = open_corpora(config.data, is_recorded=True).shards
    else:
        raise UserError("this model has no run, so no corpus of its own: add --data_dir, --text or --tasks")
    texts = []
    for shards in corpora:
        check_fingerprint(shards.manifest.fingerprint, make_fingerprint(tokenizer), f"corpus {shards.location}")
        streams, name = (shards.val if split == "val" else shards.train), f"{shards.location} ({split})"
        if not any(len(stream) > 1 for stream in streams):
            raise UserError(f"{name} is empty; use the other --split, or another --data_dir")
        texts.append(MeasuredText(name, streams, False, tokenizer.end_of_text if is_masked else None))
    return texts

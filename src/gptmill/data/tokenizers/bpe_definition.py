"""The tokenizer.json of a byte-level BPE rank table, as Hugging Face's library reads it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from gptmill.data.tokenizers.byte_level import encode_byte_level

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def make_bpe_definition(
    ranks: dict[bytes, int], pre_tokenizer: dict[str, Any], special_tokens: dict[str, int]
) -> dict[str, Any]:
    """Returns the definition whose merges form each token of `ranks` from the two that BPE merges into it."""
    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [_split_token(token, ranks) for token in by_rank if len(token) > 1]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {encode_byte_level(token): ranks[token] for token in by_rank},
        "merges": [" ".join(map(encode_byte_level, merge)) for merge in merges],
    }
    return make_definition(model, pre_tokenizer, BYTE_LEVEL, special_tokens)


def make_split(pattern: str) -> dict[str, Any]:
    """Returns the pre-tokenizer that makes a piece of each match of `pattern`."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def make_definition(
    model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any], special_tokens: dict[str, int]
) -> dict[str, Any]:
    """Returns a whole definition, which neither normalises a text nor adds tokens to it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": token, **ADDED_TOKEN} for token, id_ in special_tokens.items()],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _split_token(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Returns the two tokens that are merged into `token`, by applying all earlier merges to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged_ranks = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        best = merged_ranks.index(min(merged_ranks))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts

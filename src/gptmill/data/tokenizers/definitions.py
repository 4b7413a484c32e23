"""Writes the definitions of tokenizers, the content of tokenizer.json, from the tables that other formats hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# Kinds of tokens, by SentencePiece's numbers, which GGUF has too.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


@dataclass(frozen=True)
class Piece:
    """One token of a vocabulary; its place in the list is its id."""

    text: str
    score: float = 0.0
    kind: int = 1


def make_byte_level_definition(
    pieces: Sequence[Piece],
    merges: Iterable[str],
    pre_tokenizer: Mapping[str, Any] = BYTE_LEVEL,
    normalizer: Mapping[str, Any] | None = None,
    *,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """A byte-level BPE, as GPT-2's: merges are pairs, separated by a space."""
    model = {"vocab": _list_ids(pieces), "merges": list(merges), "ignore_merges": ignore_merges}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added(pieces),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "byte_fallback": False, **model},
    }


def make_sentencepiece_definition(pieces: Sequence[Piece], *, adds_space: bool) -> dict[str, Any]:
    """A SentencePiece BPE, as Llama 2's: spaces are ▁, and what has no token becomes the tokens of its bytes."""
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    ids = _list_ids(pieces)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    prefix = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added(pieces),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, *spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": _derive_merges(pieces, ids),
        },
    }


def _derive_merges(pieces: Sequence[Piece], ids: Mapping[str, int]) -> list[list[str]]:
    """SentencePiece merges the adjacent pieces whose concatenation scores highest: pairs by falling score."""
    by_score: dict[float, list[tuple[int, int, str, str]]] = defaultdict(list)
    for piece in pieces:
        if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED, BYTE):
            continue
        halves = ((piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text)))
        pairs = [(ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids]
        by_score[piece.score] += sorted(pairs)
    return [[left, right] for score in sorted(by_score, reverse=True) for *_, left, right in by_score[score]]


def _list_ids(pieces: Sequence[Piece]) -> dict[str, int]:
    ids = {piece.text: id_ for id_, piece in enumerate(pieces)}
    if len(ids) < len(pieces):
        raise ValueError("a token occurs twice")
    return ids


def _list_added(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The tokens that text is searched for before anything else is done to it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id_, "content": piece.text, **flags, "special": piece.kind != USER_DEFINED}
        for id_, piece in enumerate(pieces)
        if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]

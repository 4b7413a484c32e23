"""Reads tokenizer.model, SentencePiece's own file, without its library: a protocol buffer of pieces and settings."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.regular_files import read_regular
from gptmill.data.tokenizers.definitions import Piece, make_sentencepiece_definition

FILE_NAME = "tokenizer.model"
# Field numbers of sentencepiece_model.proto.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_KIND = 1, 2, 3
MODEL_TYPE, BPE = 3, 2
ADD_DUMMY_PREFIX = 3
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def read_sentencepiece(path: Path) -> dict[str, Any]:
    """The tokenizer's definition; raises UserError for a file that is damaged, or whose model is not a BPE."""
    pieces, model_type, adds_space = [], 1, True
    try:
        for number, value in _iterate_fields(read_regular(path)):
            if number == PIECES:
                pieces.append(_read_piece(value))
            elif number == TRAINER:
                model_type = dict(_iterate_fields(value)).get(MODEL_TYPE, model_type)
            elif number == NORMALIZER:
                adds_space = bool(dict(_iterate_fields(value)).get(ADD_DUMMY_PREFIX, adds_space))
        if not pieces:
            raise ValueError("it has no pieces")
        definition = make_sentencepiece_definition(pieces, adds_space=adds_space)
    except (ValueError, IndexError, TypeError, KeyError, struct.error) as error:
        raise UserError(f"{path} is not a valid SentencePiece model ({error!s:.100}); download it again") from None
    if model_type != BPE:
        raise UserError(
            f"{path} is not a BPE; save its tokenizer.json with transformers' AutoTokenizer.save_pretrained"
        )
    return definition


def _read_piece(content: bytes) -> Piece:
    fields = dict(_iterate_fields(content))
    (score,) = struct.unpack("<f", fields.get(PIECE_SCORE, bytes(4)))
    return Piece(fields[PIECE_TEXT].decode("utf-8"), score, fields.get(PIECE_KIND, 1))


def _iterate_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers of varints, and the bytes of all others."""
    position = 0
    while position < len(content):
        key, position = _read_varint(content, position)
        kind = key & 7
        if kind == VARINT:
            value, position = _read_varint(content, position)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, position = _read_varint(content, position)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(content) - position:
            raise ValueError("it ends inside a field")
        yield key >> 3, content[position : position + size]
        position += size


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        byte = content[position + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, position + index + 1
    raise ValueError("a number has too many bytes")

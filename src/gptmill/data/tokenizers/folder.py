"""The tokenizer of a published model's folder: tokenizer.json, GPT-2's vocab.json and merges.txt, or SentencePiece."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json, read_json
from gptmill.config.regular_files import read_regular
from gptmill.data.tokenizers import sentencepiece_file
from gptmill.data.tokenizers.definitions import CONTROL, Piece, make_byte_level_definition
from gptmill.data.tokenizers.gpt2_bpe import END_OF_TEXT, TABLE_SHA256, Gpt2Tokenizer
from gptmill.data.tokenizers.protocol import Tokenizer
from gptmill.data.tokenizers.special_tokens import SpecialTokens, find_special_tokens, list_tokens
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, JsonTokenizer, read_definition

VOCABULARY, MERGES = "vocab.json", "merges.txt"
TABLE_HEADER = "#version: 0.2\n"


def build_folder_tokenizer(folder: Path) -> Tokenizer:
    """Raises UserError for a folder without a tokenizer that gptmill can read."""
    if (folder / FILE_NAME).is_file():
        return build_from_definition(parse_json(read_definition(folder / FILE_NAME)), folder, str(folder / FILE_NAME))
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return build_from_definition(_read_gpt2_files(folder), folder, str(folder / VOCABULARY))
    if (model := folder / sentencepiece_file.FILE_NAME).is_file():
        return build_from_definition(sentencepiece_file.read_sentencepiece(model), folder, str(model))
    raise UserError(f"{folder} has no {FILE_NAME}; add it, or name the model's tokenizer with --tokenizer")


def build_from_definition(
    definition: dict[str, Any], folder: Path | None, where: str, special: SpecialTokens | None = None
) -> Tokenizer:
    """The tokenizer of a definition, with the special tokens that are given or that the folder's files name.

    GPT-2's own becomes the tokenizer `gpt2`, so that a corpus prepared with that fits the model.
    """
    if special is None:
        special = find_special_tokens(folder, definition) if folder else SpecialTokens()
    if special.end_of_text in ("", END_OF_TEXT) and not special.begin_of_text and _is_gpt2(definition):
        return Gpt2Tokenizer()
    text = json.dumps(definition, ensure_ascii=False, separators=(",", ":"))
    return JsonTokenizer(text, where, special)


def _read_gpt2_files(folder: Path) -> dict[str, Any]:
    try:
        vocabulary = read_json(folder / VOCABULARY)
        merges = read_regular(folder / MERGES).decode("utf-8").replace("\r\n", "\n").split("\n")
        ids = sorted(vocabulary.values())
        if ids != list(range(len(ids))):
            raise ValueError(f"the ids of {VOCABULARY} have gaps")
        pieces = [
            Piece(token, kind=CONTROL if token == END_OF_TEXT else 1)
            for token in sorted(vocabulary, key=vocabulary.__getitem__)
        ]
        pairs = [line for line in merges if line and not line.startswith("#version")]
        return make_byte_level_definition(pieces, pairs)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / VOCABULARY} and {MERGES} are not GPT-2's files ({error!s:.100}); download them again"
        ) from None


def _is_gpt2(definition: dict[str, Any]) -> bool:
    """Whether it has GPT-2's merges, in order, and nothing else: they decide all ids."""
    model = definition.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list) or definition.get("normalizer") or len(list_tokens(definition)) != 50_257:
        return False
    splits = definition.get("pre_tokenizer") or {}
    if splits.get("type") != "ByteLevel" or splits.get("add_prefix_space") or not splits.get("use_regex", True):
        return False
    lines = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]
    table = TABLE_HEADER + "\n".join(lines) + "\n"
    return hashlib.sha256(table.encode()).hexdigest() == TABLE_SHA256

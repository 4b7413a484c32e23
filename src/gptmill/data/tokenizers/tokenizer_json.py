"""Any tokenizer.json, by Hugging Face's library, or by tiktoken where that provably gives the same ids.

Byte-level tokenizers bring every text back exactly. SentencePiece-like ones put a space before a document, and what
normalises or has an unknown token (WordPiece, WordLevel) loses what it does not know, here as everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.byte_level import unspell
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype
from gptmill.data.tokenizers.tiktoken_path import is_failure, make_byte_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

FILE_NAME = "tokenizer.json"
# What the end of a document is called in published vocabularies; the first that a vocabulary has is it.
END_MARKS = (
    "<|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> <|eos|> </s> <eos> <EOS> [EOS] <|eot_id|> <|im_end|> [SEP]"
).split()
MAX_BYTES = 256 << 20  # of a definition; the largest published ones take a sixth of this
FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer:
    """The tokenizer that a tokenizer.json defines. Its spec holds the whole file, so that it outlives the file."""

    name = FILE_NAME

    def __init__(self, definition: str, where: str = FILE_NAME) -> None:
        self.definition = definition
        self._library = _load_library(definition, where)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self._end_mark = next((mark for mark in END_MARKS if mark in vocabulary), "")
        if not self._end_mark:
            raise UserError(
                f'{where} has no token for the end of a text; add {{"id": {len(vocabulary)}, "content": '
                f'"{END_MARKS[0]}", "special": true}} to its added_tokens'
            )
        self.end_of_text = vocabulary[self._end_mark]
        self.vocab_size = max(vocabulary.values()) + 1
        self._dtype = choose_dtype(self.vocab_size)
        parsed = json.loads(definition)
        self._bytes = _list_bytes(parsed, vocabulary, self.end_of_text)
        self._pairs = make_byte_pairs(parsed, self._library)

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        try:
            definition = zlib.decompressobj().decompress(base64.b64decode(spec["json_zlib_base64"]), MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if hashlib.sha256(definition).hexdigest() != spec["sha256"]:
            raise ValueError("its checksum is another")
        return cls(definition.decode("utf-8"))

    def encode(self, text: str) -> TokenArray:
        if self._pairs is not None:
            return self._pairs.encode(text).astype(self._dtype, copy=False)
        ids = self._encode(text)
        if self.end_of_text in ids and self._end_mark in text:
            # A Unigram or WordLevel model knows the mark as a word; cut in two it is text as any other.
            opening, closing = self._end_mark[:1], self._end_mark[1:]
            first, *others = text.split(self._end_mark)
            halves = "".join([first, *(f"{opening}{self._end_mark}{closing}{other}" for other in others)])
            return np.concatenate([self._encode(half) for half in halves.split(self._end_mark)])
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def spec(self) -> dict[str, Any]:
        definition = self.definition.encode()
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "sha256": hashlib.sha256(definition).hexdigest(),
            "json_zlib_base64": base64.b64encode(zlib.compress(definition, 9)).decode("ascii"),
        }

    def _encode(self, text: str) -> TokenArray:
        try:
            (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise UserError(f"{self.name} cannot encode a text ({error}); use another tokenizer") from None
        return np.array(encoded.ids, dtype=self._dtype)


def read_definition(path: Path) -> str:
    """The file's JSON, minified, with all that would cut, pad or mark a text switched off."""
    try:
        definition = json.loads(path.read_bytes())
        definition |= {"truncation": None, "padding": None}
        for token in definition.get("added_tokens") or []:
            token["special"] = token["special"] or token["content"] in END_MARKS
        text = json.dumps(definition, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{path} is not a {FILE_NAME} as Hugging Face's tokenizers write it; save it again with their save()"
        ) from None
    return text


def _load_library(definition: str, where: str) -> Library:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise UserError(f"{where} needs the library tokenizers; run: pip install 'gptmill[data]'") from None
    # Processes are what we parallelise with, and its threads do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        library = Library.from_str(definition)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UserError(
            f"the library tokenizers cannot read {where} ({error}); save it again with its present version"
        ) from None
    library.encode_special_tokens = True  # as plain text, whatever the text looks like
    library.no_truncation()
    library.no_padding()
    return library


def _list_bytes(definition: dict[str, Any], vocabulary: dict[str, int], end_of_text: int) -> dict[int, bytes]:
    """The bytes of every id; none for the end of text."""
    model = definition["model"]
    added = {token["content"] for token in definition.get("added_tokens") or []}
    is_byte_level = any('"ByteLevel"' in json.dumps(definition.get(part)) for part in ("pre_tokenizer", "decoder"))
    spaced_words = model.get("type") in ("WordPiece", "WordLevel")

    def make_bytes(token: str) -> bytes:
        if token in added:
            return token.encode()
        if is_byte_level:
            try:
                return unspell(token)
            except KeyError:
                return token.encode()
        if model.get("byte_fallback") and (match := FALLBACK_BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if spaced_words:
            prefix = model.get("continuing_subword_prefix") or ""
            return (token.removeprefix(prefix) if prefix and token.startswith(prefix) else f" {token}").encode()
        suffix = model.get("end_of_word_suffix") or ""
        spaced = f"{token.removesuffix(suffix)} " if suffix and token.endswith(suffix) else token
        return spaced.replace("▁", " ").encode()

    return {id_: make_bytes(token) for token, id_ in vocabulary.items() if id_ != end_of_text}

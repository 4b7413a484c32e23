"""Loads any tokenizer.json; runs it by tiktoken if the ids are provably the same, else by Hugging Face's library.

Byte-level tokenizers are lossless. SentencePiece-like ones add a space before a document, and those that normalise or
have an unknown token (WordPiece, WordLevel) lose information, in every library.
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
from gptmill.config.json_text import parse_json, read_json
from gptmill.data.tokenizers.byte_level import decode_byte_level
from gptmill.data.tokenizers.protocol import TokenArray, choose_dtype
from gptmill.data.tokenizers.special_tokens import SpecialTokens
from gptmill.data.tokenizers.tiktoken_conversion import convert_to_tiktoken, is_library_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

FILE_NAME = "tokenizer.json"
# End-of-text tokens of published vocabularies; the first that a vocabulary contains is used.
EOS_TOKENS = (
    "<|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> <|eos|> </s> <eos> <EOS> [EOS] <|eot_id|> <|im_end|> [SEP]"
).split()
MAX_BYTES = 256 << 20  # of a definition; the largest published ones have a sixth of this
DEFAULT_TOKENS = SpecialTokens()
FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer:
    """The tokenizer that a tokenizer.json defines. Its spec contains the whole definition, not its path."""

    name = FILE_NAME

    def __init__(self, definition: str, where: str = FILE_NAME, special: SpecialTokens = DEFAULT_TOKENS) -> None:
        self.definition = definition
        self._hf_tokenizer = _load_hf_tokenizer(definition, where)
        vocabulary = self._hf_tokenizer.get_vocab(with_added_tokens=True)
        guessed = next((token for token in EOS_TOKENS if token in vocabulary), "")
        self.eos_token = special.end_of_text or guessed
        if not self.eos_token:
            raise UserError(
                f'{where} has no end-of-text token; add {{"id": {len(vocabulary)}, "content": '
                f'"{EOS_TOKENS[0]}", "special": true}} to its added_tokens'
            )
        self.end_of_text = vocabulary[self.eos_token]
        self.bos_token = special.begin_of_text or self.eos_token
        self.begin_of_text = vocabulary[self.bos_token]
        """Begins a document: the model's own token for that, or the end of the document before."""
        self.special_tokens = SpecialTokens(
            self.eos_token if self.eos_token != guessed else "",
            self.bos_token if self.bos_token != self.eos_token else "",
        )
        self.vocab_size = max(vocabulary.values()) + 1
        self._dtype = choose_dtype(self.vocab_size)
        parsed = parse_json(definition)
        self._bytes = _list_bytes(parsed, vocabulary, {self.end_of_text, self.begin_of_text})
        self._bpe = convert_to_tiktoken(parsed, self._hf_tokenizer)

    @classmethod
    def restore(cls, spec: dict[str, Any]) -> Self:
        try:
            definition = zlib.decompressobj().decompress(base64.b64decode(spec["json_zlib_base64"]), MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if hashlib.sha256(definition).hexdigest() != spec["sha256"]:
            raise ValueError("wrong checksum")
        special = SpecialTokens(str(spec.get("end_of_text", "")), str(spec.get("begin_of_text", "")))
        return cls(definition.decode("utf-8"), special=special)

    def encode(self, text: str) -> TokenArray:
        if self._bpe is not None:
            return self._bpe.encode(text).astype(self._dtype, copy=False)
        ids = self._encode(text)
        if self.end_of_text in ids and self.eos_token in text:
            # Unigram and WordLevel models have the token in their vocabulary; cut in two, it is encoded as plain text.
            opening, closing = self.eos_token[:1], self.eos_token[1:]
            first, *others = text.split(self.eos_token)
            halves = "".join([first, *(f"{opening}{self.eos_token}{closing}{other}" for other in others)])
            return np.concatenate([self._encode(half) for half in halves.split(self.eos_token)])
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes.get(token, b"") for token in ids)

    def spec(self) -> dict[str, Any]:
        definition = self.definition.encode()
        # Only where they are not what the definition alone implies: fingerprints of other tokenizers stay as they were.
        special = {name: token for name, token in vars(self.special_tokens).items() if token}
        return {
            **special,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "sha256": hashlib.sha256(definition).hexdigest(),
            "json_zlib_base64": base64.b64encode(zlib.compress(definition, 9)).decode("ascii"),
        }

    def _encode(self, text: str) -> TokenArray:
        try:
            (encoded,) = self._hf_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise UserError(f"{self.name} failed to encode a text ({error}); use another tokenizer") from None
        return np.array(encoded.ids, dtype=self._dtype)


def read_definition(path: Path) -> str:
    """Reads the file as minified JSON, without truncation and padding and with end-of-text tokens marked special."""
    try:
        definition = read_json(path)
        definition |= {"truncation": None, "padding": None}
        for token in definition.get("added_tokens") or []:
            token["special"] = token["special"] or token["content"] in EOS_TOKENS
        text = json.dumps(definition, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            f"{path} is not a valid {FILE_NAME}; save it again with the save() of Hugging Face's tokenizers library"
        ) from None
    return text


def _load_hf_tokenizer(definition: str, where: str) -> HfTokenizer:
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        raise UserError(f"{where} needs the library tokenizers; run: pip install 'gptmill[data]'") from None
    # gptmill parallelises by processes, and the library's threads do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        hf_tokenizer = HfTokenizer.from_str(definition)
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise UserError(
            f"the library tokenizers cannot read {where} ({error}); save it again with the installed version"
        ) from None
    hf_tokenizer.encode_special_tokens = True  # despite its name: encodes them as plain text
    hf_tokenizer.no_truncation()
    hf_tokenizer.no_padding()
    return hf_tokenizer


def _list_bytes(definition: dict[str, Any], vocabulary: dict[str, int], silent: set[int]) -> dict[int, bytes]:
    """Returns the bytes of every id except the silent ones, which end or begin a document."""
    model = definition["model"]
    added = {token["content"] for token in definition.get("added_tokens") or []}
    is_byte_level = any('"ByteLevel"' in json.dumps(definition.get(part)) for part in ("pre_tokenizer", "decoder"))
    is_fused = (definition.get("decoder") or {}).get("type") == "Fuse"  # joined as they are, as characters are
    spaced_words = model.get("type") in ("WordPiece", "WordLevel")

    def make_bytes(token: str) -> bytes:
        if token in added:
            return token.encode()
        if is_byte_level:
            try:
                return decode_byte_level(token)
            except KeyError:
                return token.encode()
        if is_fused:
            return token.encode()
        if model.get("byte_fallback") and (match := FALLBACK_BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if spaced_words:
            prefix = model.get("continuing_subword_prefix") or ""
            return (token.removeprefix(prefix) if prefix and token.startswith(prefix) else f" {token}").encode()
        suffix = model.get("end_of_word_suffix") or ""
        spaced = f"{token.removesuffix(suffix)} " if suffix and token.endswith(suffix) else token
        return spaced.replace("▁", " ").encode()

    return {id_: make_bytes(token) for token, id_ in vocabulary.items() if id_ not in silent}

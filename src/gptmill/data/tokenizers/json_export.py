"""Describes a tokenizer as Hugging Face's libraries read it: tokenizer.json, tokenizer_config.json.

They give the ids that gptmill gives. There is one difference, which all published tokenizers share: by default they
read the text `<|endoftext|>` as the special token, where gptmill encodes it as plain text. transformers does so too
with `split_special_tokens=True`, and tokenizers with `encode_special_tokens = True`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json
from gptmill.data.tokenizers.bpe_definition import BYTE_LEVEL, make_bpe_definition, make_definition, make_split
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.gpt2_bpe import END_OF_TEXT, WORD_PATTERN, Gpt2Tokenizer
from gptmill.data.tokenizers.openai import OpenAiTokenizer
from gptmill.data.tokenizers.protocol import Tokenizer
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, JsonTokenizer

EVERY_CHARACTER = r"[\s\S]"
TEXT_END = r"(?![\s\S])"
POSSESSIVE = re.compile(r"([+*?]|\{[\d,]+\})\+")
# WordLevel must name an unknown token. This one is not in the vocabulary, so that an unknown character is an error.
NO_UNKNOWN = "<|unknown|>"
PLAIN_PROCESSORS = ("ByteLevel",)


def make_tokenizer_files(tokenizer: Tokenizer, max_tokens: int) -> dict[str, str]:
    """Returns the text of each tokenizer file of a Hugging Face folder; `max_tokens` is the model's context length."""
    config = make_tokenizer_config(tokenizer, max_tokens)
    files = {"tokenizer_config.json": config, "special_tokens_map.json": make_special_tokens_map(tokenizer)}
    texts = {name: json.dumps(content, ensure_ascii=False, indent=2) + "\n" for name, content in files.items()}
    return {FILE_NAME: make_tokenizer_json(tokenizer)} | texts


def make_tokenizer_json(tokenizer: Tokenizer) -> str:
    """Returns the tokenizer.json of a tokenizer; raises UserError for a plug-in's, whose code no file can hold."""
    describe = DESCRIPTIONS.get(type(tokenizer))
    if describe is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} is a plug-in's, which no {FILE_NAME} can describe; "
            f"export the model without it, or train with a built-in tokenizer or a {FILE_NAME}"
        )
    return json.dumps(describe(tokenizer), ensure_ascii=False, indent=1) + "\n"


def make_tokenizer_config(tokenizer: Tokenizer, max_tokens: int) -> dict[str, Any]:
    """Returns the tokenizer_config.json: nothing is added to a text, and decoding cleans nothing up."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "padding_side": "left",  # a prompt is continued at its end
        **make_special_tokens_map(tokenizer),
    }


def make_special_tokens_map(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the roles of special tokens. Unless a published model brought its own, one ends a document, begins the
    next and pads a batch."""
    begin = end = END_OF_TEXT
    if isinstance(tokenizer, JsonTokenizer):
        begin, end = tokenizer.bos_token, tokenizer.eos_token
    return {"bos_token": begin, "eos_token": end, "pad_token": end}


def _describe_bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    ranks = {bytes([byte]): byte for byte in range(256)}
    return make_bpe_definition(ranks, BYTE_LEVEL, {END_OF_TEXT: tokenizer.end_of_text})


def _describe_characters(tokenizer: CharTokenizer) -> dict[str, Any]:
    vocabulary = {character: id_ for id_, character in enumerate(tokenizer.alphabet)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": NO_UNKNOWN}
    special_tokens = {END_OF_TEXT: tokenizer.end_of_text}
    return make_definition(model, make_split(EVERY_CHARACTER), {"type": "Fuse"}, special_tokens)


def _describe_bpe(tokenizer: Gpt2Tokenizer | OpenAiTokenizer) -> dict[str, Any]:
    bpe = tokenizer.bpe
    pre_tokenizer: dict[str, Any] = {**BYTE_LEVEL, "use_regex": True}  # GPT-2's pattern
    if bpe.pattern != WORD_PATTERN:
        split = make_split(_translate_pattern(bpe.pattern))
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
    definition = make_bpe_definition(bpe.ranks, pre_tokenizer, bpe.special_tokens)
    # Without a place in the vocabulary, special tokens would take the ids after it, and some encodings have gaps.
    definition["model"]["vocab"] |= bpe.special_tokens
    return definition


def _translate_pattern(pattern: str) -> str:
    """Translates tiktoken's pattern: Hugging Face's engine repeats `{1,3}+`, and its `$` is the end of a line.

    Possessive quantifiers only save backtracking here: what follows each of them never matches what it took.
    """
    return POSSESSIVE.sub(r"\1", pattern).replace("$", TEXT_END)


def _describe_json(tokenizer: JsonTokenizer) -> dict[str, Any]:
    """The definition as it was read, but for special tokens that it adds to a text, which the model has not seen.

    A published model that came with its own begin-of-text token has seen them.
    """
    definition: dict[str, Any] = parse_json(tokenizer.definition)
    if tokenizer.bos_token != tokenizer.eos_token:
        return definition
    processor = definition.get("post_processor") or {}
    if processor.get("type") == "Sequence":
        kept = [part for part in processor["processors"] if part["type"] in PLAIN_PROCESSORS]
        definition["post_processor"] = {**processor, "processors": kept} if kept else None
    elif processor.get("type") not in PLAIN_PROCESSORS:
        definition["post_processor"] = None
    return definition


# By exact type: a plug-in may derive its own tokenizer from one of these.
DESCRIPTIONS: dict[type, Callable[[Any], dict[str, Any]]] = {
    ByteTokenizer: _describe_bytes,
    CharTokenizer: _describe_characters,
    Gpt2Tokenizer: _describe_bpe,
    OpenAiTokenizer: _describe_bpe,
    JsonTokenizer: _describe_json,
}

"""A tokenizer as llama.cpp knows it: byte-level BPE with one of llama.cpp's own pre-tokenizers.

Bytes are a BPE without merges. Characters are one whose merges build the UTF-8 bytes of each character: a lead byte
never follows inside a character, so that no merge joins two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.byte_level import CHAR_TO_BYTE, encode_byte_level
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.json_export import make_tokenizer_json

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types
GPT2 = "gpt-2"
# Patterns as tokenizer.json files have them, and llama.cpp's names of them.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {LLAMA3_PATTERN: "llama-bpe", LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
# llama.cpp refuses a file without merges. No pre-tokenizer leaves a letter and the space behind it in one word.
IDLE_MERGE = f"A {encode_byte_level(b' ')}"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class GgufTokenizer:
    """The metadata of a tokenizer."""

    pre_tokenizer: str
    tokens: list[str]
    """By id, in the byte-level alphabet."""
    types: list[int]
    merges: list[str]


def make_gguf_tokenizer(tokenizer: Tokenizer) -> GgufTokenizer:
    """Raises UserError for a tokenizer that llama.cpp does not have."""
    if isinstance(tokenizer, CharTokenizer):
        characters = [character.encode() for character in tokenizer.alphabet]
        tokens = [*map(encode_byte_level, characters), END_OF_TEXT]
        types = [NORMAL] * len(characters) + [CONTROL]
        return GgufTokenizer(GPT2, tokens, types, _merge_characters(characters) or [IDLE_MERGE])
    definition: dict[str, Any] = parse_json(make_tokenizer_json(tokenizer))
    model = definition["model"]
    is_byte_level = model["type"] == "BPE" and set("".join(_list_plain(definition))) <= CHAR_TO_BYTE.keys()
    if not is_byte_level or definition.get("normalizer") is not None:
        raise UserError(
            f"llama.cpp reads byte-level BPE tokenizers, and {tokenizer.name} is another kind ({model['type']}); "
            f"export with --to hf or --to onnx"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pre_tokenizer = _find_pre_tokenizer(definition.get("pre_tokenizer")) if merges else GPT2
    tokens, types = _list_tokens(definition, tokenizer.vocab_size)
    return GgufTokenizer(pre_tokenizer, tokens, types, merges or [IDLE_MERGE])


def _list_plain(definition: dict[str, Any]) -> list[str]:
    added = {token["content"] for token in definition.get("added_tokens") or []}
    return [token for token in definition["model"]["vocab"] if token not in added]


def _list_tokens(definition: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; an id without a token is unused."""
    tokens, types = [f"[unused{id_}]" for id_ in range(vocab_size)], [UNUSED] * vocab_size
    for token, id_ in definition["model"]["vocab"].items():
        tokens[id_], types[id_] = token, NORMAL
    for token in definition.get("added_tokens") or []:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    return tokens, types


def _find_pre_tokenizer(pre_tokenizer: Any) -> str:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return GPT2
        case {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": str(pattern)}}, *_]}:
            if pattern in PRE_TOKENIZERS:
                return PRE_TOKENIZERS[pattern]
    raise UserError(
        "llama.cpp has no pre-tokenizer that splits as this model's tokenizer does; export with --to hf or --to onnx"
    )


def _merge_characters(characters: list[bytes]) -> list[str]:
    """The merges that build each character from its bytes, from left to right."""
    merges: dict[str, None] = {}
    for character in characters:
        for end in range(1, len(character)):
            merges[f"{encode_byte_level(character[:end])} {encode_byte_level(character[end : end + 1])}"] = None
    return list(merges)

"""The tokenizer in a GGUF file's metadata, as a tokenizer.json."""

from __future__ import annotations

from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.definitions import (
    BYTE_LEVEL,
    CONTROL,
    Piece,
    make_byte_level_definition,
    make_sentencepiece_definition,
)
from gptmill.data.tokenizers.folder import build_from_definition
from gptmill.data.tokenizers.special_tokens import SpecialTokens
from gptmill.inference.importing.gguf_file import GgufFile

PREFIX = "tokenizer.ggml."
ADVICE = "give the model's tokenizer.json with --tokenizer"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
LLAMA3 = _split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{OTHERS}")
QWEN2 = _split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{OTHERS}")
# Pre-tokenizers by llama.cpp's names for them.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2", "jais", "mpt"), BYTE_LEVEL),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
}


def build_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises UserError for a tokenizer that gptmill does not know, with what to do."""
    kind = file.metadata.get(f"{PREFIX}model")
    if kind is None:
        raise UserError(f"{file.path} has no tokenizer; {ADVICE}")
    try:
        pieces = _list_pieces(file.metadata)
        if kind == "gpt2":
            definition = _make_byte_level(file, pieces)
        elif kind == "llama":
            adds_space = bool(file.metadata.get(f"{PREFIX}add_space_prefix", True))
            definition = make_sentencepiece_definition(pieces, adds_space=adds_space)
        else:
            raise UserError(
                f"{file.path} has a tokenizer of the kind {kind!r:.60}, which gptmill does not know; {ADVICE}"
            )
        special = _find_special(file.metadata, pieces, adds_by_default=kind == "llama")
        return build_from_definition(definition, None, str(file.path), special)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise UserError(f"the tokenizer in {file.path} is damaged ({error!s:.100}); {ADVICE}") from None


def _make_byte_level(file: GgufFile, pieces: list[Piece]) -> dict[str, Any]:
    name = file.metadata.get(f"{PREFIX}pre", "gpt-2" if file.metadata.get("general.architecture") == "gpt2" else None)
    if name not in PRE_TOKENIZERS:
        raise UserError(f"{file.path} has the pre-tokenizer {name!r:.60}, which gptmill does not know; {ADVICE}")
    pre_tokenizer = PRE_TOKENIZERS[name]
    return make_byte_level_definition(
        pieces,
        file.metadata[f"{PREFIX}merges"],
        pre_tokenizer,
        {"type": "NFC"} if pre_tokenizer is QWEN2 else None,
        ignore_merges=pre_tokenizer is LLAMA3,
    )


def _list_pieces(metadata: dict[str, Any]) -> list[Piece]:
    tokens = metadata[f"{PREFIX}tokens"]
    scores = metadata.get(f"{PREFIX}scores") or [0.0] * len(tokens)
    kinds = metadata.get(f"{PREFIX}token_type") or [1] * len(tokens)
    pieces = [Piece(str(token), score, kind) for token, score, kind in zip(tokens, scores, kinds, strict=True)]
    end = metadata.get(f"{PREFIX}eos_token_id")
    if isinstance(end, int) and pieces[end].kind == 1:  # some files do not mark it
        pieces[end] = Piece(pieces[end].text, pieces[end].score, CONTROL)
    return pieces


def _find_special(metadata: dict[str, Any], pieces: list[Piece], *, adds_by_default: bool) -> SpecialTokens:
    """The end of text, and the beginning for a model that is used with one."""
    end, begin = (metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "bos"))
    by_default = adds_by_default or metadata.get(f"{PREFIX}pre") in ("llama-bpe", "llama3", "llama-v3")
    adds = metadata.get(f"{PREFIX}add_bos_token", by_default)
    return SpecialTokens(
        pieces[end].text if isinstance(end, int) else "",
        pieces[begin].text if adds and isinstance(begin, int) and begin != end else "",
    )

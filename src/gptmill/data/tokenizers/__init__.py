"""Tokenizers: text to ids and back. Add a new one to `TOKENIZERS`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.json_text import parse_json
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.openai import ENCODINGS, OpenAiTokenizer
from gptmill.data.tokenizers.protocol import Tokenizer, TrainableTokenizer
from gptmill.data.tokenizers.special_tokens import find_special_tokens
from gptmill.data.tokenizers.tokenizer_json import DEFAULT_TOKENS, FILE_NAME, JsonTokenizer, read_definition

# Each class can be trained on the texts of a corpus (which it reads only if it needs them) and restored from its spec.
TOKENIZERS: dict[str, type[TrainableTokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (ByteTokenizer, CharTokenizer, Gpt2Tokenizer)
}
ALIASES = {"r50k_base": "gpt2"}  # one table, two names


def list_names() -> tuple[str, ...]:
    """All names of tokenizers, registered ones included."""
    return (*TOKENIZERS, *ALIASES, *ENCODINGS)


def build_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """Builds the tokenizer called `name`, or from the tokenizer.json at that path; trains it on `texts` if needed."""
    name = ALIASES.get(name, name)
    if name in TOKENIZERS:
        return TOKENIZERS[name].train(texts)
    if name in ENCODINGS:
        return OpenAiTokenizer(name)
    path = find_file(name)
    definition = read_definition(path)
    # A corpus has `end_of_text` between documents; only a model that was trained otherwise begins them differently.
    beside = find_special_tokens(path.parent, parse_json(definition)) if path.name == FILE_NAME else DEFAULT_TOKENS
    return JsonTokenizer(definition, name, replace(beside, begin_of_text=""))


def restore_tokenizer(spec: dict[str, Any], where: str) -> Tokenizer:
    """Restores a tokenizer from the `spec()` that is stored in `where`."""
    try:
        if spec["name"] in TOKENIZERS:
            return TOKENIZERS[spec["name"]].restore(spec)
        if spec["name"] in ENCODINGS:
            return OpenAiTokenizer.restore(spec)
        if spec["name"] == JsonTokenizer.name:
            return JsonTokenizer.restore(spec)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"the tokenizer spec in {where} is corrupt ({error!r:.200}); prepare or train it again"
        ) from None
    raise UserError(
        f"{where} needs the tokenizer {spec['name']!r:.200}, which is unknown; update gptmill, or add the "
        f"--plugin that registers it"
    )


def identify_tokenizer(name: str) -> str:
    """Returns a label of the tokenizer, usable in a folder name; includes a hash if it is defined by a file."""
    if name in list_names():
        return ALIASES.get(name, name)
    path = find_file(name)
    definition = hashlib.sha256(read_definition(path).encode()).hexdigest()
    label = path.parent.resolve().name if path.name == FILE_NAME else path.stem
    return f"{label}-{definition[:8]}"


def is_called(tokenizer: Tokenizer, name: str) -> bool:
    """Whether `name` refers to this tokenizer; raises UserError if it refers to none."""
    if name in list_names():
        return tokenizer.name == ALIASES.get(name, name)
    definition = read_definition(find_file(name))
    return isinstance(tokenizer, JsonTokenizer) and definition == tokenizer.definition


def is_lost(name: str) -> bool:
    """Whether a recorded name is the path of a file that no longer exists."""
    return name not in list_names() and not Path(name).exists()


def find_file(name: str) -> Path:
    """Returns the tokenizer.json at a path or in a folder."""
    path = Path(name) / FILE_NAME if Path(name).is_dir() else Path(name)
    if path.suffix == ".tiktoken":
        raise UserError(
            f"{name} has merge ranks but no pre-tokenizer pattern; name its encoding ({', '.join(ENCODINGS)})"
        )
    if path.is_file():
        return path
    if Path(name).is_dir():
        raise UserError(f"the folder {name} has no {FILE_NAME}; name one that does, or the file itself")
    raise UserError(
        f"there is no tokenizer {name!r}{suggest(name, list_names())}; "
        f"name one of {', '.join(list_names())}, or the path of a {FILE_NAME}"
    )


__all__ = [
    "TOKENIZERS",
    "Tokenizer",
    "build_tokenizer",
    "find_file",
    "identify_tokenizer",
    "is_called",
    "is_lost",
    "list_names",
    "restore_tokenizer",
]

"""Tokenizers: text to ids and back. `TOKENIZERS` is where a new one is added."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.openai import ENCODINGS, OpenAiTokenizer
from gptmill.data.tokenizers.protocol import Tokenizer
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, JsonTokenizer, read_definition

# Each class learns itself from a corpus' texts (and reads them only if it must), and makes itself again from its spec.
TOKENIZERS: dict[str, type[ByteTokenizer] | type[CharTokenizer] | type[Gpt2Tokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (ByteTokenizer, CharTokenizer, Gpt2Tokenizer)
}
ALIASES = {"r50k_base": "gpt2"}  # one table, two names
NAMES = (*TOKENIZERS, *ALIASES, *ENCODINGS)


def build_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer called `name`, or of the tokenizer.json at that path; one that has to learn learns from `texts`."""
    name = ALIASES.get(name, name)
    if name in TOKENIZERS:
        return TOKENIZERS[name].learn(texts)
    if name in ENCODINGS:
        return OpenAiTokenizer(name)
    return JsonTokenizer(read_definition(_find_file(name)), where=name)


def restore_tokenizer(spec: dict[str, Any], where: str) -> Tokenizer:
    """The tokenizer whose `spec()` was kept in `where`, as it was."""
    try:
        if spec["name"] in TOKENIZERS:
            return TOKENIZERS[spec["name"]].restore(spec)
        if spec["name"] in ENCODINGS:
            return OpenAiTokenizer.restore(spec)
        if spec["name"] == JsonTokenizer.name:
            return JsonTokenizer.restore(spec)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"the description of the tokenizer in {where} is damaged ({error!r:.200}); make it again"
        ) from None
    raise UserError(f"{where} needs the tokenizer {spec['name']!r:.200}, unknown to this gptmill; update gptmill")


def identify_tokenizer(name: str) -> str:
    """A word for what `name` stands for now, fit for a folder's name: two files of one name get two."""
    if name in NAMES:
        return ALIASES.get(name, name)
    path = _find_file(name)
    definition = hashlib.sha256(read_definition(path).encode()).hexdigest()
    label = path.parent.resolve().name if path.name == FILE_NAME else path.stem
    return f"{label}-{definition[:8]}"


def is_called(tokenizer: Tokenizer, name: str) -> bool:
    """Whether `name` stands for this tokenizer; a file that is gone is taken for the one that it was made from."""
    if name in NAMES:
        return tokenizer.name == ALIASES.get(name, name)
    if not isinstance(tokenizer, JsonTokenizer):
        return False
    return not Path(name).exists() or read_definition(_find_file(name)) == tokenizer.definition


def _find_file(name: str) -> Path:
    """The tokenizer.json at a path, or in a folder."""
    path = Path(name) / FILE_NAME if Path(name).is_dir() else Path(name)
    if path.suffix == ".tiktoken":
        raise UserError(f"{name} holds ranks but not how text is split; name its encoding ({', '.join(ENCODINGS)})")
    if path.is_file():
        return path
    if Path(name).is_dir():
        raise UserError(f"the folder {name} holds no {FILE_NAME}; name one that does, or the file itself")
    raise UserError(
        f"there is no tokenizer {name!r}{suggest(name, NAMES)}; "
        f"name one of {', '.join(NAMES)}, or the path of a {FILE_NAME}"
    )


__all__ = [
    "NAMES",
    "TOKENIZERS",
    "Tokenizer",
    "build_tokenizer",
    "identify_tokenizer",
    "is_called",
    "restore_tokenizer",
]

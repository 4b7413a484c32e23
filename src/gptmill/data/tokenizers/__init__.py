"""Tokenizers: text to ids and back. `TOKENIZERS` is where a new one is added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.gpt2 import Gpt2Tokenizer
from gptmill.data.tokenizers.protocol import Tokenizer

# Each class learns itself from a corpus' texts (and reads them only if it must), and makes itself again from its spec.
TOKENIZERS: dict[str, type[ByteTokenizer] | type[CharTokenizer] | type[Gpt2Tokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (ByteTokenizer, CharTokenizer, Gpt2Tokenizer)
}


def build_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer called `name`; one that has to be learnt learns from `texts`."""
    return TOKENIZERS[name].learn(texts)


def restore_tokenizer(spec: dict[str, Any], where: str) -> Tokenizer:
    """The tokenizer whose `spec()` was kept in `where`, as it was."""
    try:
        if spec["name"] not in TOKENIZERS:
            raise UserError(f"{where} needs the tokenizer {spec['name']!r}, unknown to this gptmill; update gptmill")
        return TOKENIZERS[spec["name"]].restore(spec)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the description of the tokenizer in {where} is damaged ({error!r}); make it again") from None


__all__ = ["TOKENIZERS", "Tokenizer", "build_tokenizer", "restore_tokenizer"]

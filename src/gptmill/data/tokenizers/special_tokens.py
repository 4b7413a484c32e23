"""Which tokens end and begin a document for a published model, by the files that lie beside its tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.json_text import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json")  # name the token
ID_FILES = ("generation_config.json", "config.json")  # name its id


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that a model was trained with; "" where nothing is known of them."""

    end_of_text: str = ""
    begin_of_text: str = ""
    """Begins every document, for a model whose documents do not begin with the end of the one before."""


def find_special_tokens(folder: Path, definition: dict[str, Any]) -> SpecialTokens:
    """What the files of a folder say of a tokenizer with this definition.

    A document begins with a token of its own only if the published tokenizer puts one there: `add_bos_token`, or the
    template of its post-processor.
    """
    config = _read(folder / TOKENIZER_CONFIG)
    vocabulary = list_tokens(definition)
    end = next((token for token in _list_ends(folder, vocabulary) if token in vocabulary), "")
    begin = _find_template_start(definition.get("post_processor"))
    if isinstance(config.get("add_bos_token"), bool):
        begin = _get_text(config.get("bos_token")) or begin if config["add_bos_token"] else ""
    return SpecialTokens(end, begin if begin in vocabulary and begin != end else "")


def list_tokens(definition: dict[str, Any]) -> dict[str, int]:
    """All tokens of a tokenizer.json, added ones included; ids that are no numbers are left out."""
    model = definition.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        vocabulary = {str(pair[0]): id_ for id_, pair in enumerate(vocabulary) if isinstance(pair, list) and pair}
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    tokens |= {str(token.get("content")): token.get("id") for token in definition.get("added_tokens") or []}
    return {token: id_ for token, id_ in tokens.items() if isinstance(id_, int)}


def _list_ends(folder: Path, vocabulary: dict[str, int]) -> Iterator[str]:
    """The candidates for the end of a document, the most trusted first."""
    for name in TOKEN_FILES:
        yield _get_text(_read(folder / name).get("eos_token"))
    tokens = {id_: token for token, id_ in vocabulary.items()}
    for name in ID_FILES:
        ids = _read(folder / name).get("eos_token_id")
        for id_ in ids if isinstance(ids, list) else [ids]:
            yield tokens.get(id_, "") if isinstance(id_, int) else ""


def _find_template_start(processor: Any) -> str:
    """The token that a post-processor puts before a text; "" if none."""
    match processor:
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(token)}}, *_]}:
            return token
        case {"type": "Sequence", "processors": list(processors)}:
            return next(filter(None, map(_find_template_start, processors)), "")
    return ""


def _get_text(token: Any) -> str:
    """A token given as a text, or as an object with the text in it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none, since these files only add to what is known."""
    try:
        content = read_json(path, any_integers=True)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

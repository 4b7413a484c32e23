"""The text of attention windows: how far back each layer sees."""

from __future__ import annotations


def parse_windows(text: str) -> tuple[int | None, ...]:
    """The pattern that layers repeat, None for all of the context; raises ValueError with what is wrong."""
    return tuple(_parse_window(part.strip()) for part in text.split(","))


def _parse_window(word: str) -> int | None:
    if word == "full":
        return None
    if word.isascii() and word.isdigit() and len(word) <= 12 and int(word) > 0:
        return int(word)
    raise ValueError(f"{word[:20]!r} must be a number of tokens above 0 or the word full, as in 256,256,full")

"""Decodes records strictly, or as --on_error says: without those that cannot be decoded, or with U+FFFD in them."""

from __future__ import annotations

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import Record, make_decoding_error


def decode_record(content: bytes, where: str, offset: int, options: ReadingOptions) -> list[Record]:
    """Decodes a record that begins at `offset`: returns its text, the error, or both if bytes were replaced."""
    try:
        return [content.decode("utf-8")]
    except UnicodeDecodeError as error:
        is_replaced = options.on_error == "replace"
        problem = make_decoding_error(where, error, offset + error.start, is_replaced=is_replaced)
        return [problem, content.decode("utf-8", "replace")] if is_replaced else [problem]


def check_escaped(text: str, where: str, options: ReadingOptions) -> list[Record]:
    """Does the same for text that was decoded with surrogateescape, which keeps the bytes that it cannot decode."""
    try:
        text.encode("utf-8")
        return [text]
    except UnicodeEncodeError:
        return decode_record(text.encode("utf-8", "surrogateescape"), where, 0, options)

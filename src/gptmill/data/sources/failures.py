"""Error messages for text that cannot be read."""

from __future__ import annotations

from gptmill.config.errors import UserError


def make_extra_error(what: str, extra: str) -> UserError:
    return UserError(f"{what} needs packages that are not installed; install them with: pip install 'gptmill[{extra}]'")


def make_reading_error(uri: str, error: OSError) -> UserError:
    return UserError(f"cannot read {uri}: {error.strerror or error}; check its permissions or leave it out")


def make_decoding_error(uri: str, error: UnicodeDecodeError, offset: int) -> UserError:
    """For text whose byte at `offset`, counted from the start of the decompressed file, cannot be decoded."""
    return UserError(
        f"{uri} is not {error.encoding} text: byte 0x{error.object[error.start]:02x} at offset {offset}; "
        f"convert the file (iconv -t utf-8) or leave it out"
    )


def make_field_error(where: str, kind: str, field: str, present: list[str]) -> UserError:
    """For a record or a table without the text field."""
    names = ", ".join(present[:20]) or "nothing"
    return UserError(f"{where} has no {kind} {field!r}; name the one with the text by --text_field ({names})")


def make_type_error(where: str, field: str, value: str) -> UserError:
    return UserError(f"{where} has {value} in {field!r}, not text; name another field by --text_field or fix it")

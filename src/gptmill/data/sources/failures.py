"""What goes wrong when text is read, as sentences."""

from __future__ import annotations

from gptmill.config.errors import UserError


def make_extra_error(what: str, extra: str) -> UserError:
    return UserError(f"{what} needs packages that are not installed; install them with: pip install 'gptmill[{extra}]'")


def make_reading_error(address: str, error: OSError) -> UserError:
    return UserError(f"cannot read {address}: {error.strerror or error}; check its permissions or leave it out")


def make_decoding_error(address: str, error: UnicodeDecodeError, offset: int) -> UserError:
    """Of text whose byte at `offset`, counted from the start of the unpacked file, is the wrong one."""
    return UserError(
        f"{address} is not {error.encoding} text: byte 0x{error.object[error.start]:02x} at offset {offset}; "
        f"convert the file (iconv -t utf-8) or leave it out"
    )


def make_field_error(where: str, kind: str, field: str, present: list[str]) -> UserError:
    """Of a record, or a table, without the text."""
    names = ", ".join(present[:20]) or "nothing"
    return UserError(f"{where} has no {kind} {field!r}; name the one that holds the text with --text_field ({names})")


def make_type_error(where: str, field: str, value: str) -> UserError:
    return UserError(f"{where} holds {value} in {field!r}, not text; name another with --text_field or mend it")

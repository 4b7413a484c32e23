"""The byte-level alphabet of GPT-2 and Hugging Face: one printable character for each byte (`bytes_to_unicode`)."""

from __future__ import annotations

PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in set(PRINTABLE)]
# In the order of GPT-2's ids: printable bytes map to themselves, the others to the characters from U+0100 on.
BYTE_TO_CHAR = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + index) for index, byte in enumerate(HIDDEN)}
CHAR_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHAR.items()}


def encode_byte_level(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in token)


def decode_byte_level(token: str) -> bytes:
    """Raises KeyError for a character outside the alphabet."""
    return bytes(map(CHAR_TO_BYTE.__getitem__, token))

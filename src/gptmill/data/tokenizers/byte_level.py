"""How byte-level tables spell bytes: one visible character for each, as GPT-2 began and Hugging Face does."""

from __future__ import annotations

PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in set(PRINTABLE)]
# In the order of GPT-2's ids: the printable bytes stand for themselves, the others take the characters from U+0100 on.
SPELLING = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + place) for place, byte in enumerate(HIDDEN)}
BYTES = {character: byte for byte, character in SPELLING.items()}


def spell(token: bytes) -> str:
    return "".join(SPELLING[byte] for byte in token)


def unspell(spelt: str) -> bytes:
    """Raises KeyError where a character spells no byte."""
    return bytes(BYTES[character] for character in spelt)

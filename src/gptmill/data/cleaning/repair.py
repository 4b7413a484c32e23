"""Repairs text that was decoded with the wrong encoding (mojibake) and normalises its Unicode."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Literal

from gptmill.data.cleaning.extras import import_for

CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def load_ftfy() -> Callable[[str], str]:
    """Returns ftfy.fix_text restricted to repairs: it keeps quotes, ligatures, character widths and line breaks."""
    ftfy = import_for("--fix_unicode", "ftfy")
    config = ftfy.TextFixerConfig(
        unescape_html=False,
        uncurl_quotes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        fix_line_breaks=False,
        normalization=None,
    )

    def fix(text: str) -> str:
        if _is_plain_ascii(text):
            return text
        # ftfy works line by line too. It never changes plain ASCII, but is slow to find that out.
        lines = text.split("\n")
        return "\n".join(line if _is_plain_ascii(line) else ftfy.fix_text(line, config) for line in lines)

    return fix


def _is_plain_ascii(text: str) -> bool:
    return text.isascii() and not CONTROL.search(text)


def normalize(text: str, form: Literal["nfc", "nfkc"]) -> str:
    return unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)

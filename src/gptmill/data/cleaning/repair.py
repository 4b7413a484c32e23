"""Mends text that was decoded wrongly, and brings it into one Unicode form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Literal

from gptmill.data.cleaning.extras import import_for

CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def load_ftfy() -> Callable[[str], str]:
    """ftfy with the steps that undo damage alone: quotes, ligatures, widths and line breaks stay as written."""
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
        if _is_sound(text):
            return text
        # As ftfy does by itself, line by line; it finds nothing to mend in plain ASCII, slowly.
        lines = text.split("\n")
        return "\n".join(line if _is_sound(line) else ftfy.fix_text(line, config) for line in lines)

    return fix


def _is_sound(text: str) -> bool:
    return text.isascii() and not CONTROL.search(text)


def normalize(text: str, form: Literal["nfc", "nfkc"]) -> str:
    return unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)

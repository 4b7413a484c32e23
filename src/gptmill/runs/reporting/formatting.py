"""Numbers, times and texts as a report shows them."""

from __future__ import annotations

import math
import time
import unicodedata

from gptmill.runs.display import MARK

NOT_RECORDED = "not recorded"
BROKEN = "\ufffd"
UNSAFE = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")  # controls, directions, surrogates, unassigned, separators
HARMLESS = "\n\t\u200c\u200d"  # the last two join letters, as in Persian and emoji
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def format_loss(loss: float | None) -> str:
    if loss is None:
        return "–"
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3g}"


def format_number(number: float) -> str:
    """Three significant digits: 0.00123, 12.3, 1,230."""
    if not math.isfinite(number):
        return "not finite"
    if abs(number) >= 1000 or number == 0:
        return f"{number:,.0f}" if abs(number) < 1e9 else f"{number:.2e}"
    return f"{number:.3g}"


def format_amount(number: float) -> str:
    """A large number with its unit: 124.4M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number:,.0f}"


def format_duration(seconds: float) -> str:
    """The two largest units: 2 d 3 h, 3 h 5 min, 4 min 57 s, 12.3 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def format_percent(fraction: float) -> str:
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"


def format_change(fraction: float) -> str:
    """A relative change with its sign: −69.5 %."""
    return f"{'+' if fraction > 0 else '−'}{abs(fraction):.1%}".replace("%", " %")


def format_dollars(dollars: float) -> str:
    if dollars >= 100:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.2g}"


def format_perplexity(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 100 else f"{perplexity:,.0f}" if perplexity < 1e7 else ">10M"


def format_date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def clean(text: str, max_chars: int = 4000) -> str:
    """The text with marks for control and direction characters and broken Unicode, no longer than a page can show."""
    shown = text[:max_chars].replace("\r\n", "\n")
    if not shown.isprintable() or BROKEN in shown:
        shown = "".join(MARK if _is_unsafe(character) else character for character in shown)
    return shown if len(text) <= max_chars else shown + " …"


def _is_unsafe(character: str) -> bool:
    category = unicodedata.category(character)
    return character == BROKEN or (category in UNSAFE and character not in HARMLESS)

"""Validation of the cleaning options, before any text is read."""

from __future__ import annotations

from gptmill.config.errors import Problem, suggest
from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning.languages import LANGUAGES, LanguageFilter, split_codes
from gptmill.data.cleaning.repair import load_ftfy
from gptmill.data.cleaning.signatures import load_minhash

RATIOS = ("min_language_score", "max_symbol_ratio", "max_repetition")
COUNTS = ("min_chars", "max_chars")


def check_cleaning(options: CleaningOptions) -> list[Problem]:
    """Returns every problem of the options; raises UserError if a library that they need is missing."""
    problems = []
    for name in RATIOS:
        value = getattr(options, name)
        if value is not None and not 0 <= value <= 1:
            problems.append(Problem(f"--{name} {value}", "must lie between 0 and 1"))
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            problems.append(Problem(f"--{name} {value}", "must be at least 1"))
    lowest, highest = options.min_chars, options.max_chars
    if lowest is not None and highest is not None and 1 <= highest < lowest:
        advice = f"is greater than max_chars {highest}; lower it or raise max_chars"
        problems.append(Problem(f"--min_chars {lowest}", advice))
    if options.languages is not None:
        problems += _find_language_problems(options.languages)
    if not problems:
        _load_extras(options)
    return problems


def _find_language_problems(languages: str) -> list[Problem]:
    codes = split_codes(languages)
    where = f"--languages {languages}"
    if not codes:
        return [Problem(where, "names no language; give codes such as en,de")]
    return [
        Problem(where, f"{code!r} is not a language code{suggest(code, LANGUAGES)}; use codes such as en,de,zh")
        for code in codes
        if code not in LANGUAGES
    ]


def _load_extras(options: CleaningOptions) -> None:
    if options.fix_unicode:
        load_ftfy()
    if options.drop_near_duplicates:
        load_minhash()
    if options.languages is not None:
        LanguageFilter(options.languages, options.min_language_score)

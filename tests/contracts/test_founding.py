"""docs/founding.md is true: its commands do what it says, and what it names exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import PROJECT, make_environment, write_words
from test_docs import list_documented_commands
from zygote import Zygote

import gptmill
from gptmill.cli.main import run_guarded

PAGE = PROJECT / "docs" / "founding.md"
SOURCE = Path(gptmill.__file__).parent
ITEMS = {"000": 53, "001": 55, "002": 93, "003": 55, "004": 90}
STATES = ("yes", "differs", "not met")
PROGRAMS = ("gptmill", "python", "torchrun")
# Starts processes that compile and compute for seconds; tests/experiments/test_doctor.py runs it.
NOT_RUN = ("gptmill doctor",)
SHOWN = re.compile(r"`(?P<command>(?:gptmill|python|torchrun) [^`]+)`(?P<gpu> \(GPU\))?(?: exits with (?P<code>\d+))?")
PRINTED = re.compile(r"(?: prints| and) `([^`]+)`")


class Item(NamedTuple):
    """A row of the page's tables."""

    number: str
    says: str
    state: str
    here: str
    shown_by: str


class Shown(NamedTuple):
    """A command of a row, and what the row says that it does."""

    command: str
    needs_gpu: bool
    code: int
    printed: tuple[str, ...]


def read_page() -> str:
    return PAGE.read_text(encoding="utf-8")


@cache
def list_items() -> list[Item]:
    rows = [line.strip("| \n").split(" | ") for line in read_page().splitlines() if re.match(r"\| 00\d\.", line)]
    return [Item(*(cell.strip() for cell in row)) for row in rows]


def list_shown(item: Item) -> Iterator[Shown]:
    found = list(SHOWN.finditer(item.shown_by))
    for match, following in zip_longest(found, found[1:]):
        rest = item.shown_by[match.end() : following.start() if following else None]
        yield Shown(match["command"], bool(match["gpu"]), int(match["code"] or 0), tuple(PRINTED.findall(rest)))


def list_names(item: Item) -> list[str]:
    """What a row has in backticks, but for commands and what they print."""
    names: list[str] = re.findall(r"`([^`]+)`", item.here + PRINTED.sub("", item.shown_by))
    return [name for name in names if name.split()[0] not in PROGRAMS]


def test_the_table_is_complete() -> None:
    items = list_items()
    expected = [f"{document}.{number}" for document, count in ITEMS.items() for number in range(1, count + 1)]
    assert [item.number for item in items] == expected
    assert len(expected) == 346
    for item in items:
        assert item.state in STATES, item.number
        assert item.shown_by, item.number
        assert item.state == "yes" or len(item.here.split()) >= 8, f"{item.number}: no reason is given"


def test_the_counts_are_those_of_the_rows() -> None:
    states = Counter((item.number[:3], item.state) for item in list_items())
    rows = re.findall(r"^\| (00\d|all) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", read_page(), re.MULTILINE)
    counted = {document: (count, *(states[document, state] for state in STATES)) for document, count in ITEMS.items()}
    counted["all"] = tuple(map(sum, zip(*counted.values(), strict=True)))
    assert {document: tuple(map(int, numbers)) for document, *numbers in rows} == counted


def test_every_file_and_test_that_a_row_names_exists() -> None:
    for item in list_items():
        for name in list_names(item):
            if "::" in name:
                file, _, test = name.partition("::")
                assert test in list_functions(PROJECT / file), f"{item.number}: {name}"
            elif re.fullmatch(r"[\w-]+(/[\w.-]+)*\.(py|md)|evals/tasks", name):
                assert any((folder / name).exists() for folder in (PROJECT, SOURCE)), f"{item.number}: {name}"
        for shown in list_shown(item):
            if shown.command.startswith("python "):
                assert (PROJECT / shown.command.split()[1]).is_file(), f"{item.number}: {shown.command}"


@cache
def list_functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def list_commands() -> dict[str, list[tuple[str, Shown]]]:
    """Every command to run once, in the order of the page, with the rows that speak of it."""
    setup = re.findall(r"```sh\n(.*?)```", read_page(), re.DOTALL)[0].splitlines()
    elsewhere = list_documented_commands().keys() - set(setup)
    commands: dict[str, list[tuple[str, Shown]]] = {command: [] for command in setup}
    for item in list_items():
        for shown in list_shown(item):
            is_run = shown.command.startswith("gptmill ") and not shown.command.startswith(NOT_RUN)
            if is_run and not shown.needs_gpu and (shown.printed or shown.command not in elsewhere):
                commands.setdefault(shown.command, []).append((item.number, shown))
    return commands


def test_what_is_not_run_here_is_run_elsewhere_or_needs_a_gpu() -> None:
    run, elsewhere = list_commands().keys(), list_documented_commands().keys()
    for item in list_items():
        for shown in list_shown(item):
            is_run = shown.command in run
            is_excused = shown.needs_gpu or shown.command.startswith(("python benchmarks/", *NOT_RUN))
            assert is_run or is_excused or shown.command in elsewhere, f"{item.number}: {shown.command}"
            assert is_run or not (shown.printed or shown.code), f"{item.number}: nobody checks {shown.printed}"


def test_every_command_does_what_its_rows_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], zygote: Zygote
) -> None:
    """In one folder, as a reader would, and in this process, where torch is already loaded.

    A recipe for a GPU is forked: it starts to import the compiler.
    """
    write_words(tmp_path).rename(tmp_path / "corpus.txt")
    (tmp_path / "tiny.toml").write_text(re.findall(r"```toml\n(.*?)```", read_page(), re.DOTALL)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, value in make_environment().items():
        monkeypatch.setenv(name, value)
    wrong = []
    for command, rows in list_commands().items():
        words = shlex.split(command)[1:]
        if words[:2] == ["train", "gpt2-124m"]:
            process = zygote.run(["-m", "gptmill", *words], tmp_path, make_environment())
            code, output = process.returncode, process.stdout + process.stderr
        else:
            capfd.readouterr()
            code = run_here(words)
            output = "".join(capfd.readouterr())
        for number, shown in rows:
            missing = [text for text in shown.printed if text not in output]
            if missing or code != shown.code:
                wrong.append(f"{number}: {command}\nexits with {code}, does not print {missing}, but\n{output}")
    assert not wrong, "\n".join(wrong)


def run_here(words: list[str]) -> int:
    try:
        return run_guarded(words)
    except SystemExit as end:  # of --help
        return int(end.code or 0)

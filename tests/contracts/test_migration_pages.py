"""The pages for people from other tools are true: our flags parse, theirs exist, and an error for theirs names ours."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import PROJECT
from docs_site import find_command

from gptmill.cli.flags import Command
from gptmill.config.schema import Field, list_fields
from gptmill.config.synonyms import list_options, suggest_option

PAGES = [PROJECT / "docs" / f"from-{name}.md" for name in ("nanogpt", "hf-trainer", "litgpt")]


class Row(NamedTuple):
    """A line of a table: the verb that its heading names, their names, and our flags with values."""

    verb: str
    theirs: list[str]
    ours: list[str]


def list_rows(page: Path) -> list[Row]:
    """The rows of all tables whose second column is headed by a verb."""
    rows, verb = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:]]
        if len(cells) < 2:
            verb = ""
        elif heading := re.fullmatch(r"`gptmill (\w+)`", cells[1]):
            verb = heading[1]
        elif verb and not set(line) <= set("|-: "):
            rows.append(Row(verb, re.findall(r"`([^`]+)`", cells[0]), re.findall(r"`(--[^`]+)`", cells[1])))
    return rows


def list_command_fields(command: Command) -> dict[str, Field]:
    return {field.name: field for config in command.configs for field in list_fields(config)}


def make_arguments(flag: str, fields: dict[str, Field]) -> list[str]:
    """A flag as printed, with some value if it is printed without one and needs it."""
    words = flag.split()
    field = fields.get(words[0].removeprefix("--"))
    if len(words) > 1 or field is None or field.kind is bool:
        return words
    return [*words, field.choices[0] if field.choices else "1"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_of_our_flags_parses(page: Path) -> None:
    rows = list_rows(page)
    assert len(rows) > 20
    for row in rows:
        assert row.theirs, row
        assert row.ours, row
        command = find_command(row.verb)
        for flag in row.ours:
            parsed = command.parse(make_arguments(flag, list_command_fields(command)))
            assert parsed.values, flag
            assert not parsed.words, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_error_for_their_name_names_ours(page: Path) -> None:
    wrong = {}
    for row in list_rows(page):
        fields = list_command_fields(find_command(row.verb))
        ours = {flag.split()[0].removeprefix("--").removeprefix("no_") for flag in row.ours}
        for name in (name.removeprefix("--").partition("=")[0] for name in row.theirs):
            answer = suggest_option(f"--{name}", fields)
            if name not in fields and not ours & list_options(answer):
                wrong[name] = answer
    assert not wrong


def test_their_names_are_those_of_the_installed_transformers() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    known = {ast.unparse(line.target) for line in arguments.body if isinstance(line, ast.AnnAssign)}
    page = (PROJECT / "docs" / "from-hf-trainer.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| TrainingArguments .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(named) > 40
    assert named <= known

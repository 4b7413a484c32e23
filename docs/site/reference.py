"""Writes docs/reference.md: every verb with its options, from the docstrings that also feed --help.

Run it as: python docs/site/reference.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from gptmill.cli.flags import Command, ask_command, describe_default
from gptmill.cli.help_text import describe_examples
from gptmill.cli.main import VERBS, import_verb
from gptmill.config.run import RunConfig
from gptmill.config.schema import Field, list_fields

PAGE = Path(__file__).parents[1] / "reference.md"
INTRODUCTION = """\
# Commands and options

Every verb of `gptmill` with its options, as `gptmill VERB --help` prints them. Names may be written with `_`
or with `-`. A switch `--name` is turned off by `--no_name`, and `none` empties an option that may be empty.
From Python, options are keywords: `--max_lr 1e-3` is `max_lr=1e-3`.
"""
RUN_OPTIONS = """\
## Options of a run

What `train`, `plan`, `tune`, `bench`, `verify-resume` and `config show` take, and what a recipe sets. In a
recipe, an option stands in the section that its heading names:

```toml
extends = "demo"

[training]
max_steps = 200
```
"""


def write_reference() -> str:
    parts = [INTRODUCTION, *(describe_verb(ask_command(import_verb(verb).run)) for verb in VERBS), RUN_OPTIONS]
    for _, fields in groupby(list_fields(RunConfig), lambda field: field.section):
        group = list(fields)
        parts.append(f"### {group[0].section_title}\n\n`[{group[0].section}]` in a recipe.\n\n{describe_fields(group)}")
    return "\n".join(parts)


def describe_verb(command: Command) -> str:
    lines = [f"## gptmill {command.verb}", "", "```text", *command.list_usages(), "", command.summary.rstrip(), ""]
    lines += [describe_examples(command.verb).strip(), "```", ""]
    fields = [field for config in command.configs if config is not RunConfig for field in list_fields(config)]
    for title, group in groupby(fields, lambda field: field.section_title):
        lines += [f"**{title}**", "", describe_fields(list(group))]
    if RunConfig in command.configs:
        lines += ["And all [options of a run](#options-of-a-run).", ""]
    return "\n".join(lines)


def describe_fields(fields: list[Field]) -> str:
    return "\n".join(["| Option | What it does |", "|---|---|", *map(describe_field, fields), ""])


def describe_field(field: Field) -> str:
    value = "" if field.kind is bool else " " + ("\\|".join(field.choices) or name_value(field.kind))
    default = "on" if field.default is True else describe_default(field.default).strip(" []")
    return f"| `--{field.name}{value}` | {escape(field.help)}{f' Default: `{default}`.' if default else ''} |"


def name_value(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


if __name__ == "__main__":
    PAGE.write_text(write_reference(), encoding="utf-8")

"""What a shell can complete: verbs, their actions and operands, their flags and the values of these.

All of it is read from the verbs' own commands, so that no list is kept twice. Knows no shell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from gptmill.cli.flags import ask_command
from gptmill.cli.main import VERBS, import_verb
from gptmill.config.recipes import list_recipes
from gptmill.config.schema import Field
from gptmill.config.sizes import list_sizes


class Source(Enum):
    """Where a word's candidates come from."""

    NOTHING = "nothing"
    """A number or a text of the user's own."""
    WORDS = "words"
    """A list that is known when the script is written."""
    RUNS = "runs"
    """The runs in the log directory, or paths."""
    RECIPES = "recipes"
    """The shipped recipes, or paths."""
    FILES = "files"


@dataclass(frozen=True)
class Candidates:
    source: Source
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompletedFlag:
    """A flag by its name without dashes; a switch takes no value."""

    name: str
    help: str
    value: Candidates | None


@dataclass(frozen=True)
class CompletedVerb:
    """A verb: the actions that may follow it, what its other words are, and its flags."""

    name: str
    summary: str
    actions: tuple[str, ...]
    operands: Candidates
    flags: tuple[CompletedFlag, ...]


NOTHING, FILES = Candidates(Source.NOTHING), Candidates(Source.FILES)
OPERANDS = {"RECIPE": Candidates(Source.RECIPES), "RUN": Candidates(Source.RUNS), "MODEL": Candidates(Source.RUNS)}
SPECIAL_VALUES = {
    "run": Candidates(Source.RUNS),
    "run_name": Candidates(Source.RUNS),
    "init_from": Candidates(Source.RUNS),
    "resume": Candidates(Source.WORDS, ("latest", "best", "auto")),
    "checkpoint": Candidates(Source.WORDS, ("latest", "best")),
    "size": Candidates(Source.WORDS, tuple(list_sizes())),
}


def list_completed_verbs() -> list[CompletedVerb]:
    return [complete_verb(verb) for verb in VERBS]


def complete_verb(verb: str) -> CompletedVerb:
    command = ask_command(import_verb(verb).run)
    actions = dict.fromkeys(form.split()[0] for form in command.words.split(" | ") if form[:1].islower())
    named = [word for word in re.findall(r"\b[A-Z]+\b", command.words) if word in OPERANDS]
    others = FILES if re.search(r"\b[A-Z]+\b", command.words) else NOTHING
    flags = [flag for field in command.list_fields().values() for flag in complete_field(field)]
    operands = OPERANDS[named[0]] if named else others
    return CompletedVerb(verb, VERBS[verb], tuple(actions), operands, tuple(flags))


def complete_field(field: Field) -> list[CompletedFlag]:
    """The flag of a field, and the one that turns off what a recipe may turn on."""
    if field.kind is bool:
        names = [field.name, f"no_{field.name}"] if field.section else [field.name]
        return [CompletedFlag(name, field.help, None) for name in names]
    if field.choices:
        return [CompletedFlag(field.name, field.help, Candidates(Source.WORDS, field.choices))]
    usual = FILES if field.kind is str else NOTHING
    return [CompletedFlag(field.name, field.help, SPECIAL_VALUES.get(field.name, usual))]


def list_recipe_names() -> tuple[str, ...]:
    return tuple(list_recipes())

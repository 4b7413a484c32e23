"""Flags from config dataclasses: flat, `_` and `-` alike, all problems reported at once.

argparse only splits the words and prints the help. Values stay text until `parse_value`, which recipes go
through as well, so that a flag and a recipe key obey one rule and fail with one kind of sentence.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from gptmill.config.errors import ConfigError, Problem, suggest
from gptmill.config.schema import Field, list_fields, parse_value


@dataclass(frozen=True)
class Parsed:
    """The words that are not flags, and the typed values of those flags that were given."""

    words: list[str]
    values: dict[str, Any]


def parse_flags(
    verb: str,
    arguments: list[str],
    configs: tuple[type, ...],
    words: str,
    summary: str,
    defaults: dict[str, Any],
) -> Parsed:
    """Raises ConfigError naming every unknown flag and every bad value; prints help and exits on --help.

    `defaults` are what the help shows in place of the classes' own: a recipe's values.
    """
    fields = {field.name: field for config in configs for field in list_fields(config)}
    parser = _build_parser(verb, fields, words, summary, defaults)
    namespace, unknown = parser.parse_known_intermixed_args([_normalise(word) for word in arguments])
    given = vars(namespace)
    problems = [
        Problem(
            word.partition("=")[0],
            f"unknown flag{suggest(_normalise(word).partition('=')[0], _spell_all(fields))}",
        )
        for word in unknown
        if word.startswith("-")
    ]
    values: dict[str, Any] = {}
    for name, raw in given.items():
        if name == "words":
            continue
        try:
            if raw is None:
                raise ValueError("needs a value")
            values[name] = parse_value(fields[name], raw)
        except ValueError as error:
            shown = f"--{name}" if raw is None else f"--{name} {raw}"
            problems.append(Problem(shown, str(error)))
    if problems:
        raise ConfigError(problems)
    return Parsed(given["words"], values)


def check_words(verb: str, words: list[str], expected: str, least: int, most: int) -> None:
    """Raises ConfigError unless the number of plain words is right."""
    if len(words) < least:
        raise ConfigError([Problem(f"gptmill {verb}", f"needs {expected}; see gptmill {verb} --help")])
    if len(words) > most:
        raise ConfigError(
            [Problem(word, f"one word too many; gptmill {verb} takes {expected}") for word in words[most:]]
        )


def _build_parser(
    verb: str, fields: dict[str, Field], words: str, summary: str, defaults: dict[str, Any]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"gptmill {verb}",
        usage=f"gptmill {verb} {words} [flags]",
        description=summary,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields.values():
        title = field.section_title
        group = groups.setdefault(title, groups.get(title) or parser.add_argument_group(title))
        text = field.help.replace("%", "%%") + _describe_default(defaults.get(field.name, field.default))
        if field.kind is bool:
            group.add_argument(f"--{field.name}", f"--no_{field.name}", action=_Switch, dest=field.name, help=text)
        else:
            metavar = "|".join(field.choices) if field.choices else field.kind.__name__.upper().replace("STR", "TEXT")
            group.add_argument(f"--{field.name}", nargs="?", metavar=metavar, help=text)
    return parser


class _Switch(argparse.Action):
    """--name is true, --no_name is false."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, _values: object, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no_"))


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(_terminal_width(), 120))


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns - 2


def _normalise(word: str) -> str:
    """--total-batch-size=8 to --total_batch_size=8; what follows = is the user's."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _spell_all(fields: dict[str, Field]) -> list[str]:
    return [f"--{name}" for name in fields]


def _describe_default(value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    return f" [{value:g}]" if isinstance(value, float) else f" [{value}]"

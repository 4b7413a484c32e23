"""Command-line flags from config dataclasses: flat, `_` and `-` equivalent, all problems reported at once.

argparse only splits the words and prints the help. Values stay text until `parse_value`, which also parses recipes, so
that flags and recipe keys follow the same rules and give the same errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gptmill.cli.help_text import describe_examples
from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.renamed import RENAMED_FIELDS, find_repeated_fields
from gptmill.config.schema import Field, list_fields, parse_value
from gptmill.config.synonyms import suggest_option
from gptmill.config.trust import name_addresses

MAX_HELP_WIDTH = 120
ASK = "\0command"  # no shell can pass this word
SWITCH_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Command:
    """The command line of a verb: positional words, flags and help text."""

    verb: str
    words: str
    summary: str
    configs: tuple[type, ...]
    find_more_problems: Callable[[list[str], dict[str, Any]], list[Problem]] | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Alternative names of flags, each with the name of its field."""

    def parse(self, arguments: list[str], defaults: dict[str, Any] | None = None) -> Parsed:
        """Parses words and flags; prints the help and exits on --help.

        `defaults`, the values of a recipe, replace the classes' defaults in the help. Raises ConfigError with all
        unknown flags and invalid values, and with what `find_more_problems` then finds in words and values.
        """
        if arguments == [ASK]:
            raise AskedCommand(self)
        fields = self.list_fields()
        aliases = {**RENAMED_FIELDS, **self.aliases}
        shows_help = any(argument.startswith(("-h", "--help")) for argument in arguments)
        parser = _build_parser(self, fields, defaults or {}, shows_help)
        namespace, unknown = parser.parse_known_intermixed_args(_normalise(arguments, fields, aliases))
        given = vars(namespace)
        words = given.pop("words", [])
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        problems = [Problem(name, f"unknown flag{suggest_option(name, fields)}") for name in names]
        problems += _find_repeated_flags(arguments, aliases)
        problems += _find_invalid_switches(arguments, fields, aliases)
        values: dict[str, Any] = {}
        for name, raw in given.items():
            try:
                values[name] = parse_value(fields[name], raw)
            except ValueError as error:
                problems.append(Problem(f"--{name} {raw}", str(error)))
        if problems:
            more = self.find_more_problems(words, values) if self.find_more_problems else []
            raise ConfigError(problems + more)
        name_addresses([*words, *values.values()])
        return Parsed(words, values)

    def find_first_word(self, arguments: list[str]) -> str | None:
        """The first argument that is no flag and no flag's value, before the options of plug-ins are known."""
        fields, flag = self.list_fields(), ""
        for word in arguments:
            field = fields.get(RENAMED_FIELDS.get(name := _split_name(flag)[1], name))
            is_switch = field is not None and field.kind is bool
            is_value = word.lower() in SWITCH_WORDS if is_switch else flag != "" and "=" not in flag
            if not word.startswith("-") and not is_value:
                return word
            flag = "" if is_value else word
        return None

    def list_fields(self) -> dict[str, Field]:
        """The fields behind the flags, by name."""
        return {field.name: field for config in self.configs for field in list_fields(config)}

    def list_usages(self) -> list[str]:
        """Every form of the command, as in `gptmill runs compare RUN RUN [RUN ...] [flags]`."""
        return [" ".join(filter(None, ["gptmill", self.verb, form, "[flags]"])) for form in self.words.split(" | ")]

    def check_words(self, words: list[str], least: int, most: int) -> None:
        """Raises UserError unless the number of positional words is right."""
        if not least <= len(words) <= most:
            given = " ".join(["gptmill", self.verb, *words])
            usage = " ".join(filter(None, ["gptmill", self.verb, self.words, "[flags]"]))
            raise UserError(f"{given}: the usage is {usage}")


class AskedCommand(Exception):  # noqa: N818
    """Carries the command of a verb to the one who asked the verb for it with `ASK`."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.verb)
        self.command = command


def ask_command(run: Callable[[list[str]], int]) -> Command:
    """The command of a verb, given the function that runs it."""
    try:
        run([ASK])
    except AskedCommand as answer:
        return answer.command
    raise AssertionError("a verb begins by parsing its arguments")


@dataclass(frozen=True)
class Parsed:
    """Positional words, and the typed values of the flags that were given."""

    words: list[str]
    values: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class _Switch(argparse.Action):
    """A boolean flag: --name is true, --no_name is false."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, _values: object, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no_"))


def _build_parser(command: Command, fields: dict[str, Field], defaults: dict[str, Any], shows_help: bool) -> _Parser:
    width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH)
    parser = _Parser(
        prog=f"gptmill {command.verb}",
        usage="\n       ".join(command.list_usages()),
        description=command.summary,
        epilog=describe_examples(command.verb),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    groups = {
        title: parser.add_argument_group(title) for title in dict.fromkeys(f.section_title for f in fields.values())
    }
    for field in fields.values():
        text = _describe(field, defaults.get(field.name, field.default)) if shows_help else None
        group = groups[field.section_title]
        if field.kind is bool:
            # Only a field that a recipe can enable needs a flag to disable it; the others take one too.
            names = [f"--{field.name}", f"--no_{field.name}"]
            shown = names if field.section else names[:1]
            group.add_argument(*shown, action=_Switch, dest=field.name, help=text)
            if shown != names:
                group.add_argument(names[1], action=_Switch, dest=field.name, help=argparse.SUPPRESS)
        else:
            metavar = "|".join(field.choices) or {int: "N", float: "X", str: "TEXT"}[field.kind]
            group.add_argument(f"--{field.name}", metavar=metavar, help=text)
    parser.add_argument_group("Help").add_argument("-h", "--help", action="help", help="Show this text and exit.")
    return parser


def _normalise(arguments: list[str], fields: dict[str, Field], aliases: Mapping[str, str]) -> list[str]:
    """Arguments in one spelling: --a-b=1 and --a_b 1, current names, --switch=false, negative numbers as values."""
    words: list[str] = []
    for argument in arguments:
        if not argument.startswith("--"):
            follows_flag = bool(words) and words[-1].startswith("--") and "=" not in words[-1]
            prefix, name = _split_name(words[-1]) if follows_flag else ("", "")
            if name in fields and fields[name].kind is bool and argument.lower() in SWITCH_WORDS:
                words[-1] = _format_switch(name, argument, prefix)
            elif follows_flag and argument.startswith("-") and _is_number(argument):
                words[-1] += f"={argument}"  # argparse would take -1e-3 for a flag
            else:
                words.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        prefix, name = _split_name(flag)
        name = aliases.get(name, name)
        if equals and name in fields and fields[name].kind is bool:
            words.append(_format_switch(name, value, prefix))
        else:
            words.append(f"--{prefix}{name}{equals}{value}")
    return words


def _format_switch(name: str, value: str, prefix: str) -> str:
    is_on = SWITCH_WORDS.get(value.lower(), True) != bool(prefix)
    return f"--{name}" if is_on else f"--no_{name}"


def _find_invalid_switches(arguments: list[str], fields: dict[str, Field], aliases: Mapping[str, str]) -> list[Problem]:
    """Switches with a value that is neither true nor false."""
    problems = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = _split_name(flag)[1]
        field = fields.get(aliases.get(name, name)) if flag.startswith("--") and equals else None
        if field is not None and field.kind is bool and value.lower() not in SWITCH_WORDS:
            expected = f"expected true or false; --{field.name} alone is true, --no_{field.name} is false"
            problems.append(Problem(f"--{name}={value}", expected))
    return problems


def _find_repeated_flags(arguments: list[str], aliases: Mapping[str, str]) -> list[Problem]:
    """Options that are given under two names; a flag that is merely repeated is not a problem: the last one counts."""
    names = [_split_name(word.partition("=")[0])[1] for word in arguments if word.startswith("--")]
    return [
        Problem(" and ".join(f"--{name}" for name in found), f"are two names of the same option; keep --{field} only")
        for field, found in find_repeated_fields(names, aliases).items()
    ]


def _split_name(flag: str) -> tuple[str, str]:
    """The no_ of a negated switch, or an empty text, and the name of the flag with `_`."""
    name = flag.removeprefix("--").replace("-", "_")
    return ("no_", name.removeprefix("no_")) if name.startswith("no_") else ("", name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _describe(field: Field, default: Any) -> str:
    return field.help.replace("%", "%%") + describe_default(default)


def describe_default(value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    if isinstance(value, str) and not value.isprintable():
        value = json.dumps(value)
    return f" [{value:g}]" if isinstance(value, float) else f" [{value}]"

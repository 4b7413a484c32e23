"""`gptmill.register`: adds a part of the user's own to the table of its kind, and its options to the config."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gptmill.config.errors import UserError, suggest
from gptmill.config.plugins import MODULE_PREFIX, PARTS, Part, add_part, make_fingerprint
from gptmill.config.requests import PrepareRequest, ReadingOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import find_owners, list_fields

Kind = Literal[
    "architecture",
    "attention",
    "feed_forward",
    "optimizer",
    "schedule",
    "tokenizer",
    "format",
    "source",
    "evaluator",
    "tracker",
]
# Where the table of each kind is. They are imported when a part is registered: a tokenizer needs no torch.
TABLES: dict[str, tuple[str, str]] = {
    "architecture": ("gptmill.models.own_model", "ARCHITECTURES"),
    "attention": ("gptmill.models.attention", "ATTENTIONS"),
    "feed_forward": ("gptmill.models.feed_forward", "FEED_FORWARDS"),
    "optimizer": ("gptmill.training.optimizers", "OPTIMIZERS"),
    "schedule": ("gptmill.training.schedules", "SCHEDULES"),
    "tokenizer": ("gptmill.data.tokenizers", "TOKENIZERS"),
    "format": ("gptmill.data.sources.formats", "FORMATS"),
    "source": ("gptmill.data.sources.source", "SOURCES"),
    "evaluator": ("gptmill.evals.own_evaluators", "EVALUATORS"),
    "tracker": ("gptmill.runs.trackers", "TRACKERS"),
}
BY_OPTIONS = ("architecture", "attention", "feed_forward", "schedule")
"""Kinds whose tables are keyed by the type of the options, not by the name."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
SUFFIX = re.compile(r"\.[a-z0-9]{1,16}")

Target = TypeVar("Target")


def register(kind: Kind, name: str, options: type | None = None) -> Callable[[Target], Target]:
    """A decorator that registers a class or function under a name; docs/plugins.md says what each kind must do.

    `options` is a frozen dataclass whose fields, all with defaults, become flags and recipe keys; the string below a
    field is its help.
    """
    if kind not in TABLES:
        raise UserError(f"unknown kind {kind!r}{suggest(kind, TABLES)}; the kinds are {', '.join(get_args(Kind))}")
    if not (SUFFIX if kind == "format" else NAME).fullmatch(name):
        example = ".srt" if kind == "format" else "my-part"
        raise UserError(f"{name!r} cannot be the name of a {kind}; use lower-case letters and digits, e.g. {example}")
    chosen = dataclasses.make_dataclass(f"No{kind.title()}Options", [], frozen=True) if options is None else options

    def add(target: Target) -> Target:
        _check_free(kind, name, target)
        if kind == "tokenizer" and getattr(target, "name", None) != name:
            raise UserError(f"tokenizer {name!r} must have the same text as its attribute `name`, to be found again")
        _check_options(kind, name, chosen)
        chosen.tag = name  # type: ignore[attr-defined]
        module, table = TABLES[kind]
        found: dict[Any, Any] = getattr(import_module(module), table)
        found[chosen if kind in BY_OPTIONS else name] = _adapt(kind, target, chosen)
        add_part(Part(kind, name, chosen, target, make_fingerprint(target)))
        return target

    return add


def _adapt(kind: str, target: Any, options: type) -> Any:
    """What the table of the kind holds for a part."""
    if kind == "optimizer":
        return import_module("gptmill.training.optimizers").make_own_builder(target)
    if kind == "format":
        return lambda stored, reading, _part: _read(stored.open_data, target, stored.uri, reading, options)
    if kind == "source":
        return lambda rest, reading: _read(lambda: rest, target, rest, reading, options)
    return target


def _read(
    open_input: Callable[[], Any], read: Any, where: str, reading: ReadingOptions, options: type
) -> Generator[str]:
    """The documents that a plug-in's function reads; whatever it raises names the input."""
    try:
        yield from read(open_input(), reading.reading_parts.find(options))
    except (UserError, OSError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{read.__name__}, of a plug-in, failed on {where}: {reason:.300}; fix it there") from error


def _check_free(kind: str, name: str, target: Any) -> None:
    """Raises UserError if the name is taken; the same code may register its part again, as a notebook cell does."""
    known = PARTS.get((kind, name))
    if known is not None and _find_origin(known.target) == _find_origin(target):
        return
    variants = {choice for field in list_fields(RunConfig) if field.name == kind for choice in field.choices}
    module, table = TABLES[kind]
    if known is not None or name in variants or name in getattr(import_module(module), table):
        owner = "gptmill" if known is None else known.target.__module__.removeprefix(MODULE_PREFIX)
        raise UserError(f"{kind} {name!r} exists already, in {owner}; choose another name")


def _find_origin(target: Any) -> str:
    """The file of a part's code, whatever name it was imported under; in a notebook, the name of its module."""
    module: str = target.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return module if file is None else str(Path(file).resolve())


def _check_options(kind: str, name: str, options: type) -> None:
    """Raises UserError unless the options can be flags: a frozen dataclass, defaults, simple types, free names."""
    where = f"the options of {kind} {name!r}"
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UserError(f"{where} must be a dataclass with frozen=True")
    if missing := [item.name for item in dataclasses.fields(options) if item.default is dataclasses.MISSING]:
        raise UserError(f"{where} need defaults: give {', '.join(missing)} one")
    try:
        fields = list_fields(options)
    except (AssertionError, NameError, ValueError):
        raise UserError(f"{where} must be int, float, str, bool, a Literal of texts, or one of these or None") from None
    if clashes := [field.name for field in fields if not _is_free(kind, field.name)]:
        raise UserError(f"{where} have the name of another option: rename {', '.join(clashes)}")


def _is_free(kind: str, option: str) -> bool:
    """Whether a part of this kind may have the option: nothing else does, or only parts of the same kind."""
    siblings = {field.name for part in PARTS.values() if part.kind == kind for field in list_fields(part.options)}
    owners = find_owners(RunConfig, option)
    taken = {field.name for config in (RunConfig, PrepareRequest) for field in list_fields(config)}
    return option not in taken or option in siblings or (bool(owners) and all(field == kind for field, _ in owners))

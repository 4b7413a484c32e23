"""Introspects config dataclasses (fields, types, docstrings) and parses raw values into typed ones.

The command line gives strings and recipes give TOML values; both go through `parse_value`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gptmill.config.plugins import PartOptions, UnloadedOptions, UnloadedPart, clear_on_change, list_parts
from gptmill.config.renamed import RENAMED_CHOICES

T = TypeVar("T")
MAX_INTEGER = 2**63 - 1  # what tensors and arrays hold
_HINTS: dict[type, dict[str, Any]] = {}
EXPECTED = {int: "a whole number", float: "a number such as 3e-4", bool: "true or false"}


@dataclass(frozen=True)
class Field:
    """One option: its section, name, type and default, and the class that declares it."""

    section: str
    section_title: str
    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    owner: type

    @property
    def help(self) -> str:
        """Read from the source when it is asked for: few commands show it, and all would wait for it."""
        return _read_docstrings(self.owner)[self.name]


@cache
def list_fields(cls: type) -> tuple[Field, ...]:
    """All options of a config class in order of declaration; nested dataclasses are its sections.

    A union of dataclasses is one field, whose value is the tag of a variant, followed by the fields of all variants. A
    field that several variants have is listed once.
    """
    hints, title = _read_hints(cls), (cls.__doc__ or "").strip()
    fields: dict[str, Field] = {}
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if is_part_options(hint):
            for part in list_parts(hint.kinds):
                own = (dataclasses.replace(field, section_title=title) for field in list_fields(part.options))
                fields |= {field.name: field for field in own}
        elif variants := list_variants(hint, item.name):
            tag = _read_tag(item.default)
            fields[item.name] = Field("", title, item.name, str, tuple(variants), False, tag, cls)
            for variant in variants.values():
                for field in list_fields(variant):
                    fields.setdefault(field.name, dataclasses.replace(field, section_title=title))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            fields |= {field.name: dataclasses.replace(field, section=item.name) for field in list_fields(hint)}
        else:
            kind, choices, optional = _split_hint(hint)
            fields[item.name] = Field("", title, item.name, kind, choices, optional, item.default, cls)
    return tuple(fields.values())


def build_config(cls: type[T], values: dict[str, Any]) -> T:
    """An instance of `cls` with defaults replaced by `values`, which are keyed by field name.

    Fields of variants that are not selected are ignored: see `find_inapplicable`.
    """
    hints = _read_hints(cls)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[item.name]
        if is_part_options(hint):
            own = [part.options for part in list_parts(hint.kinds) if dataclasses.fields(part.options)]
            arguments[item.name] = hint(tuple(build_config(options, values) for options in own))
        elif variants := list_variants(hint, item.name):
            tag = values.get(item.name, _read_tag(item.default))
            arguments[item.name] = build_config(variants[tag], values) if tag in variants else UnloadedPart(tag)
        elif dataclasses.is_dataclass(hint):
            arguments[item.name] = build_config(hint, values)  # type: ignore[arg-type]
        elif item.name in values:
            arguments[item.name] = values[item.name]
    return cls(**arguments)


def _read_hints(cls: type) -> dict[str, Any]:
    """Its type hints, kept: reading them takes longer than all else here."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def list_values(config: Any) -> dict[str, Any]:
    """The inverse of `build_config`: the values of all fields by name; of variants, those of the selected ones."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, UnloadedOptions):
            values.update((option.name, option.value) for option in value.values)
            continue
        if isinstance(value, UnloadedPart):
            values[item.name] = value.tag
            continue
        if isinstance(value, PartOptions):
            for options in value.values:
                values.update(list_values(options))
            continue
        if hasattr(value, "tag"):
            values[item.name] = value.tag
        values.update(list_values(value) if dataclasses.is_dataclass(value) else {item.name: value})
    return values


def find_inapplicable(cls: type, values: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Names of values that no selected variant has, each with the (field, tag) pairs of the variants that have it."""
    known = {field.name for field in list_fields(cls)}
    inapplicable = (values.keys() & known) - list_values(build_config(cls, values)).keys()
    return {name: find_owners(cls, name) for name in values if name in inapplicable}


def merge_values(cls: type, base: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, with those above winning; values of the base for variants that are no longer selected are dropped."""
    merged = {**base, **above}
    dropped = find_inapplicable(cls, merged).keys() - above.keys() - find_inapplicable(cls, base).keys()
    return {name: value for name, value in merged.items() if name not in dropped}


def find_owners(cls: type, name: str) -> list[tuple[str, str]]:
    """The (field, tag) pairs of the variants that have a field of this name."""
    owners: list[tuple[str, str]] = []
    for field, hint in _read_hints(cls).items():
        variants = list_variants(hint, field)
        if not variants and isinstance(hint, type) and dataclasses.is_dataclass(hint):
            owners += find_owners(hint, name)
        for tag, variant in variants.items():
            if any(item.name == name for item in dataclasses.fields(variant)):
                owners.append((field, tag))
            else:
                owners += find_owners(variant, name)
    return owners


def list_variants(hint: Any, kind: str) -> dict[str, type]:
    """The dataclasses of a union by tag, and those registered for the field; empty for any other annotation."""
    parts = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    variants = {part.tag: part for part in parts if hasattr(part, "tag")}
    return variants | {part.name: part.options for part in list_parts([kind])} if variants else {}


def is_part_options(hint: Any) -> bool:
    """Whether a field holds the options of registered parts."""
    return isinstance(hint, type) and issubclass(hint, PartOptions)


def _read_tag(variant: Any) -> str:
    return str(variant.tag)


def parse_value(field: Field, raw: object) -> Any:
    """The typed value; raises ValueError with what was expected."""
    if field.optional and isinstance(raw, str) and raw.lower() == "none":
        return None
    if field.choices:
        raw = RENAMED_CHOICES.get((field.name, str(raw)), raw)
        if raw in field.choices:
            return raw
        raise ValueError(f"expected one of {', '.join(field.choices)}")
    if field.kind is bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in ("true", "false"):
            return raw.lower() == "true"
        raise ValueError(f"expected {EXPECTED[bool]}")
    if field.kind is str:
        if isinstance(raw, str) and _is_unicode(raw):
            return raw
        raise ValueError("expected text in quotes" if not isinstance(raw, str) else "is not valid Unicode text")
    return _parse_number(field.kind, raw)


def parse_typed(field: Field, value: object) -> Any:
    """As `parse_value`, for a value that has a type, in TOML or Python: a number in quotes is not one."""
    if value is None and field.optional:
        return None
    if isinstance(value, str) and field.kind in EXPECTED and not (field.optional and value == "none"):
        raise ValueError(f"expected {EXPECTED[field.kind]} without quotes")
    return parse_value(field, value)


def find_wrong_parts(config: Any) -> dict[str, str]:
    """Sections and variants of a config that are instances of another class, by name, and what was expected."""
    wrong: dict[str, str] = {}
    for name, hint in _read_hints(type(config)).items():
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        classes: tuple[type, ...] = tuple(list_variants(hint, name).values()) or ((hint,) if is_section else ())
        if isinstance(getattr(config, name), UnloadedPart):
            wrong[name] = "is a part of a plug-in that is not loaded; name it with --plugin"
        elif classes and isinstance(getattr(config, name), classes):
            wrong |= find_wrong_parts(getattr(config, name))
        elif classes:
            wrong[name] = f"expected {' or '.join(f'{each.__name__}(...)' for each in classes)}"
    return wrong


def find_wrong_types(config: Any) -> dict[str, str]:
    """Fields of a config whose values have the wrong type, by name, and what was expected: dataclasses check none."""
    cls: type = type(config)
    values, wrong = list_values(config), dict[str, str]()
    for field in list_fields(cls):
        value = values.get(field.name)
        if field.name not in values or (field.kind is float and isinstance(value, float)):
            continue  # of a variant that is not selected; or perhaps infinite, which is a matter of range
        try:
            parse_typed(field, value)
        except ValueError as error:
            wrong[field.name] = str(error)
    return wrong


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8; undecodable bytes from the shell cannot (surrogateescape)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_number(kind: type, raw: object) -> Any:
    expected = f"expected {EXPECTED[kind]}"
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError(expected)
    if kind is int and isinstance(raw, float):
        raise ValueError(expected)
    try:
        number = kind(raw)
    except (ValueError, OverflowError):
        raise ValueError(expected) from None
    if kind is int and not -MAX_INTEGER - 1 <= number <= MAX_INTEGER:
        raise ValueError("expected an integer of at most 64 bits")
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _split_hint(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """(type, choices, whether None is allowed) of an annotation."""
    optional = isinstance(hint, types.UnionType) or type(None) in get_args(hint)
    if optional:
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint), optional
    assert hint in (int, float, str, bool), hint
    return hint, (), optional


@cache
def _read_docstrings(cls: type) -> dict[str, str]:
    """The string literal after each field, read from the source: Python discards it."""
    docs = dict.fromkeys((item.name for item in dataclasses.fields(cls)), "")
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # a class of a plug-in may have no source
        return docs
    assert isinstance(node, ast.ClassDef)
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = str(following.value.value)
    return docs


clear_on_change(list_fields.cache_clear)

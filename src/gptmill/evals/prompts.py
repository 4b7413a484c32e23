"""Prompts: turns the records of a task into requests, by the task's templates.

The prompts are those of lm-evaluation-harness 0.4, so that results compare with published ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptmill.config.errors import UserError
from gptmill.evals.task import Task

Record = Mapping[str, Any]
PLACE = re.compile(r"\{([\w.]+(?:/[\w.]+)*)((?:\|\w+)*)\}")
BLANK = "_"


@dataclass(frozen=True)
class Request:
    """Asks how likely the continuation is after the context; an empty context is the beginning of a document."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Example:
    """One question of a task: a request for each choice, and which of them is right."""

    requests: tuple[Request, ...]
    answer: int
    lengths: tuple[int, ...]
    """The characters of each choice, without the delimiter."""
    group: str | None = None


class RecordError(UserError):
    """A record does not fit the task; the reader adds where the record is."""


def make_example(task: Task, record: Record) -> Example:
    """Raises RecordError if the record lacks what the task asks for."""
    group = None if task.group_by is None else str(find_value(record, task.group_by))
    make = {"multiple_choice": _make_choices, "last_word": _make_last_word, "minimal_pairs": _make_pair}[task.kind]
    requests, answer, lengths = make(task, record)
    return Example(requests, answer, lengths, group)


Parts = tuple[tuple[Request, ...], int, tuple[int, ...]]


def _make_choices(task: Task, record: Record) -> Parts:
    answer_to: tuple[str, ...]
    if isinstance(task.context, tuple):
        # The choices differ in the context, and one continuation follows each of them.
        contexts = [_fill(task, template, record) for template in task.context]
        continuation = _fill(task, task.continuation, record)
        requests = tuple(Request(context, task.delimiter + continuation) for context in contexts)
        answer_to = tuple(contexts)
    else:
        context = _fill(task, task.context, record)
        answer_to = _list_choices(task, record)
        requests = tuple(Request(context, task.delimiter + choice) for choice in answer_to)
    if len(requests) < 2:
        raise RecordError(f"has {len(requests)} choice; give at least 2")
    return requests, _find_answer(task, record, len(requests)), tuple(len(choice) for choice in answer_to)


def _make_last_word(task: Task, record: Record) -> Parts:
    words = _fill(task, task.text, record).split(" ")
    if len(words) < 2:
        raise RecordError("has a text without a space; a last word needs words before it")
    return (Request(" ".join(words[:-1]), task.delimiter + words[-1]),), 0, (len(words[-1]),)


def _make_pair(task: Task, record: Record) -> Parts:
    assert isinstance(task.context, str)
    context = _fill(task, task.context, record)
    sentences = [_fill(task, template, record) for template in (task.good, task.bad)]
    requests = tuple(Request(context, task.delimiter + sentence) for sentence in sentences)
    return requests, 0, tuple(len(sentence) for sentence in sentences)


def _list_choices(task: Task, record: Record) -> tuple[str, ...]:
    if isinstance(task.choices, tuple):
        return tuple(_fill(task, template, record) for template in task.choices)
    choices = find_value(record, task.choices)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise RecordError(f"has no list of texts in {task.choices}; name the field that lists the choices")
    return tuple(_clean(task, choice) for choice in choices)


def _find_answer(task: Task, record: Record, num_choices: int) -> int:
    found = find_value(record, task.answer)
    if task.labels:
        labels = find_value(record, task.labels) if isinstance(task.labels, str) else task.labels
        names = [str(label) for label in labels]
        if str(found).strip() in names:
            return names.index(str(found).strip())
        raise RecordError(f"has the answer {found!r}, which is none of its labels {', '.join(names)}")
    digits = str(int(found) if isinstance(found, bool) else found).strip()
    if digits.isdecimal() and int(digits) < num_choices:
        return int(digits)
    raise RecordError(f"has the answer {found!r}; it must be the number of a choice, 0 to {num_choices - 1}")


def _fill(task: Task, template: str, record: Record) -> str:
    def replace(match: re.Match[str]) -> str:
        value = find_value(record, match[1])
        if not isinstance(value, str | int | float):
            raise RecordError(f"has a {type(value).__name__} in {match[1]}, where the task needs a text")
        text = str(value)
        for name in match[2].split("|")[1:]:
            if name not in FILTERS:
                raise UserError(f"task {task.name}: unknown filter {name!r}; the filters are {', '.join(FILTERS)}")
            text = FILTERS[name](text)
        return text

    return _clean(task, PLACE.sub(replace, template))


def find_value(record: Record, paths: str) -> Any:
    """The value at the first of the paths a.b/c that exists; of a list, a name means that field of all its items."""
    for path in paths.split("/"):
        value = _follow(record, path.split("."))
        if value is not None:
            return value
    raise RecordError(f"lacks the field {paths.replace('/', ' or ')}; it has {', '.join(map(str, record)) or 'none'}")


def _follow(value: Any, names: list[str]) -> Any:
    """None where there is no such value."""
    for name in names:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, list) and all(isinstance(item, Mapping) and name in item for item in value):
            value = [item[name] for item in value]
        else:
            return None
    return value


def _clean(task: Task, text: str) -> str:
    return _remove_wikihow_marks(text) if task.cleaning == "wikihow" else text


def _remove_wikihow_marks(text: str) -> str:
    """HellaSwag's text from WikiHow holds marks in brackets: [title] begins a sentence, the others say nothing."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _split_blank(text: str) -> tuple[str, str]:
    before, blank, after = text.partition(BLANK)
    if not blank:
        raise RecordError(f"has no blank {BLANK} in {text!r}")
    return before, after


FILTERS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "capitalize": str.capitalize,
    "before_blank": lambda text: _split_blank(text)[0],
    "after_blank": lambda text: _split_blank(text)[1].strip(),
}

"""Tasks: what to ask a model and how to count its answers, each in a small TOML file. Knows neither data nor models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gptmill.config.errors import ConfigError, Problem, UserError, suggest
from gptmill.config.toml_text import read_toml

SHIPPED_TASKS = Path(str(resources.files("gptmill.evals"))) / "tasks"
COMMON_KEYS = ("title", "kind", "metrics", "group_by", "delimiter", "cleaning", "file", "member", "url", "sha256")
REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("answer",),
    "last_word": ("text",),
    "minimal_pairs": ("good", "bad"),
}
OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("context", "choices", "continuation", "labels", "answers_file"),
    "last_word": (),
    "minimal_pairs": ("context",),
}
METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm", "acc_token_mean"),
    "last_word": ("acc", "perplexity"),
    "minimal_pairs": ("acc",),
}
CLEANINGS = ("wikihow",)


@dataclass(frozen=True)
class Task:
    """A task. Its texts are templates with {field}, {field.inner}, {this/or.that} and {field|filter}."""

    name: str
    kind: str
    """multiple_choice, last_word or minimal_pairs."""
    metrics: tuple[str, ...]
    title: str = ""
    context: str | tuple[str, ...] = ""
    """What precedes; several with one `continuation` where the choices differ in the context."""
    choices: str | tuple[str, ...] = ()
    """The field that lists the choices, or the template of each."""
    continuation: str = ""
    answer: str = ""
    """The field with the right choice: its number from 0, or its label."""
    labels: str | tuple[str, ...] = ()
    """The choices' labels, or the field that lists them; without them the answer is a number."""
    answers_file: str | None = None
    """A file of answers beside the data, one per line: * stands for the name of the data file."""
    text: str = ""
    good: str = ""
    bad: str = ""
    delimiter: str = " "
    """Stands between context and continuation."""
    cleaning: str | None = None
    group_by: str | None = None
    """The field that names an example's group. Each group has results of its own, and weighs the same in the total."""
    file: str = ""
    """The data file's name, in a folder that is given and in the cache; of an own task, its path beside the TOML."""
    member: str | None = None
    """If the file is a zip archive: which of its files, as a pattern such as */dev.jsonl."""
    url: str | None = None
    sha256: str | None = None
    folder: Path | None = None
    """Of an own task: where its TOML lies."""


def list_tasks() -> dict[str, str]:
    """Titles of the shipped tasks by name."""
    return {path.stem: load_task_file(path).title for path in sorted(SHIPPED_TASKS.glob("*.toml"))}


def load_tasks(names: str) -> list[Task]:
    """The tasks of a list such as hellaswag,my_task.toml: shipped ones by name, own ones by the path of their TOML."""
    chosen = [name.strip() for name in names.split(",")]
    if twice := {name for name in chosen if chosen.count(name) > 1}:
        raise UserError(f"task {min(twice)} is given twice; name it once")
    return [load_task(name) for name in chosen]


def load_task(name: str) -> Task:
    if name.endswith(".toml"):
        return load_task_file(Path(name).expanduser())
    shipped = SHIPPED_TASKS / f"{name}.toml"
    known = [path.stem for path in sorted(SHIPPED_TASKS.glob("*.toml"))]
    if name not in known:
        raise UserError(
            f"unknown task {name!r}{suggest(name, known)}; the tasks are {', '.join(known)}, "
            "and a task of your own is the path of its .toml file"
        )
    return load_task_file(shipped)


def load_task_file(path: Path) -> Task:
    """Raises UserError if the file cannot be read or is no task."""
    values = read_toml(path, "task")
    if problems := find_problems(values):
        raise ConfigError([Problem(f"task {path}", problem) for problem in problems])
    lists: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    metrics = lists.pop("metrics", METRICS[values["kind"]])
    folder = None if path.parent == SHIPPED_TASKS else path.parent
    return Task(**lists, name=path.stem, metrics=metrics, folder=folder)


def find_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a task's keys and values; each a sentence with the fix."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in REQUIRED_KEYS:
        return [f"kind = {kind!r} must be one of {', '.join(REQUIRED_KEYS)}"]
    known = (*COMMON_KEYS, *REQUIRED_KEYS[kind], *OPTIONAL_KEYS[kind])
    problems = [
        f"unknown key {key!r}{suggest(key, known)}; a task of kind {kind} has {', '.join(known)}"
        for key in values
        if key not in known
    ]
    problems += [
        f"{key} is missing; a task of kind {kind} needs it" for key in REQUIRED_KEYS[kind] if key not in values
    ]
    problems += [problem for key, value in values.items() if (problem := find_type_problem(key, value))]
    if kind == "multiple_choice" and not problems:
        problems += find_choice_problems(values)
    return problems or find_name_problems(kind, values)


def find_type_problem(key: str, value: object) -> str | None:
    types = {field.name: str(field.type) for field in dataclasses.fields(Task)}
    if key not in types:
        return None  # and said to be unknown
    is_list = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    if isinstance(value, str) and key != "metrics":
        return None
    if is_list and "tuple" in types[key]:
        return None
    wanted = (
        "a list of texts" if key == "metrics" else "a text or a list of texts" if "tuple" in types[key] else "a text"
    )
    return f"{key} = {value!r} must be {wanted}"


def find_choice_problems(values: Mapping[str, Any]) -> list[str]:
    """Either the choices differ in the continuation, or in the context."""
    several_contexts = isinstance(values.get("context"), list)
    if several_contexts and ("continuation" not in values or "choices" in values):
        return ["context is a list, so the choices differ there: give one continuation, and no choices"]
    if not several_contexts and ("choices" not in values or "continuation" in values):
        return [
            "choices is missing: name the field that lists them, or list their templates; continuation goes with "
            "a list of contexts only"
        ]
    return []


def find_name_problems(kind: str, values: Mapping[str, Any]) -> list[str]:
    problems = [
        f"unknown metric {name!r}{suggest(name, METRICS[kind])}; a task of kind {kind} has {', '.join(METRICS[kind])}"
        for name in values.get("metrics", [])
        if name not in METRICS[kind]
    ]
    cleaning = values.get("cleaning")
    if cleaning is not None and cleaning not in CLEANINGS:
        problems.append(f"unknown cleaning {cleaning!r}; there is {', '.join(CLEANINGS)}")
    return problems

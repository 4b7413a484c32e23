"""Tasks in TOML: the shipped ones, the user's own, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.evals.task import SHIPPED_TASKS, list_tasks, load_task, load_tasks

OWN = """
kind = "multiple_choice"
context = "Q: {q}"
choices = ["{a}", "{b}"]
answer = "right"
file = "my.jsonl"
"""


def write(folder: Path, text: str) -> str:
    path = folder / "my_task.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_shipped_task_says_what_it_is_and_where_its_data_comes_from() -> None:
    for name, title in list_tasks().items():
        task = load_task(name)
        assert title == task.title != ""
        assert (task.url or "").startswith("https://")
        assert task.file
        assert task.folder is None
        assert len((SHIPPED_TASKS / f"{name}.toml").read_text(encoding="utf-8").splitlines()) < 25


def test_an_own_task_is_named_by_its_file(tmp_path: Path) -> None:
    own, shipped = load_tasks(f"{write(tmp_path, OWN)}, lambada")
    assert (own.name, own.folder, own.file) == ("my_task", tmp_path, "my.jsonl")
    assert own.metrics == ("acc", "acc_norm", "acc_token_mean")
    assert (shipped.name, shipped.metrics) == ("lambada", ("acc", "perplexity"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("helaswag", "unknown task 'helaswag' .did you mean hellaswag.*; the tasks are arc_challenge, "),
        ("", "unknown task ''"),
        ("lambada,lambada", "task lambada is given twice"),
        ("none.toml", "cannot read task none.toml: No such file"),
    ],
)
def test_a_wrong_name_is_answered(names: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("context", "contxt"), "unknown key 'contxt' .did you mean context"),
        (OWN.replace("multiple_choice", "quiz"), "kind = 'quiz' must be one of multiple_choice, last_word, minimal"),
        (OWN.replace("kind", "sort"), "kind = None must be one of"),
        (OWN.replace('answer = "right"', ""), "answer is missing"),
        (OWN.replace('answer = "right"', "answer = 1"), "answer = 1 must be a text"),
        (OWN.replace('choices = ["{a}", "{b}"]', ""), "choices is missing"),
        (OWN.replace('["{a}", "{b}"]', "[]"), "choices = .. must be a text or a list of texts"),
        (OWN + 'continuation = "c"', "continuation goes with a list of contexts"),
        (OWN.replace('"Q: {q}"', '["a", "b"]'), "context is a list"),
        (OWN + 'metrics = ["acc", "f1"]', "unknown metric 'f1'"),
        (OWN + 'metrics = "acc"', "metrics = 'acc' must be a list of texts"),
        (OWN + 'cleaning = "soap"', "unknown cleaning 'soap'; there is wikihow"),
        (OWN + "context =", "is not valid TOML"),
        ('kind = "last_word"\ntext = "{t}"\nanswer = "x"', "unknown key 'answer'"),
    ],
)
def test_a_wrong_file_is_answered_with_what_is_wrong_in_it(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_task(write(tmp_path, text))
    assert "my_task.toml" in str(caught.value)

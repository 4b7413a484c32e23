"""dump_toml: what it writes, load_recipe reads back to an equal config, whatever the values are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.config.recipes import list_recipes, load_recipe
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields, list_values
from gptmill.config.serialization import dump_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(min_value=-(10**12), max_value=10**12)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toml") / "dumped.toml"


def reload(config: RunConfig, path: Path, *, comments: bool = False) -> RunConfig:
    path.write_text(dump_toml(config, comments=comments), encoding="utf-8")
    return build_config(RunConfig, load_recipe(str(path)))


ODD_TEXTS = [
    'say "hi"',
    "it's",
    "two\nlines\r\n\ttabbed",
    "naïve 漢字 😀 \u2028 \u0085",
    "C:\\new\\table",
    'ends in \\"',
    "a # b",
    "[model]",
    "\x00\x1f\x7f",
    "",
    '"""',
    "'''",
]


@pytest.mark.parametrize("comments", [False, True])
def test_every_recipe_comes_back_equal(comments: bool, recipe_file: Path) -> None:
    for name in list_recipes():
        config = build_config(RunConfig, load_recipe(name))
        assert reload(config, recipe_file, comments=comments) == config, name


@pytest.mark.parametrize("comments", [False, True])
def test_odd_text_comes_back_equal(comments: bool, recipe_file: Path) -> None:
    for text in ODD_TEXTS:
        config = build_config(RunConfig, {"sample_prompt": text, "corpus": text, "logdir": text, "run_name": text})
        assert reload(config, recipe_file, comments=comments) == config, text


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    sample_prompt=TEXT,
    logdir=TEXT,
    max_lr=FLOAT,
    eps=FLOAT,
    seed=COUNT,
    max_steps=st.none() | COUNT,
    flag=st.booleans(),
)
def test_any_values_come_back_equal(recipe_file: Path, flag: bool, **values: Any) -> None:
    config = build_config(RunConfig, {**values, "compile": flag})
    assert reload(config, recipe_file) == config
    assert reload(config, recipe_file, comments=True) == config


def test_a_field_set_to_none_comes_back_none(recipe_file: Path) -> None:
    for name in [field.name for field in list_fields(RunConfig) if field.optional]:
        config = build_config(RunConfig, {name: None})
        assert reload(config, recipe_file) == config, name


def test_comments_hold_the_docstring_of_every_field() -> None:
    text = dump_toml(RunConfig(), comments=True)
    for field in list_fields(RunConfig):
        is_chosen = field.name in list_values(RunConfig())
        assert (f"# {field.help}\n" in text) == is_chosen, field.name
        assert (f"{field.name} " in text) or not is_chosen
    assert not any(field.help in dump_toml(RunConfig()) for field in list_fields(RunConfig))

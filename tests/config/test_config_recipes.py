"""Recipes: extends, precedence, and all problems in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.recipes import list_recipes, load_recipe, make_config
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def explain(path: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    return str(caught.value)


def test_defaults_yield_to_the_recipe_and_the_recipe_to_flags(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[model]\nnum_layers = 3\nnum_heads = 4\n")
    config = build_config(RunConfig, {**load_recipe(path), "num_heads": 6})
    assert config.model.num_layers == 3
    assert config.model.num_heads == 6
    assert config.model.embd_size == RunConfig().model.embd_size


def test_extends_follows_a_chain_of_relative_paths_to_a_shipped_recipe(tmp_path: Path) -> None:
    write(tmp_path / "base" / "top.toml", 'extends = "gpt2-124m"\n[model]\nnum_layers = 1\nembd_size = 48\n')
    write(tmp_path / "mid.toml", 'extends = "base/top.toml"\n[model]\nnum_layers = 2\n')
    path = write(tmp_path / "leaves" / "leaf.toml", 'extends = "../mid.toml"\n[model]\nnum_heads = 3\n')
    values = load_recipe(path)
    assert (values["num_layers"], values["embd_size"], values["num_heads"]) == (2, 48, 3)
    assert values["total_batch_size"] == load_recipe("gpt2-124m")["total_batch_size"]


def test_a_path_is_found_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "own" / "r.toml", "[training]\nseed = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("own/r.toml") == {"seed": 7}


def test_a_recipe_may_be_empty(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path / "r.toml", "")) == {}


def test_circular_extends_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write(tmp_path / "b.toml", 'extends = "./a.toml"\n')
    message = explain(str(tmp_path / "a.toml"))
    assert "circular" in message
    assert "a.toml" in message
    assert "b.toml" in message


def test_a_missing_parent_is_named_together_with_the_recipe_that_extends_it(tmp_path: Path) -> None:
    message = explain(write(tmp_path / "child.toml", 'extends = "parent.toml"\n'))
    assert "parent.toml" in message
    assert "child.toml" in message


def test_extends_must_be_text(tmp_path: Path) -> None:
    assert "extends = 3" in explain(write(tmp_path / "r.toml", "extends = 3\n"))


def test_an_unknown_recipe_suggests_the_nearest_and_lists_all() -> None:
    message = explain("gpt2-124n")
    assert "did you mean gpt2-124m?" in message
    assert all(name in message for name in list_recipes())


def test_an_unknown_key_suggests_the_nearest(tmp_path: Path) -> None:
    message = explain(write(tmp_path / "r.toml", "[model]\nnum_layer = 3\n"))
    assert "[model] num_layer: unknown key (did you mean num_layers?)" in message
    assert str(tmp_path / "r.toml") in message


def test_a_key_of_other_software_names_ours(tmp_path: Path) -> None:
    message = explain(write(tmp_path / "r.toml", "lr = 1.0\n[model]\nn_layer = 3\n[training]\nbatch_size = 2\n"))
    assert "r.toml: lr: unknown section; gptmill calls it max_lr" in message
    assert "[model] n_layer: unknown key; gptmill calls it num_layers" in message
    assert "[training] batch_size: unknown key; mini_batch_size is the sequences" in message


def test_an_unknown_section_suggests_the_nearest_and_lists_all(tmp_path: Path) -> None:
    message = explain(write(tmp_path / "r.toml", "[modle]\nnum_layers = 3\n"))
    assert "modle: unknown section (did you mean model?)" in message
    assert "[optimizer]" in message


def test_a_key_in_the_wrong_section_names_the_right_one(tmp_path: Path) -> None:
    text = "num_layers = 3\n[model]\nmax_lr = 1.0\n"
    message = explain(write(tmp_path / "r.toml", text))
    assert "num_layers belongs under [model]" in message
    assert "[model] max_lr: belongs under [optimizer]" in message


def test_a_section_that_is_not_a_table_is_not_called_unknown(tmp_path: Path) -> None:
    message = explain(write(tmp_path / "r.toml", "model = 3\n"))
    assert "model" in message
    assert "unknown section" not in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[model]\nnum_layers = 12.0", "a whole number"),
        ("[model]\nnum_layers = 'twelve'", "a whole number"),
        ("[model]\nnum_layers = true", "a whole number"),
        ("[optimizer]\nmax_lr = 'fast'", "a number"),
        ("[optimizer]\nmax_lr = 2024-01-01", "a number"),
        ("[machine]\ncompile = 1", "true or false"),
        ("[machine]\ndevice = 'gpu'", "one of auto, cuda, mps, cpu"),
        ("[evaluation]\nsample_prompt = 3", "text"),
        ("[model.num_layers]\nx = 3", "a whole number"),
    ],
)
def test_a_wrong_type_is_rejected_with_location_value_and_expectation(line: str, expected: str, tmp_path: Path) -> None:
    message = explain(write(tmp_path / "r.toml", line))
    assert expected in message
    assert str(tmp_path / "r.toml") in message
    assert line.split("\n")[0].strip("[]").split(".")[0] in message


def test_all_problems_of_a_recipe_are_reported_at_once(tmp_path: Path) -> None:
    text = "[modle]\nx = 1\n[model]\nnum_layer = 3\nmax_lr = 1.0\nnum_heads = 1.5\n[machine]\ndevice = 'gpu'\n"
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "r.toml", text))
    assert len(caught.value.problems) == 5
    assert "5 problems:" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 5


@pytest.mark.parametrize("content", [b"[model\nnum_layers = 3\n", b"\xff\xfe", b"x = 1\nx = 2\n"])
def test_invalid_toml_is_rejected_with_the_path(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(content)
    message = explain(str(tmp_path / "r.toml"))
    assert "not valid TOML" in message
    assert str(tmp_path / "r.toml") in message


def test_a_folder_is_not_taken_for_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.toml").mkdir()
    message = explain(str(tmp_path / "r.toml"))
    assert str(tmp_path / "r.toml") in message
    assert "does not exist" not in message


def test_a_corpus_flag_gets_its_own_data_dir() -> None:
    assert make_config("shakespeare-char-cpu", {}).data.data_dir == "data/shakespeare-char"
    assert make_config("shakespeare-char-cpu", {"corpus": "mine.txt"}).data.data_dir is None
    assert make_config("shakespeare-char-cpu", {"corpus": "mine.txt", "data_dir": "here"}).data.data_dir == "here"


@pytest.mark.parametrize("flag", ["data_dir", "mixture"])
def test_a_flag_for_prepared_data_replaces_the_recipes_corpus(flag: str) -> None:
    data = make_config("demo", {flag: "data/mine=1"}).data
    assert (data.corpus, data.tokenizer) == (None, None)
    assert getattr(data, flag) == "data/mine=1"


def test_none_unsets_its_own_field_and_leaves_the_choice_to_the_other_flags(tmp_path: Path) -> None:
    data = make_config("demo", {"corpus": None, "mixture": "data/a=1,data/b=1"}).data
    assert (data.corpus, data.tokenizer, data.mixture) == (None, None, "data/a=1,data/b=1")
    data = make_config("demo", {"corpus": None, "data_dir": "data/a", "tokenizer": "byte"}).data
    assert (data.corpus, data.tokenizer, data.data_dir) == (None, "byte", "data/a")
    both = write(tmp_path / "r.toml", '[data]\ncorpus = "a.txt"\ndata_dir = "data/a"\ntokenizer = "char"\n')
    data = make_config(both, {"data_dir": None}).data
    assert (data.corpus, data.tokenizer, data.data_dir) == ("a.txt", "char", None)

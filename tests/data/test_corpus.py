"""From a run's config to its shards: which folder, whether it is to be made, and never another corpus in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.run import DataConfig
from gptmill.data.corpus_preparation import find_data_dir, needs_preparing, prepare_for_run
from gptmill.data.shards.opening import open_shards


@pytest.fixture(autouse=True)
def _own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default folders are relative to where the user stands."""
    monkeypatch.chdir(tmp_path)


def prepare_if_needed(config: DataConfig) -> None:
    if needs_preparing(config):
        prepare_for_run(config, lambda _: None)


def read_text(config: DataConfig) -> str:
    shards = open_shards(find_data_dir(config), config.tokenizer)
    return shards.tokenizer.decode_bytes(np.concatenate([*shards.train, *shards.val]).tolist()).decode("utf-8")


def test_a_corpus_is_prepared_once_into_its_default_folder(text_file: Path) -> None:
    config = DataConfig(corpus=str(text_file), tokenizer="byte")
    assert find_data_dir(config) == "data/words-byte"
    assert needs_preparing(config)
    prepare_for_run(config, lambda _: None)
    assert not needs_preparing(config)
    assert read_text(config) == text_file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_gpt2_is_the_tokenizer_of_a_run_that_names_none(text_file: Path) -> None:
    config = DataConfig(corpus=str(text_file))
    prepare_if_needed(config)
    assert find_data_dir(config) == "data/words-gpt2"
    assert open_shards(find_data_dir(config)).tokenizer.name == "gpt2"


def test_data_dir_is_where_a_corpus_is_prepared(text_file: Path) -> None:
    config = DataConfig(corpus=str(text_file), data_dir="elsewhere/shards", tokenizer="char", val_fraction=0.3)
    assert needs_preparing(config)
    prepare_if_needed(config)
    shards = open_shards(Path("elsewhere/shards"), "char")
    assert shards.manifest.source["val_fraction"] == 0.3


def test_a_prepared_folder_needs_no_corpus(text_file: Path) -> None:
    prepare_if_needed(DataConfig(corpus=str(text_file), data_dir="shards", tokenizer="byte"))
    assert not needs_preparing(DataConfig(data_dir="shards"))


def test_neither_corpus_nor_folder_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"--corpus.*--data_dir"):
        find_data_dir(DataConfig())


def test_an_unprepared_folder_without_a_corpus_comes_with_the_command_that_makes_it() -> None:
    config = DataConfig(data_dir="data/books", tokenizer="char")
    with pytest.raises(UserError, match="gptmill prepare TEXT --tokenizer char --out data/books"):
        needs_preparing(config)


def test_the_folder_of_the_recipes_comes_with_the_command_that_downloads_fineweb_edu() -> None:
    config = make_config("custom-300m", {}).data
    command = "gptmill prepare fineweb-edu-10B --tokenizer gpt2 --val_fraction 0.05 --out data/edu_fineweb10B"
    with pytest.raises(UserError, match=rf"{command} \(downloads 28.5 GB\), or add --corpus TEXT"):
        needs_preparing(config)


def test_a_foreign_folder_is_never_prepared_into(text_file: Path) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="mine"):
        prepare_if_needed(DataConfig(corpus=str(text_file), data_dir="mine", tokenizer="byte"))
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("data_dir", [None, "shards"])
def test_a_run_never_reads_another_corpus_than_it_asks_for(data_dir: str | None) -> None:
    for author in ("austen", "melville"):
        Path(author).mkdir()
        Path(author, "input.txt").write_text(f"a book by {author}. " * 500)
    prepare_if_needed(DataConfig(corpus="austen/input.txt", data_dir=data_dir, tokenizer="byte"))
    config = DataConfig(corpus="melville/input.txt", data_dir=data_dir, tokenizer="byte")
    try:
        prepare_if_needed(config)
    except UserError:
        return  # refusing is as good as keeping the two apart
    assert "melville" in read_text(config)
    assert "austen" not in read_text(config)


def test_a_prepared_corpus_outlives_its_text(text_file: Path) -> None:
    config = DataConfig(corpus=str(text_file), tokenizer="byte")
    prepare_if_needed(config)
    text = text_file.read_text(encoding="utf-8")
    text_file.unlink()
    prepare_if_needed(config)
    assert read_text(config) == text

"""A stranger's folder of shards: whatever is in it, one sentence, at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_FLAGS, GptMill

from gptmill.config.errors import UserError
from gptmill.data.pipeline.journal import read_journal
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.scores import read_scores, score_by_length, write_scores
from gptmill.data.shards.shard_manifest import read_manifest
from gptmill.data.shards.verification import verify_corpus
from gptmill.data.tokenizers import build_tokenizer

TRAIN = ["train", "--data_dir", "words", "--max_steps", "1", *TINY_FLAGS]
SHARD = "train_000000.npy"


@pytest.fixture
def corpus(words: list[str], tmp_path: Path) -> Path:
    assert words
    return tmp_path / "words"


def refuse(gptmill: GptMill, *arguments: str) -> str:
    process = gptmill(*arguments, check=False)
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    return process.stderr


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


# Manifests


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_manifest_nested_deeply(depth: int, opening: str, closing: str, corpus: Path) -> None:
    path = corpus / "manifest.json"
    nested = opening * depth + "1" + closing * depth
    for content in (nested, path.read_text(encoding="utf-8").replace('"source": {', f'"source": {{"x": {nested}, ')):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            read_manifest(corpus)


def test_a_manifest_nested_deeply_ends_every_command_with_a_sentence(corpus: Path, gptmill: GptMill) -> None:
    (corpus / "manifest.json").write_text("[" * 100_000, encoding="utf-8")
    for command in (["data", "info", "words"], ["data", "verify", "words"], TRAIN):
        assert "words/manifest.json is damaged (ValueError: its values are nested" in refuse(gptmill, *command)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda content: content.update(source=[1]), "its source is not an object"),
        (lambda content: content.update(source="x"), "its source is not an object"),
        (lambda content: content.update(tokenizer=None), "its tokenizer is not an object"),
        (lambda content: content.update(cleaning=3), "its cleaning is not an object"),
        (lambda content: content.update(fingerprint={}), "its fingerprint is not text"),
        (lambda content: content["train"].update(tokens="many"), "its number of tokens is 'many'"),
        (lambda content: content["val"].update(documents=-1), "its number of documents is -1"),
        (lambda content: content["train"]["shards"][0].update(tokens=2**60), "its number of tokens is 11529"),
        (lambda content: content["train"]["shards"][0].update(file="../words/" + SHARD), "plain name of a file"),
        (lambda content: content["train"]["shards"][0].update(sha256=5), "the sha256 of a shard is not text"),
    ],
)
def test_a_manifest_of_wrong_types(edit: Callable[[dict[str, Any]], object], reason: str, corpus: Path) -> None:
    change(corpus, edit)
    with pytest.raises(UserError, match=reason):
        read_manifest(corpus)


def test_info_of_a_strange_source_or_report(corpus: Path, gptmill: GptMill) -> None:
    change(corpus, lambda content: content["source"].update({"a": {"b": {"c": [1, "\x1b[31m"], "d": None, "e": True}}}))
    output = gptmill("data", "info", "words").stdout
    assert "  a.b.c: [1, '\\x1b[31m']\n  a.b.e\n" in output
    assert "{" not in output
    change(corpus, lambda content: content.update(cleaning={"dropped": 5}))
    assert "cleaning report of words is damaged" in refuse(gptmill, "data", "info", "words")


# Other JSON


def test_other_json_nested_deeply(corpus: Path, tmp_path: Path) -> None:
    deep = "[" * 100_000
    shards = open_shards(corpus)
    write_scores(corpus, "length", score_by_length(shards))
    (corpus / "scores" / "length.json").write_text(deep, encoding="utf-8")
    with pytest.raises(UserError, match=r"length\.npy is damaged"):
        read_scores(shards, "length")
    (tmp_path / "journal.json").write_text(deep, encoding="utf-8")
    assert read_journal(tmp_path, {}) is None
    (tmp_path / "tokenizer.json").write_text(deep, encoding="utf-8")
    with pytest.raises(UserError, match=r"is not a valid tokenizer\.json"):
        build_tokenizer(str(tmp_path / "tokenizer.json"), ())


# Files that are none


def put_pipe(file: Path) -> None:
    os.mkfifo(file)


def put_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


KINDS = [(put_pipe, "a pipe"), (put_device, "a device"), (Path.mkdir, "a folder")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(("put", "kind"), KINDS, ids=[kind for _, kind in KINDS])
@pytest.mark.parametrize(
    "name", ["manifest.json", SHARD, f"documents/{SHARD}", "origins/names.json", f"origins/{SHARD}"]
)
def test_what_is_no_plain_file_is_not_opened(
    put: Callable[[Path], None], kind: str, name: str, corpus: Path, gptmill: GptMill
) -> None:
    (corpus / name).unlink()
    put(corpus / name)
    commands = [["data", "show", "words"]]
    if not name.startswith("origins"):
        commands += [["data", "verify", "words"], TRAIN]
    for command in commands:
        assert f"it is {kind}, not a regular file" in refuse(gptmill, *command)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_a_shard_may_be_a_link(corpus: Path, tmp_path: Path) -> None:
    (corpus / SHARD).rename(tmp_path / "elsewhere.npy")
    (corpus / SHARD).symlink_to("../elsewhere.npy")
    assert verify_corpus(corpus, lambda _done, _total: None) == []

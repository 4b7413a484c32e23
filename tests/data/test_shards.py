"""Shards: windows hold the raw tokens of their place, and a folder that is not whole is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards import SplitWindows, open_shards

Content = dict[str, Any]


@pytest.fixture
def folder(text_file: Path, tmp_path: Path) -> Path:
    """A corpus of several shards."""
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="char", shard_tokens=1000)
    return prepare_corpus([str(text_file)], request, lambda _: None)[0]


def change_manifest(folder: Path, change: Callable[[Content], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def list_windows(arrays: tuple[np.ndarray, ...], context_length: int) -> list[list[int]]:
    """All windows in order, each with the token after it, cut out the plain way."""
    return [
        array[start : start + context_length + 1].tolist()
        for array in arrays
        for start in range(0, len(array) - context_length, context_length)
    ]


def test_opened_shards_hold_the_corpus(folder: Path, text_file: Path) -> None:
    shards = open_shards(folder, "char")
    assert len(shards.train) > 20
    ids = np.concatenate([*shards.train, *shards.val]).tolist()
    assert shards.tokenizer.decode_bytes(ids).decode("utf-8") == text_file.read_text(encoding="utf-8")
    assert all(isinstance(array, np.memmap) for array in (*shards.train, *shards.val))


def test_windows_of_all_shards_are_the_raw_tokens_at_their_places(folder: Path) -> None:
    shards = open_shards(folder)
    for context_length in (1, 7, 16, 999):
        windows = shards.cut(shards.train, context_length)
        expected = list_windows(shards.train, context_length)
        assert windows.num_windows == len(expected)
        assert windows.read(np.arange(len(expected))).tolist() == expected


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), context_length=st.integers(1, 12), data=st.data())
@settings(deadline=None)
def test_windows_can_be_read_in_any_order(lengths: list[int], context_length: int, data: st.DataObject) -> None:
    everything = np.arange(sum(lengths), dtype=np.uint16)
    arrays = tuple(np.split(everything, np.cumsum(lengths)[:-1]))
    windows = SplitWindows(arrays, context_length, vocab_size=1 << 16)
    expected = list_windows(arrays, context_length)
    assert windows.num_windows == len(expected)
    if expected:
        chosen = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20))
        assert windows.read(np.array(chosen, dtype=np.int64)).tolist() == [expected[number] for number in chosen]


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    array = np.array([0, 1, 2, 3, 4, 5, 6], dtype=np.uint16)
    assert SplitWindows((array,), 2, vocab_size=7).read(np.arange(3)).max() == 6
    windows = SplitWindows((array,), 2, vocab_size=6)
    assert windows.read(np.arange(2)).max() == 4
    with pytest.raises(UserError, match="token 6"):
        windows.read(np.arange(3))


@pytest.mark.parametrize("kept", [0, 3, 9, 100, 128, -2])
def test_a_truncated_shard_is_named(folder: Path, kept: int) -> None:
    path = folder / "train_000001.npy"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"train_000001\.npy"):
        open_shards(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "val_000000.npy").unlink()
    with pytest.raises(UserError, match=r"val_000000\.npy"):
        open_shards(folder)


@pytest.mark.parametrize(
    "array",
    [np.zeros(1000, dtype=np.int64), np.zeros(999, dtype=np.uint16), np.zeros((10, 100), dtype=np.uint16)],
    ids=["type", "length", "shape"],
)
def test_a_shard_that_is_not_what_the_manifest_says_is_named(folder: Path, array: np.ndarray) -> None:
    np.save(folder / "train_000002.npy", array)
    with pytest.raises(UserError, match=r"train_000002\.npy"):
        open_shards(folder)


def test_a_shard_with_python_objects_is_never_loaded(folder: Path) -> None:
    np.save(folder / "train_000000.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"train_000000\.npy"):
        open_shards(folder)


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*manifest\.json"):
        open_shards(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", '{"format": "gptm', "[]", "null", '"text"', "{}", '{"format": "other"}'])
def test_a_manifest_that_is_torn_or_foreign_is_named(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=2),
        lambda content: content.pop("version"),
        lambda content: content.pop("dtype"),
        lambda content: content.pop("val"),
        lambda content: content.update(train=[]),
        lambda content: content["train"]["shards"][0].pop("sha256"),
        lambda content: content.update(more=1),
        lambda content: content.update(dtype="uint17"),
        lambda content: content["tokenizer"].pop("alphabet"),
        lambda content: content.update(tokenizer=None),
    ],
    ids=["version", "no_version", "no_dtype", "no_val", "split", "shard", "more", "dtype", "alphabet", "tokenizer"],
)
def test_a_manifest_that_this_version_cannot_read_is_named(folder: Path, change: Callable[[Content], object]) -> None:
    change_manifest(folder, change)
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(folder)


def test_a_tokenizer_that_this_version_does_not_know_is_named_with_its_folder(folder: Path) -> None:
    change_manifest(folder, lambda content: content["tokenizer"].update(name="klingon"))
    with pytest.raises(UserError, match="klingon") as caught:
        open_shards(folder)
    assert str(folder) in str(caught.value)


def test_shards_of_another_tokenizer_than_asked_for_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"gpt2.*char") as caught:
        open_shards(folder, "gpt2")
    assert str(folder) in str(caught.value)


def test_a_tokenizer_that_is_no_longer_the_same_is_noticed(folder: Path) -> None:
    change_manifest(folder, lambda content: content["tokenizer"].update(alphabet="abc", vocab_size=4))
    with pytest.raises(UserError, match="tokenizer mismatch") as caught:
        open_shards(folder)
    assert str(folder) in str(caught.value)

"""Shards: windows hold the raw tokens of their range, and an incomplete folder is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import read_windows

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import SplitWindows, holds_shards, open_shards

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


def list_windows(arrays: Sequence[np.ndarray], context_length: int) -> list[list[int]]:
    """All windows in order, each with the token after it: the reference implementation."""
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
    assert len(shards.train) == len(shards.train_starts)
    assert not any(array.flags.writeable for array in (*shards.train, *shards.val))


def test_windows_of_all_shards_are_the_raw_tokens_at_their_positions(folder: Path) -> None:
    shards = open_shards(folder)
    for context_length in (1, 7, 16, 999):
        windows = shards.cut(shards.train, context_length)
        expected = list_windows(shards.train, context_length)
        assert windows.num_windows == len(expected)
        assert read_windows(windows, np.arange(len(expected))).tolist() == expected


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), context_length=st.integers(1, 12), data=st.data())
@settings(deadline=None)
def test_windows_can_be_read_in_any_order(lengths: list[int], context_length: int, data: st.DataObject) -> None:
    everything = np.arange(sum(lengths), dtype=np.uint16)
    arrays = tuple(np.split(everything, np.cumsum(lengths)[:-1]))
    windows = SplitWindows(arrays, context_length)
    expected = list_windows(arrays, context_length)
    assert windows.num_windows == len(expected)
    if expected:
        chosen = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20))
        assert read_windows(windows, np.array(chosen, dtype=np.int64)).tolist() == [
            expected[number] for number in chosen
        ]


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), context_length=st.integers(1, 12))
@settings(deadline=None)
def test_locating_a_window_gives_its_shard_and_position(lengths: list[int], context_length: int) -> None:
    everything = np.arange(sum(lengths), dtype=np.uint16)
    arrays = tuple(np.split(everything, np.cumsum(lengths)[:-1]))
    windows = SplitWindows(arrays, context_length)
    numbers = np.arange(windows.num_windows)
    shards, starts = windows.locate(numbers)
    located = [arrays[shard][start] for shard, start in zip(shards, starts, strict=True)]
    assert located == [window[0] for window in list_windows(arrays, context_length)]


def test_a_token_outside_the_vocabulary_is_refused_with_its_position() -> None:
    arrays = (np.zeros(9, dtype=np.uint16), np.array([0, 1, 2, 3, 4, 5, 6], dtype=np.uint16))
    windows = SplitWindows(arrays, 2)
    assert read_windows(windows, np.arange(7), vocab_size=7).max() == 6
    assert read_windows(windows, np.arange(6), vocab_size=6).max() == 4
    with pytest.raises(UserError, match=r"shard 1 at position 6 holds token 6"):
        read_windows(windows, np.array([6, 0, 5]), vocab_size=6)


def test_a_token_outside_the_vocabulary_is_refused_with_its_file(folder: Path) -> None:
    shards = open_shards(folder)
    windows = shards.cut(shards.train, 16)
    with pytest.raises(UserError, match=r"train_000001\.npy at position \d+ holds token \d+.*vocabulary of 3"):
        read_windows(windows, windows.counts[:1], vocab_size=3)


def test_starts_are_where_documents_begin(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number} " * (number % 7 + 1))
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="byte", shard_tokens=100, val_fraction=0.2)
    shards = open_shards(prepare_corpus([str(texts)], request, lambda _: None)[0])
    assert len(shards.train) > 5
    for arrays, all_starts, split in (
        (shards.train, shards.train_starts, shards.manifest.train),
        (shards.val, shards.val_starts, shards.manifest.val),
    ):
        assert sum(len(starts) for starts in all_starts) == split.documents
        for array, starts in zip(arrays, all_starts, strict=True):
            assert starts.dtype == np.int64
            assert starts.tolist() == np.flatnonzero(array == shards.tokenizer.end_of_text).tolist()


def test_more_shards_than_files_may_be_open_at_once(folder: Path) -> None:
    """In a process with a low limit of open files; every array is opened twice."""
    script = f"""
import resource
from pathlib import Path
import numpy as np
from gptmill.data.shards.opening import open_shards
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
shards = open_shards(Path({str(folder)!r}))
assert len(shards.train) > 24
kept = [array[:5] for array in shards.train[:4]]
assert [len(array) for array in shards.train] == [len(array) for array in shards.train] == list(shards.train.lengths)
assert all(np.array_equal(piece, array[:5]) for piece, array in zip(kept, shards.train))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_slice_of_the_shards_is_a_tuple_of_arrays(folder: Path) -> None:
    shards = open_shards(folder)
    assert [array.tolist() for array in shards.train[1:3]] == [shards.train[1].tolist(), shards.train[2].tolist()]
    assert shards.train[-1].tolist() == shards.train[len(shards.train) - 1].tolist()
    with pytest.raises(IndexError):
        shards.train[len(shards.train)]


# Changes after preparing


def make_younger_than_manifest(path: Path) -> None:
    folder = path.parent if (path.parent / "manifest.json").exists() else path.parent.parent
    later = (folder / "manifest.json").stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("name", ["train_000003.npy", "val_000000.npy", "documents/train_000000.npy"])
def test_a_file_that_changed_after_preparing_is_named(folder: Path, name: str) -> None:
    open_shards(folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    make_younger_than_manifest(path)
    with pytest.raises(UserError, match=rf"{name} changed after it was prepared.*gptmill data verify"):
        open_shards(folder)
    with pytest.raises(UserError, match=name):  # and again, until it is repaired
        open_shards(folder)


def test_a_copied_corpus_is_hashed_once_and_then_trusted(folder: Path) -> None:
    manifest = folder / "manifest.json"
    files = [*folder.glob("*.npy"), *folder.glob("documents/*.npy")]
    os.utime(manifest, ns=(0, 0))
    reports: list[tuple[int, int]] = []
    open_shards(folder, report=lambda done, total: reports.append((done, total)))
    total_bytes = sum(path.stat().st_size for path in files)
    assert reports[-1] == (total_bytes, total_bytes)
    assert len(reports) == len(files)
    assert manifest.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in files)
    open_shards(folder, report=lambda *_: pytest.fail("hashed again"))


def test_a_shard_that_is_deleted_while_open_is_named(folder: Path) -> None:
    shards = open_shards(folder)
    (folder / "train_000004.npy").unlink()
    with pytest.raises(UserError, match=r"train_000004\.npy"):
        shards.train[4]


# Damage


@pytest.mark.parametrize("kept", [0, 3, 9, 100, 128, -2])
def test_a_truncated_shard_is_named(folder: Path, kept: int) -> None:
    path = folder / "train_000001.npy"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"train_000001\.npy"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["val_000000.npy", "documents/train_000001.npy"])
def test_a_missing_shard_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
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
    assert not holds_shards(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere.*manifest\.json"):
        open_shards(tmp_path / "nowhere")


def test_a_corpus_without_its_manifest_is_not_mistaken_for_an_external_format(folder: Path) -> None:
    assert holds_shards(folder)
    (folder / "manifest.json").unlink()
    assert not holds_shards(folder)
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(folder)


@pytest.mark.parametrize("content", ["", '{"format": "gptm', "[]", "null", '"text"', "{}", '{"format": "other"}'])
def test_a_damaged_or_unknown_manifest_is_named(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=1),
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


def test_a_tokenizer_that_has_changed_is_detected(folder: Path) -> None:
    change_manifest(folder, lambda content: content["tokenizer"].update(alphabet="abc", vocab_size=4))
    with pytest.raises(UserError, match="tokenizer mismatch") as caught:
        open_shards(folder)
    assert str(folder) in str(caught.value)

"""Verification finds every kind of damage, names it, and finds nothing in an intact corpus."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.files import hash_file
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards import verification
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.passages import SplitReader
from gptmill.data.shards.shard_manifest import NAMES_NAME, ORIGINS_DIR
from gptmill.data.shards.verification import verify_corpus, verify_portion


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Several shards of several documents, each read in several blocks."""
    monkeypatch.setattr(verification, "BLOCK_BYTES", 256)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02}.txt").write_text(f"this is text {number} " * (number % 7 + 1))
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="byte", shard_tokens=1000, val_fraction=0.2)
    return prepare_corpus([str(texts)], request, lambda _: None)[0]


def verify(folder: Path, tokenizer: str | None = None) -> list[str]:
    return verify_corpus(folder, lambda *_: None, tokenizer)


def test_an_intact_corpus_has_no_problems_and_progress_reaches_the_end(folder: Path) -> None:
    reports: list[tuple[int, int]] = []
    assert verify_corpus(folder, lambda done, total: reports.append((done, total))) == []
    assert reports[-1][0] == reports[-1][1] > 0
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert len({total for _, total in reports}) == 1


FILES = [
    "train_000000.npy",
    "val_000000.npy",
    "documents/train_000001.npy",
    "origins/val_000000.npy",
    f"origins/{NAMES_NAME}",
]


def flip_bit(path: Path, index: int) -> None:
    """Keeps the file's time, as a failing disk does."""
    content, times = bytearray(path.read_bytes()), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    content[index] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=times)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("index", [-1, 140])
def test_a_flipped_bit_is_found_anywhere(folder: Path, name: str, index: int) -> None:
    flip_bit(folder / name, index)
    problems = verify(folder)
    assert any(name in problem and "SHA-256" in problem for problem in problems)


@pytest.mark.parametrize("portion_bytes", [1, verification.PORTION_BYTES])
def test_every_file_that_training_reads_is_verified_within_a_cycle_of_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, portion_bytes: int
) -> None:
    monkeypatch.setattr(verification, "PORTION_BYTES", portion_bytes)
    corpora = [open_shards(folder)]
    shards = sorted(path.name for path in folder.glob("*.npy"))
    turns = range(7, 7 + (len(shards) if portion_bytes == 1 else 1))

    def list_refused() -> list[str]:
        refused = []
        for turn in turns:
            try:
                verify_portion(corpora, turn)
            except UserError as error:
                refused.append(str(error))
        return refused

    assert list_refused() == []
    for name in [*shards, "documents/train_000001.npy"]:
        flip_bit(folder / name, -1)
        (refused,) = list_refused()
        assert f"{name} changed after it was prepared" in refused
        flip_bit(folder / name, -1)


@pytest.mark.parametrize("name", ["train_000000.npy", NAMES_NAME])
def test_no_source_is_shown_that_a_damaged_file_names(folder: Path, name: str) -> None:
    flip_bit(folder / ORIGINS_DIR / name, -2)
    reader = SplitReader(open_shards(folder), "train")
    with pytest.raises(UserError, match=rf"{name} is damaged .*SHA-256"):
        reader.read(0, 0, 1)


def test_a_corpus_of_a_version_without_checksums_of_origins_is_read(folder: Path) -> None:
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["names_sha256"]
    for shard in [*content["train"]["shards"], *content["val"]["shards"]]:
        del shard["origins_sha256"]
    manifest.write_text(json.dumps({**content, "version": 2}))
    assert verify(folder) == []
    (extract,) = SplitReader(open_shards(folder), "train").read(0, 0, 1)
    assert str(extract.origin).endswith(".txt")


def change_array(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Changes an array and writes its new checksum to the manifest, so that only the content reveals it."""
    path = folder / name
    array = np.load(path)
    change(array)
    np.save(path, array)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    for shard in [*content["train"]["shards"], *content["val"]["shards"]]:
        if shard["file"] == path.name:
            shard["documents_sha256" if name.startswith("documents") else "sha256"] = hash_file(path)
    manifest.write_text(json.dumps(content))


def test_a_token_outside_the_vocabulary_is_reported_with_its_position(folder: Path) -> None:
    change_array(folder, "train_000001.npy", lambda array: array.__setitem__([777, 900], 300))
    (problem,) = verify(folder)
    assert problem.endswith("train_000001.npy holds token 300 at position 777, outside the vocabulary of 257")


@pytest.mark.parametrize(
    "change",
    [
        lambda starts: starts.__setitem__(2, starts[2] + 1),
        lambda starts: starts.__setitem__(slice(2, 4), starts[[3, 2]]),
        lambda starts: starts.__setitem__(-1, starts[-1] + 1),
    ],
    ids=["moved", "not_ascending", "last"],
)
def test_documents_that_do_not_start_where_they_should_are_found(folder: Path, change: Callable[..., Any]) -> None:
    change_array(folder, "documents/train_000001.npy", change)
    (problem,) = verify(folder)
    assert "documents/train_000001.npy" in problem
    assert "do not start" in problem


def test_an_unlisted_document_is_found(folder: Path) -> None:
    last = np.load(folder / "documents/train_000001.npy")[-1]
    change_array(folder, "train_000001.npy", lambda array: array.__setitem__(last, 65))
    (problem,) = verify(folder)
    assert "train_000001.npy" in problem
    change_array(folder, "train_000001.npy", lambda array: array.__setitem__([last, 999], 256))
    assert len(verify(folder)) == 1


@pytest.mark.parametrize("field", ["tokens", "documents"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_wrong_totals_are_found(folder: Path, split: str, field: str) -> None:
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content[split][field] += 1
    manifest.write_text(json.dumps(content))
    (problem,) = verify(folder)
    assert "manifest.json" in problem
    assert split in problem


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    (folder / "train_000000.npy").unlink()
    (folder / "documents" / "train_000001.npy").unlink()
    path = folder / "val_000000.npy"
    path.write_bytes(path.read_bytes()[:-2])
    problems = verify(folder)
    assert len(problems) == 3
    for name in ("train_000000.npy", "documents/train_000001.npy", "val_000000.npy"):
        assert sum(name in problem for problem in problems) == 1


def test_a_folder_that_is_no_corpus_is_a_problem(tmp_path: Path) -> None:
    (problem,) = verify(tmp_path)
    assert "manifest.json" in problem


def test_external_formats_are_checked_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BLOCK_BYTES", 256)
    for name in ("train.bin", "val.bin"):
        np.arange(1000, dtype=np.uint16).tofile(tmp_path / name)
    assert verify(tmp_path) == []
    problems = verify(tmp_path, "byte")
    assert [problem.partition(",")[0] for problem in problems] == [
        f"{tmp_path / name} holds token 257 at position 257" for name in ("train.bin", "val.bin")
    ]
    (tmp_path / "val.bin").write_bytes(b"abc")
    (problem,) = verify(tmp_path)
    assert "val.bin" in problem

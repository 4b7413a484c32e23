"""External token formats are read in place, and distinguished from files that only look like them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reading import read_windows

from gptmill.config.errors import UserError
from gptmill.data.shards.opening import TokenShards, holds_shards, open_shards

END_OF_TEXT = 50256
Write = Callable[[Path, np.ndarray], None]


def make_tokens(seed: int, size: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, END_OF_TEXT + 1, size).astype(np.uint16)


def write_raw(path: Path, tokens: np.ndarray) -> None:
    tokens.tofile(path)


def write_llmc(path: Path, tokens: np.ndarray, magic: int = 20240520, version: int = 1, excess: int = 0) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) + excess
    path.write_bytes(header.tobytes() + tokens.tobytes())


LAYOUTS: dict[str, tuple[Write, list[str], list[str]]] = {
    "nanoGPT": (write_raw, ["train.bin"], ["val.bin"]),
    "llm.c": (write_llmc, ["tiny_shakespeare_train.bin"], ["tiny_shakespeare_val.bin"]),
    "modded-nanogpt": (
        write_llmc,
        ["fineweb_train_000001.bin", "fineweb_train_000002.bin"],
        ["fineweb_val_000000.bin"],
    ),
    "build-nanogpt": (
        np.save,
        ["edufineweb_train_000001.npy", "edufineweb_train_000002.npy", "edufineweb_train_000010.npy"],
        ["edufineweb_val_000000.npy"],
    ),
}


def write_layout(folder: Path, layout: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    write, train, val = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    written = {name: make_tokens(seed) for seed, name in enumerate([*train, *val])}
    for name, tokens in reversed(written.items()):
        write(folder / name, tokens)
    return [written[name] for name in train], [written[name] for name in val]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_tokens_are_read_in_place(layout: str, tmp_path: Path) -> None:
    train, val = write_layout(tmp_path, layout)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "README.md").write_text("training data")
    (tmp_path / "retrieval.bin").write_bytes(b"trained on the interval")
    assert holds_shards(tmp_path)
    shards = open_shards(tmp_path)
    assert shards.tokenizer.name == "gpt2"
    assert [array.tolist() for array in shards.train] == [array.tolist() for array in train]
    assert [array.tolist() for array in shards.val] == [array.tolist() for array in val]
    assert shards.manifest.train.tokens == sum(map(len, train))
    windows = shards.cut(shards.train, 64)
    assert read_windows(windows, np.array([windows.num_windows - 1])).shape == (1, 65)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before


def test_documents_are_found_by_end_of_text(layout: str, tmp_path: Path) -> None:
    train, _ = write_layout(tmp_path, layout)
    train[-1][[7, 300]] = END_OF_TEXT
    write, names, _ = LAYOUTS[layout]
    write(tmp_path / names[-1], train[-1])
    shards = open_shards(tmp_path)
    assert shards.train_starts[-1].tolist() == np.flatnonzero(train[-1] == END_OF_TEXT).tolist()
    assert shards.train_starts[-1].dtype == np.int64


def open_identity(folder: Path) -> str:
    return open_shards(folder).manifest.corpus_sha256


@pytest.mark.slow
def test_another_corpus_has_another_identity(layout: str, tmp_path: Path) -> None:
    train, _ = write_layout(tmp_path, layout)
    write, names, _ = LAYOUTS[layout]
    identity = open_identity(tmp_path)
    assert open_identity(tmp_path) == identity
    write(tmp_path / names[0], train[0][::-1])
    changed = open_identity(tmp_path)
    write(tmp_path / names[0], train[0][:-1])
    assert len({identity, changed, open_identity(tmp_path)}) == 3


def test_llama_3_s_tokens_take_four_bytes_and_need_their_tokenizer_named(tmp_path: Path) -> None:
    tokens = np.array([0, 1, 256, 2, 256], dtype=np.uint32)
    for name in ("x_train.bin", "x_val.bin"):
        write_llmc(tmp_path / name, tokens, magic=20240801, version=7)
    with pytest.raises(UserError, match=r"Llama 3.*--tokenizer"):
        open_shards(tmp_path)
    shards = open_shards(tmp_path, "byte")
    assert shards.manifest.dtype == "uint32"
    assert shards.train[0].tolist() == tokens.tolist()
    assert shards.train_starts[0].tolist() == [2, 4]


def test_bytes_as_tokens_can_be_asked_for(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        write_raw(tmp_path / name, np.frombuffer(b"hello", dtype=np.uint8).astype(np.uint16))
    shards = open_shards(tmp_path, "byte")
    assert shards.tokenizer.decode_bytes(shards.train[0].tolist()) == b"hello"


def test_tokens_of_another_vocabulary_are_detected_when_read(tmp_path: Path) -> None:
    write_layout(tmp_path, "nanoGPT")
    shards = open_shards(tmp_path, "byte")
    with pytest.raises(UserError, match=r"train\.bin at position .* holds token.*tokenizer"):
        read_windows(shards.cut(shards.train, 64), np.arange(4), shards.tokenizer.vocab_size)


class Trap:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, ("sprung",)


def test_a_pickled_vocabulary_is_refused_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_layout(tmp_path, "nanoGPT")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    for tokenizer in (None, "gpt2", "char"):
        with pytest.raises(UserError, match=r"meta\.pkl.*gptmill prepare TEXT --tokenizer char"):
            open_shards(tmp_path, tokenizer)
    assert not (tmp_path / "sprung").exists()


def test_an_alphabet_cannot_be_guessed(tmp_path: Path) -> None:
    write_layout(tmp_path, "nanoGPT")
    with pytest.raises(UserError, match=r"characters.*gptmill prepare"):
        open_shards(tmp_path, "char")


def refuse(folder: Path, write: Callable[[Path], object], name: str = "x_val.bin") -> str:
    write_llmc(folder / "x_train.bin", make_tokens(0))
    write(folder / name)
    with pytest.raises(UserError) as caught:
        open_shards(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: write_llmc(path, make_tokens(1), magic=20240522), "starts with 20240522"),
        (lambda path: write_raw(path, make_tokens(1)), "starts with"),
        (lambda path: write_llmc(path, make_tokens(1), version=2), "version 2, not 1"),
        (lambda path: write_llmc(path, make_tokens(1), excess=1), "implies 5,001 tokens in 11,026 bytes"),
        (lambda path: write_llmc(path, make_tokens(1), excess=-1), "4,999 tokens"),
        (lambda path: path.write_bytes(b"\x88\xd8\x34\x01"), "version 0"),
        (lambda path: path.write_bytes(b""), "starts with 0"),
        (lambda path: write_llmc(path, make_tokens(1)[:0]), "no token"),
    ],
    ids=["eval", "no_header", "version", "short", "long", "torn", "empty", "no_tokens"],
)
def test_a_file_that_is_not_what_its_header_says_is_named(
    write: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    message = refuse(tmp_path, write)
    assert "x_val.bin" in message
    assert reason in message


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_an_odd_number_of_bytes_is_detected(name: str, tmp_path: Path) -> None:
    write_layout(tmp_path, "nanoGPT")
    (tmp_path / name).write_bytes(b"abc")
    with pytest.raises(UserError, match=rf"{name}.*2 bytes for each token.*3"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    "array",
    [np.zeros(9, dtype=np.int64), np.zeros((3, 3), dtype=np.uint16), np.array([{"a": 1}], dtype=object)],
    ids=["type", "shape", "objects"],
)
def test_an_npy_file_that_holds_no_tokens_is_named(array: np.ndarray, tmp_path: Path) -> None:
    write_layout(tmp_path, "build-nanogpt")
    np.save(tmp_path / "edufineweb_val_000000.npy", array)
    with pytest.raises(UserError, match=r"edufineweb_val_000000\.npy"):
        open_shards(tmp_path)


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_newer_npy_headers_are_read_too(version: tuple[int, int], tmp_path: Path) -> None:
    train, _ = write_layout(tmp_path, "build-nanogpt")
    with (tmp_path / "edufineweb_train_000001.npy").open("wb") as file:
        np.lib.format.write_array(file, train[0], version=version)
    assert open_shards(tmp_path).train[0].tolist() == train[0].tolist()


def test_only_the_validation_split_may_be_missing(layout: str, tmp_path: Path) -> None:
    train, _ = write_layout(tmp_path, layout)
    for path in tmp_path.glob("*val*"):
        path.unlink()
    shards = open_shards(tmp_path)
    assert [array.tolist() for array in shards.train] == [array.tolist() for array in train]
    assert (shards.manifest.val.tokens, list(shards.val)) == (0, [])
    for path in tmp_path.glob("*train*"):
        path.rename(path.with_name(path.name.replace("train", "val")))
    with pytest.raises(UserError, match="'train'"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("write", "name"), [(np.save, "x_val.npy"), (write_raw, "val.bin")], ids=["npy_and_bin", "raw_and_header"]
)
def test_files_of_several_formats_are_not_mixed(write: Write, name: str, tmp_path: Path) -> None:
    message = refuse(tmp_path, lambda path: write(path, make_tokens(1)), name)
    assert "several formats" in message
    assert name in message
    assert "x_train.bin" in message


def test_tokens_of_several_widths_are_not_mixed(tmp_path: Path) -> None:
    wide = make_tokens(1).astype(np.uint32)
    assert "several formats" in refuse(tmp_path, lambda path: write_llmc(path, wide, magic=20240801, version=7))


def test_a_folder_without_token_files_holds_none(tmp_path: Path) -> None:
    (tmp_path / "training.txt").write_text("train me")
    (tmp_path / "train.bin").mkdir()
    assert not holds_shards(tmp_path)


def test_a_corpus_keeps_its_location(tmp_path: Path) -> None:
    write_layout(tmp_path, "nanoGPT")
    shards: TokenShards = open_shards(str(tmp_path))
    assert (shards.location, shards.folder) == (str(tmp_path), tmp_path)

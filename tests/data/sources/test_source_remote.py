"""Remote files and Hugging Face datasets: read like local files, without a copy on the disk."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from web_server import WebServer, serve

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Source, list_parts, open_documents, read_documents, resolve_source

TEXTS = [f"text {number} " + "é" * number for number in range(50)]
LINES = "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()


def find(*uris: str, **options: str) -> Source:
    return resolve_source(list(uris), ReadingOptions(**options))


def read(*uris: str, **options: str) -> list[str]:
    return list(read_documents(find(*uris, **options), ReadingOptions(**options)))


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    for name, content in {
        "corpus/b.jsonl": LINES,
        "corpus/deep/a.jsonl.gz": gzip.compress(LINES),
        "corpus/c.txt": b"plain",
        "corpus/.hidden.txt": b"hidden",
        "corpus/photo.jpg": b"\xff",
    }.items():
        system.pipe(f"/{name}", content)
    yield system
    system.rm("/", recursive=True)


@pytest.mark.usefixtures("memory")
def test_files_folders_and_patterns_of_a_remote_file_system() -> None:
    assert read("memory://corpus/b.jsonl") == TEXTS
    source = find("memory://corpus")
    assert [file.name for file in source.files] == ["b.jsonl", "c.txt", "deep/a.jsonl.gz"]
    assert source.size_bytes == sum(file.size_bytes for file in source.files) > 0
    assert read("memory://corpus") == [*TEXTS, "plain", *TEXTS]
    assert [file.name for file in find("memory://corpus/*.jsonl").files] == ["b.jsonl"]
    assert read("memory://corpus/**/*.gz", "memory://corpus/c.txt") == [*TEXTS, "plain"]


@pytest.mark.usefixtures("memory")
def test_a_remote_file_counts_what_it_has_read() -> None:
    file = find("memory://corpus/deep/a.jsonl.gz").files[0]
    with open_documents(file, ReadingOptions()) as documents:
        list(documents)
        assert documents.bytes_read == file.size_bytes


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("memory://nowhere.txt", "memory://nowhere.txt does not exist"),
        ("memory://corpus/*.csv", "no file matches memory://corpus"),
        ("nonsense://a", "fsspec cannot open nonsense://a"),
    ],
)
def test_uris_without_text_are_refused_by_name(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        find(uri)


def test_remote_parquet_is_read_by_row_groups(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptmill.data.sources.parts.SMALL_FILE_BYTES", 0)
    monkeypatch.setattr("gptmill.data.sources.parts.PART_BYTES", 100)
    with memory.open("/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=7)
    found = find("memory://a.parquet").files[0]
    parts = list_parts(found, ReadingOptions())
    assert parts is not None
    assert len(parts) == 8
    documents = []
    for part in parts:
        with open_documents(found, ReadingOptions(), part) as stream:
            documents += list(stream)
    assert documents == TEXTS


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serve() as server:
        yield server


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_the_web_is_read_as_a_stream(knows_ranges: bool, server: WebServer, tmp_path: Path) -> None:
    server.knows_ranges = knows_ranges
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    server.files = {
        "/a.jsonl": LINES,
        "/b.jsonl.gz": gzip.compress(LINES),
        "/a.parquet": (tmp_path / "a.parquet").read_bytes(),
    }
    for name in ("a.jsonl", "b.jsonl.gz?download=true", "a.parquet"):
        assert read(f"{server.url}/{name}") == TEXTS
    assert find(f"{server.url}/a.jsonl").files[0].size_bytes == len(LINES)


def test_the_web_that_does_not_answer_is_named(server: WebServer) -> None:
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        find(f"{server.url}/missing.txt")
    with pytest.raises(UserError, match=r"cannot read http://127\.0\.0\.1:9/a\.txt: .*onnect"):
        find("http://127.0.0.1:9/a.txt")
    server.files["/a.txt"] = b"x" * 100_000
    source = find(f"{server.url}/a.txt")
    server.hang_up_after = [1000]
    with pytest.raises(UserError, match=r"cannot read .*/a\.txt"):
        list(read_documents(source, ReadingOptions()))
    server.fail_with = [500] * 10
    with pytest.raises(UserError, match=r"cannot read .*/a\.txt"):
        list(read_documents(source, ReadingOptions()))


def test_a_web_page_that_lists_files_is_a_folder(server: WebServer) -> None:
    page = '<html><a href="a.txt">a.txt</a> <a href="b.jsonl">b.jsonl</a> <a href="c.png">c.png</a></html>'
    server.files = {"/data/": page.encode(), "/data/a.txt": b"plain", "/data/b.jsonl": LINES}
    assert [file.name for file in find(f"{server.url}/data/").files] == ["a.txt", "b.jsonl"]
    assert read(f"{server.url}/data/") == ["plain", *TEXTS]


# Hugging Face


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two splits, as a dataset's repository has it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"text": [*TEXTS, None], "n": range(51)}), folder / "train-00000.parquet")
    pq.write_table(pa.table({"text": ["test"], "n": [1]}), folder / "test-00000.parquet")
    return folder


def test_a_dataset_is_streamed_split_by_split(dataset: Path) -> None:
    source = find(f"hf:{dataset}")
    assert (source.name, len(source.files), source.size_bytes) == ("set", 1, 0)
    assert not source.one_document_per_file
    assert list_parts(source.files[0], ReadingOptions()) is None
    assert read(f"hf:{dataset}") == TEXTS
    assert read(f"hf:{dataset}@test") == ["test"]


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "saved"
    train = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": train}).save_to_disk(folder)
    train.save_to_disk(tmp_path / "one")
    assert read(f"hf:{folder}") == read(f"hf:{tmp_path / 'one'}") == TEXTS
    with pytest.raises(UserError, match=r"has no split trian.*did you mean train"):
        read(f"hf:{folder}@trian")


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        ("", {"text_field": "body"}, r"has no field 'body'.*text, n"),
        ("", {"text_field": "n"}, "has int in 'n'"),
        ("@nosuch", {}, r"cannot read hf:.*@nosuch"),
    ],
)
def test_datasets_without_the_text_are_named(dataset: Path, suffix: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(f"hf:{dataset}{suffix}", **options)


def test_uris_of_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no dataset"):
        find("hf:squad")
    with pytest.raises(UserError, match="does not exist"):
        find(f"hf:{tmp_path / 'nowhere'}")

"""Named corpora: downloaded once and whole, whatever the network does; verified; and usable without a network."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import replace_sleep
from web_server import WebServer, serve

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import CORPORA, Source, download, read_documents, resolve_source
from gptmill.data.sources.named_corpora import CorpusFile, find_cache_dir

TEXT = b"".join(b"line %d of a text that is long enough to be interrupted\n" % number for number in range(20_000))
SHA256 = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serve() as server:
        server.files["/plays.txt"] = TEXT
        yield server


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "corpora" / "plays"


@pytest.fixture
def plays(server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of that name, of which the checksum is known; and where it is kept."""
    monkeypatch.setitem(CORPORA, "plays", (CorpusFile("plays.txt", f"{server.url}/plays.txt", 0, f"sha256:{SHA256}"),))
    return cache / "plays.txt"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which tests do not take."""
    seconds: list[float] = []
    replace_sleep(monkeypatch, download, seconds.append)
    return seconds


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def find(name: str, from_file: Path | None = None) -> Source:
    return resolve_source([name], ReadingOptions(from_file=str(from_file) if from_file else None))


def read(name: str, from_file: Path | None = None) -> bytes:
    return "".join(read_documents(find(name, from_file), ReadingOptions())).encode()


def test_a_corpus_is_downloaded_once(server: WebServer, plays: Path) -> None:
    assert read("plays") == TEXT
    assert list_names(plays.parent) == ["plays.txt"]
    assert len(server.requests) == 1
    assert find("plays") == find("plays")
    assert len(server.requests) == 1
    assert find("plays").name == "plays"


def test_a_connection_that_breaks_is_resumed_where_it_broke(server: WebServer, plays: Path, waits: list[float]) -> None:
    server.hang_up_after = [300_000, 0, 1, 200_000]
    assert read("plays") == TEXT
    assert [wanted for _, _, wanted in server.requests] == [
        None, "bytes=300000-", "bytes=300000-", "bytes=300001-", "bytes=500001-"
    ]  # fmt: skip
    assert waits == [1, 2, 1, 1]
    assert plays.read_bytes() == TEXT


def test_a_download_that_was_given_up_resumes_next_time(server: WebServer, plays: Path, waits: list[float]) -> None:
    server.hang_up_after = [400_000, *([0] * 10)]
    with pytest.raises(UserError, match="cannot download plays"):
        find("plays")
    assert len(waits) == download.ATTEMPTS - 1
    assert list_names(plays.parent) == ["plays.txt.part"]
    server.hang_up_after, server.requests = [], []
    assert read("plays") == TEXT
    assert server.requests == [("GET", "/plays.txt", "bytes=400000-")]
    assert list_names(plays.parent) == ["plays.txt"]


def test_a_server_that_cannot_resume_sends_all_again(server: WebServer, plays: Path, waits: list[float]) -> None:
    server.knows_ranges = False
    server.hang_up_after = [400_000]
    assert read("plays") == TEXT
    assert waits == [1]
    assert list_names(plays.parent) == ["plays.txt"]


def test_a_download_that_was_complete_but_not_renamed_is_taken(server: WebServer, plays: Path) -> None:
    plays.parent.mkdir(parents=True)
    plays.with_name("plays.txt.part").write_bytes(TEXT)
    assert read("plays") == TEXT
    assert server.requests == [("GET", "/plays.txt", f"bytes={len(TEXT)}-")]


def test_what_is_left_of_another_file_is_thrown_away(server: WebServer, plays: Path) -> None:
    plays.parent.mkdir(parents=True)
    plays.with_name("plays.txt.part").write_bytes(TEXT + b"of a longer one")
    assert read("plays") == TEXT
    assert len(server.requests) == 2


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(
    server: WebServer, plays: Path, waits: list[float]
) -> None:
    server.fail_with = [403]
    with pytest.raises(UserError, match="HTTP 403"):
        find("plays")
    assert waits == []
    server.fail_with = [503, 429]
    assert read("plays") == TEXT
    assert waits == [1, 2]
    assert plays.exists()


def test_other_bytes_than_expected_are_refused_with_both_checksums(server: WebServer, plays: Path) -> None:
    wrong = TEXT.replace(b"line 7 ", b"line 8 ")
    server.files["/plays.txt"] = wrong
    with pytest.raises(UserError, match=f"{hashlib.sha256(wrong).hexdigest()}, not sha256:{SHA256}"):
        find("plays")
    assert list_names(plays.parent) == []


def test_the_checksum_of_the_server_is_used_where_none_is_known(
    server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setitem(CORPORA, "plays", (CorpusFile("plays.txt", f"{server.url}/resolve"),))
    server.redirects["/resolve"] = ("/plays.txt", "0" * 64)
    with pytest.raises(UserError, match=f"sha256:{SHA256}, not sha256:{'0' * 64}"):
        find("plays")
    server.redirects["/resolve"] = ("/plays.txt", SHA256)
    server.hang_up_after = [500_000]
    assert read("plays") == TEXT
    assert server.requests[-1] == ("GET", "/plays.txt", "bytes=500000-")
    assert waits == [1]
    assert list_names(cache) == ["plays.txt"]


def test_a_damaged_cache_is_noticed(plays: Path) -> None:
    plays.parent.mkdir(parents=True)
    plays.write_bytes(TEXT[:-1])
    with pytest.raises(UserError, match=rf"{plays} has the wrong checksum.*{SHA256}"):
        find("plays")


@pytest.mark.usefixtures("no_network")
def test_without_a_network_one_sentence_says_what_to_fetch_and_where_to_put_it(plays: Path, waits: list[float]) -> None:
    url = CORPORA["plays"][0].url
    with pytest.raises(UserError) as error:
        find("plays")
    message = str(error.value)
    assert all(part in message for part in ("Name or service not known", url, str(plays), "--from FILE"))
    assert "\n" not in message
    assert waits == []
    plays.write_bytes(TEXT)
    assert read("plays") == TEXT


@pytest.mark.usefixtures("no_network")
def test_without_a_network_a_corpus_of_many_files_is_still_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=10**12)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        UserError, match=r"the 14 files from https://.*/000_00000.parquet to 013_00000.parquet"
    ) as error:
        find("fineweb-edu-10B")
    assert str(cache.parent / "fineweb-edu-10B") in str(error.value)
    assert len(str(error.value)) < 600


def test_a_full_disk_is_noticed_before_the_download(
    server: WebServer, plays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="GPTMILL_CACHE"):
        find("plays")
    assert len(server.requests) == 1
    assert not plays.exists()
    with pytest.raises(UserError, match=r"0\.0 GB of free disk space and needs 28\.5"):
        find("fineweb-edu-10B")


# From a file


def test_a_given_file_is_read_where_it_is(server: WebServer, plays: Path, tmp_path: Path) -> None:
    (tmp_path / "my copy").write_bytes(TEXT)
    source = find("plays", tmp_path / "my copy")
    assert source.files[0].uri == str(tmp_path / "my copy")
    assert read("plays", tmp_path / "my copy") == TEXT
    assert server.requests == []
    assert not plays.exists()
    assert source.listing_sha256 == find("plays").listing_sha256


def test_a_given_folder_is_searched(server: WebServer, plays: Path, tmp_path: Path) -> None:
    (tmp_path / "copies" / "deep").mkdir(parents=True)
    (tmp_path / "copies" / "deep" / "plays.txt.gz").write_bytes(gzip.compress(TEXT))
    assert read("plays", tmp_path / "copies") == TEXT
    assert plays.read_bytes() == TEXT
    assert server.requests == []


def test_a_given_file_with_other_bytes_is_refused(plays: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT[:-1])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT[:-1]))
    for name in ("a.txt", "a.txt.gz"):
        with pytest.raises(UserError, match=rf"{name} has the wrong checksum: sha256:.*, not sha256:{SHA256}"):
            find("plays", tmp_path / name)
    assert not plays.exists()
    with pytest.raises(UserError, match=r"nowhere\.txt does not exist"):
        find("plays", tmp_path / "nowhere.txt")


def test_from_goes_with_one_named_corpus(plays: Path, text_file: Path) -> None:
    for inputs in ([str(text_file)], ["python-stdlib"], ["plays", "enwik8"]):
        with pytest.raises(UserError, match="--from goes with one named corpus"):
            resolve_source(inputs, ReadingOptions(from_file=str(text_file)))
    assert not plays.exists()


def test_a_corpus_of_many_files_wants_a_folder_with_all_of_them(
    server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("a.txt", "b.txt")
    monkeypatch.setitem(CORPORA, "plays", tuple(CorpusFile(name, f"{server.url}/{name}") for name in names))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_bytes(b"second")
    with pytest.raises(UserError, match=r"one file and plays has 2"):
        find("plays", folder / "b.txt")
    with pytest.raises(UserError, match=r"folder lacks a\.txt of plays"):
        find("plays", folder)
    (folder / "a.txt").write_bytes(b"first ")
    assert read("plays", folder) == b"first second"
    assert not cache.exists()


def make_zip(member: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, TEXT)
    return file.getvalue()


def test_an_archive_is_unpacked_verified_and_removed(
    server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = hashlib.md5(TEXT, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(CORPORA, "plays", (CorpusFile("plays8", f"{server.url}/plays8.zip", 0, f"md5:{digest}"),))
    server.files["/plays8.zip"] = make_zip("plays8")
    assert read("plays") == TEXT
    assert list_names(cache) == ["plays8"]
    for name, content in {"plays8.zip": make_zip("plays8"), "x.gz": gzip.compress(TEXT), "plain": TEXT}.items():
        (tmp_path / name).write_bytes(content)
        assert read("plays", tmp_path / name) == TEXT
        assert find("plays", tmp_path / name).listing_sha256 == find("plays").listing_sha256
    (tmp_path / "other.zip").write_bytes(make_zip("else"))
    (tmp_path / "cut.zip").write_bytes(make_zip("plays8")[:-30])
    with pytest.raises(UserError, match=r"other\.zip has no member plays8"):
        find("plays", tmp_path / "other.zip")
    with pytest.raises(UserError, match=r"cut\.zip is not a valid zip file"):
        find("plays", tmp_path / "cut.zip")
    assert list_names(cache) == ["plays8"]


def test_an_archive_that_was_put_into_the_cache_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORPORA, "plays", (CorpusFile("plays8", "http://127.0.0.1:9/plays8.zip"),))
    cache.mkdir(parents=True)
    (cache / "plays8.zip").write_bytes(make_zip("plays8"))
    assert read("plays") == TEXT
    assert list_names(cache) == ["plays8"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPTMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_cache_dir() == tmp_path / ".cache" / "gptmill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_cache_dir() == tmp_path / "xdg" / "gptmill"
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "own"))
    assert find_cache_dir() == tmp_path / "own"


def test_the_shipped_table_is_valid() -> None:
    assert {"tiny-shakespeare", "enwik8", "fineweb-edu-10B", "openwebtext"} <= CORPORA.keys()
    for files in CORPORA.values():
        assert len({file.name for file in files}) == len(files)
        assert all(file.url.startswith("https://") for file in files)
        assert all(file.stored_name in (file.name, f"{file.name}.zip") for file in files)


@pytest.mark.realdata
def test_the_real_tiny_shakespeare_is_the_named_one(realdata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTMILL_CACHE", str(realdata / "none"))
    source = find("tiny-shakespeare", realdata / "tinyshakespeare")
    assert source.size_bytes == 1_115_394
    assert len(read("tiny-shakespeare", realdata / "tinyshakespeare" / "input.txt")) == 1_115_394

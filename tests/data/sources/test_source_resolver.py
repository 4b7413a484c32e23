"""Sources: which files an input resolves to, in which order, and what happens to those that cannot be read."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_environment

from gptmill.config.errors import UserError
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import Source, make_source_name, read_documents, resolve_source, resolver

NAMES = ["b.txt", "a.md", "nested/deep/c.rst", "nested/a.text", "z.py"]


def write_files(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")
    return folder


def find(*inputs: str | Path, **options: str) -> Source:
    return resolve_source([str(name) for name in inputs], ReadingOptions(**options))


def read(source: Source) -> list[str]:
    return list(read_documents(source, ReadingOptions()))


def list_names(*inputs: str | Path) -> list[str]:
    return [file.name for file in find(*inputs).files]


def test_a_folder_gives_its_text_files_whatever_the_order_of_their_creation(tmp_path: Path) -> None:
    names = [*NAMES, *(f"nested/{number}.txt" for number in range(30))]
    forwards = list_names(write_files(tmp_path / "forwards", names))
    backwards = list_names(write_files(tmp_path / "backwards", names[::-1]))
    assert forwards == backwards == [path.as_posix() for path in sorted(map(Path, names))]


def test_a_folder_leaves_other_suffixes_out(tmp_path: Path) -> None:
    write_files(
        tmp_path, [*NAMES, "photo.jpg", "data.gz", ".hidden.txt", ".git/a.txt", "README", "nested/weights.bin", "txt"]
    )
    assert sorted(list_names(tmp_path)) == sorted(NAMES)


def test_a_file_named_by_itself_may_have_any_suffix(tmp_path: Path) -> None:
    path = write_files(tmp_path, ["words.log"]) / "words.log"
    assert read(find(path)) == ["text of words.log"]


def test_inputs_are_read_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    write_files(tmp_path, ["b.txt", "folder/a.txt"])
    source = find(tmp_path / "folder", tmp_path / "b.txt")
    assert read(source) == ["text of folder/a.txt", "text of b.txt"]
    assert source.size_bytes == sum(Path(file.uri).stat().st_size for file in source.files)


def test_line_ends_of_text_are_kept_and_its_byte_order_mark_is_not(tmp_path: Path) -> None:
    text = "one\r\ntwo\rthree\ufeff\n\n"
    (tmp_path / "a.txt").write_bytes(("\ufeff" + text).encode("utf-8"))
    assert read(find(tmp_path)) == [text]


def test_empty_files_are_no_documents(tmp_path: Path) -> None:
    write_files(tmp_path, ["b.txt"])
    (tmp_path / "a.txt").write_bytes(b"")
    assert read(find(tmp_path)) == ["text of b.txt"]


def test_a_python_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = 'é'\n"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    assert read(find(tmp_path)) == [text]


def test_a_python_file_that_declares_an_unknown_encoding_is_read_as_utf8(tmp_path: Path) -> None:
    text = "# coding: klingon\nname = 'é'\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    assert read(find(tmp_path)) == [text]


def test_a_python_file_whose_encoding_is_none_for_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"# coding: rot13\n")
    source = find(path)
    with pytest.raises(UserError, match=r"a\.py"):
        read(source)


@pytest.mark.parametrize("suffix", [".txt", ".py"])
def test_text_that_is_not_utf8_is_named_with_the_place_in_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"# plain\n" * 10_000 + b"\xff\n")
    source = find(path)
    with pytest.raises(UserError, match=rf"a\{suffix} .*0xff at offset 80000"):
        read(source)


def test_inputs_without_text_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    write_files(tmp_path / "pictures", ["a.jpg"])
    for place in ("missing.txt", "empty.txt", "pictures"):
        with pytest.raises(UserError, match=place):
            find(tmp_path / place)


def test_a_name_that_is_almost_right_is_corrected() -> None:
    with pytest.raises(UserError, match=r"tinyshakespeare does not exist \(did you mean tiny-shakespeare\?\)"):
        find("tinyshakespeare")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("a.parquet", "pyarrow", "data"),
        ("a.html", "resiliparse.extract.html2text", "data"),
        ("a.wet.gz", "fastwarc.warc", "data"),
        ("memory://a.txt", "fsspec", "cloud"),
        ("hf:owner/name", "datasets", "hf"),
    ],
)
def test_a_missing_package_is_named_by_the_line_that_installs_it(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.html").write_bytes(b"<p>text</p>")
    (tmp_path / "a.wet.gz").write_bytes(gzip.compress(b"text"))
    place = name if ":" in name else tmp_path / name
    with pytest.raises(UserError, match=rf"pip install 'gptmill\[{extra}\]'$"):
        read(find(place))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python itself reads zstd")
def test_zstd_needs_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"pip install 'gptmill\[data\]'$"):
        read(find(tmp_path))


def test_the_digest_tells_when_a_file_has_changed(tmp_path: Path) -> None:
    write_files(tmp_path, NAMES)
    before = find(tmp_path).listing_sha256
    assert find(tmp_path).listing_sha256 == before
    (tmp_path / "b.txt").write_text("another text", encoding="utf-8")
    changed = find(tmp_path).listing_sha256
    write_files(tmp_path, ["one_more.txt"])
    assert len({before, changed, find(tmp_path).listing_sha256}) == 3


@pytest.mark.slow
def test_the_standard_library_is_about_ten_megabytes_of_readable_source() -> None:
    source = find("python-stdlib")
    documents = read(source)
    assert 5_000_000 < sum(map(len, documents)) < 20_000_000
    assert {"argparse.py", "os.py"} <= {file.name for file in source.files}
    assert all(file.name.endswith(".py") and "site-packages" not in file.uri for file in source.files)
    assert not any(document == "" for document in documents)


def test_a_pipe_and_an_empty_name_are_no_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a text file nor a folder"):
        find(tmp_path / "pipe")
    with pytest.raises(UserError, match="does not exist"):
        find("")


def test_a_pattern_gives_what_it_matches(tmp_path: Path) -> None:
    write_files(tmp_path, ["data/b.txt", "data/a.log", "data/.c.txt", "data/deep/er/d.txt", "data/deep/e.txt"])
    assert list_names(tmp_path / "data" / "*.txt") == ["b.txt"]
    assert list_names(tmp_path / "data" / "*") == ["a.log", "b.txt"]
    assert list_names(tmp_path / "d*" / "**" / "*.txt") == ["data/b.txt", "data/deep/e.txt", "data/deep/er/d.txt"]
    with pytest.raises(UserError, match=r"no file matches .*\*\.csv"):
        find(tmp_path / "*.csv")


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    write_files(tmp_path, ["data[1].txt", "data1.txt"])
    assert read(find(tmp_path / "data[1].txt")) == ["text of data[1].txt"]


def test_a_local_url_is_a_local_file(tmp_path: Path) -> None:
    write_files(tmp_path, ["a b.txt"])
    source = find((tmp_path / "a b.txt").as_uri())
    assert source.files == find(tmp_path / "a b.txt").files
    assert source.name == "a b"


def test_a_moved_corpus_is_the_same_corpus(tmp_path: Path) -> None:
    here, there = (find(write_files(tmp_path / place, NAMES)) for place in ("here", "there"))
    assert here.listing_sha256 == there.listing_sha256
    assert here.files != there.files


def test_whether_files_are_documents(tmp_path: Path) -> None:
    write_files(tmp_path, [*NAMES, "page.html", "more.txt.gz"])
    assert find(tmp_path).one_document_per_file
    assert not find(tmp_path, separator="#").one_document_per_file
    write_files(tmp_path, ["records.jsonl"])
    assert not find(tmp_path).one_document_per_file


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("words.txt", "words"),
        ("data/words.jsonl.gz", "words"),
        ("data/*.jsonl.gz", "data"),
        ("data/**/*.txt", "data"),
        ("-", "stdin"),
        ("enwik8", "enwik8"),
        ("python-stdlib", "python-stdlib"),
        ("hf:owner/set/config@test", "set-config"),
        ("hf:./folder/set", "set"),
        ("s3://bucket/deep/words.parquet", "words"),
        ("s3://bucket/deep/*.parquet", "deep"),
        ("https://example.org/a%20b.txt.xz?download=true", "a b"),
        ("https://example.org/", "example"),
        ("/", "corpus"),
    ],
)
def test_the_name_of_a_corpus_is_short(place: str, name: str) -> None:
    assert make_source_name([place, "other.txt"]) == name


def test_standard_input_is_kept_on_disk_as_long_as_the_process_lives(tmp_path: Path) -> None:
    script = (
        "from gptmill.config.requests import ReadingOptions as O\n"
        "from gptmill.data.sources import resolve_source, read_documents\n"
        "source, again = resolve_source(['-'], O()), resolve_source(['-'], O())\n"
        "assert source == again\n"
        "print(list(read_documents(source, O(separator='#'))), source.listing_sha256, source.files[0].uri)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            input=text,
            env=make_environment(TMPDIR=str(tmp_path)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for text in ("one#two", "one#two", "one#owt")
    ]
    assert [output[:2] for output in outputs] == [["['one',", "'two']"]] * 2 + [["['one',", "'owt']"]]
    assert outputs[0][2] == outputs[1][2] != outputs[2][2]
    assert outputs[0][3].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(resolver.sys, "stdin", Terminal())
    with pytest.raises(UserError, match="nothing is piped in"):
        find("-")


def test_importing_sources_loads_no_heavy_package() -> None:
    heavy = {"torch", "numpy", "pyarrow", "datasets", "fsspec", "fastwarc", "resiliparse", "zstandard"}
    script = f"import sys, gptmill.data.sources; print({heavy!r} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.txt", "closed/b.txt"])
    (tmp_path / "closed").chmod(0)
    try:
        with pytest.raises(UserError, match=r"cannot read .*closed: Permission denied"):
            find(tmp_path)
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_links_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("one")
    (tmp_path / "elsewhere" / "b.txt").write_text("two")
    (tmp_path / "corpus" / "far").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "again.txt").symlink_to(tmp_path / "corpus" / "a.txt")
    (tmp_path / "corpus" / "circle").symlink_to(tmp_path / "corpus")
    for place in (tmp_path / "corpus", tmp_path / "corpus" / "**" / "*.txt"):
        files = resolve_source([str(place)], ReadingOptions()).files
        assert sorted(Path(file.uri).name for file in files) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["CC-MAIN-1.warc.wat.gz", "a.wat"])
def test_metadata_of_a_crawl_is_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"WARC/1.0\r\n")
    with pytest.raises(UserError, match=r"metadata of a crawl, not its text; give the \.wet\.gz or \.warc\.gz"):
        find(tmp_path / name)

"""Sources: which files a place stands for, in which order, and what becomes of those that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptmill.config.errors import UserError
from gptmill.data.sources import open_source

NAMES = ["b.txt", "a.md", "nested/deep/c.rst", "nested/a.text", "z.py"]


def write_files(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")
    return folder


def list_names(folder: Path) -> list[str]:
    return [path.relative_to(folder.resolve()).as_posix() for path in open_source([str(folder)]).files]


def test_a_folder_gives_its_text_files_whatever_the_order_of_their_creation(tmp_path: Path) -> None:
    names = [*NAMES, *(f"nested/{number}.txt" for number in range(30))]
    forwards = list_names(write_files(tmp_path / "forwards", names))
    backwards = list_names(write_files(tmp_path / "backwards", names[::-1]))
    assert forwards == backwards == [path.as_posix() for path in sorted(map(Path, names))]


def test_a_folder_leaves_other_suffixes_out(tmp_path: Path) -> None:
    write_files(tmp_path, [*NAMES, "photo.jpg", "data.json", "README", "nested/weights.bin", "txt"])
    assert sorted(list_names(tmp_path)) == sorted(NAMES)


def test_a_file_named_by_itself_may_have_any_suffix(tmp_path: Path) -> None:
    path = write_files(tmp_path, ["words.log"]) / "words.log"
    assert list(open_source([str(path)]).read_documents()) == ["text of words.log"]


def test_places_are_read_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    write_files(tmp_path, ["b.txt", "folder/a.txt"])
    source = open_source([str(tmp_path / "folder"), str(tmp_path / "b.txt")])
    assert list(source.read_documents()) == ["text of folder/a.txt", "text of b.txt"]
    assert source.size_bytes == sum(path.stat().st_size for path in source.files)


def test_line_ends_and_byte_order_marks_of_text_are_kept(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8"))
    assert list(open_source([str(tmp_path)]).read_documents()) == [text]


def test_empty_files_are_no_documents(tmp_path: Path) -> None:
    write_files(tmp_path, ["b.txt"])
    (tmp_path / "a.txt").write_bytes(b"")
    assert list(open_source([str(tmp_path)]).read_documents()) == ["text of b.txt"]


def test_a_python_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = 'é'\n"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    assert list(open_source([str(tmp_path)]).read_documents()) == [text]


def test_a_python_file_that_declares_an_unknown_encoding_is_read_as_utf8(tmp_path: Path) -> None:
    text = "# coding: klingon\nname = 'é'\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    assert list(open_source([str(tmp_path)]).read_documents()) == [text]


def test_a_python_file_whose_encoding_is_none_for_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"# coding: rot13\n")
    source = open_source([str(path)])
    with pytest.raises(UserError, match=r"a\.py"):
        list(source.read_documents())


@pytest.mark.parametrize("suffix", [".txt", ".py"])
def test_text_that_is_not_utf8_is_named_with_the_place_in_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"# plain\n" * 10_000 + b"\xff\n")
    source = open_source([str(path)])
    with pytest.raises(UserError, match=rf"a\{suffix} .*0xff at offset 80000"):
        list(source.read_documents())


def test_places_without_text_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    write_files(tmp_path / "pictures", ["a.jpg"])
    for place in ("missing.txt", "empty.txt", "pictures"):
        with pytest.raises(UserError, match=place):
            open_source([str(tmp_path / place)])


def test_the_digest_tells_when_a_file_has_changed(tmp_path: Path) -> None:
    write_files(tmp_path, NAMES)
    before = open_source([str(tmp_path)]).listing_sha256
    assert open_source([str(tmp_path)]).listing_sha256 == before
    (tmp_path / "b.txt").write_text("another text", encoding="utf-8")
    changed = open_source([str(tmp_path)]).listing_sha256
    write_files(tmp_path, ["one_more.txt"])
    assert len({before, changed, open_source([str(tmp_path)]).listing_sha256}) == 3


def test_the_standard_library_is_about_ten_megabytes_of_readable_source() -> None:
    source = open_source(["python-stdlib"])
    documents = list(source.read_documents())
    assert 5_000_000 < sum(map(len, documents)) < 20_000_000
    assert {"argparse.py", "os.py"} <= {path.name for path in source.files}
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in source.files)
    assert not any(document == "" for document in documents)


def test_a_pipe_and_an_empty_name_are_no_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a text file nor a folder"):
        open_source([str(tmp_path / "pipe")])
    with pytest.raises(UserError, match="does not exist"):
        open_source([""])

"""What later changes are held against can tell a difference."""

from __future__ import annotations

import shlex
from pathlib import Path

import digest_rows
import digests
import pytest
from digests import Difference, digest
from size import ALL, compare, measure, render

from gptmill.config.export_request import DTYPES
from gptmill.config.requests import CleaningOptions, ReadingOptions
from gptmill.config.schema import list_fields
from gptmill.data.sources.compression import COMPRESSIONS
from gptmill.data.sources.formats import FORMATS
from gptmill.data.tokenizers import TOKENIZERS
from gptmill.models.huggingface.layouts import LAYOUTS
from gptmill.training.optimizers import OPTIMIZERS

MODULES = {
    "__init__.py": 'from small.room.one import f as f\n\n__all__ = ["f"]\n',
    "room/one.py": '"""Three\n\nlines."""\n\nimport os  # a comment\n\n\ndef f() -> str:\n    return f"{os.sep}-{1}"\n',
    "room/two.py": "from small.room import one\nfrom small.room.three import (\n    g,\n)\n" + 101 * "x" + "\n",
    "room/three.py": "g = 1\n# alone\n",
    "room/law.json": "{}\n",
}


def test_the_size_of_a_package_is_counted_room_by_room(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "small" / name).write_text(text, encoding="utf-8")
    rooms = measure(tmp_path / "small")
    assert rooms.keys() == {".", "room", ALL}
    counts = {"files": 3, "lines": 16, "code": 9, "imports": 5, "tokens": 33, "docstrings": 3, "comments": 2, "wide": 1}
    assert {name: rooms["room"][name] for name in counts} == counts
    assert rooms[ALL]["json"] == 1
    assert rooms["room"]["one importer"] == 1  # three.py; one.py has two, as the package counts
    (tmp_path / "small/room/three.py").write_text("g = 1\nh = 2\n", encoding="utf-8")
    difference = compare(rooms, measure(tmp_path / "small"))
    assert difference["."] == [0] * len(difference["."])
    assert difference[ALL][:5] == [0, 0, 1, 0, 3]
    assert [line.split()[0] for line in render(difference, sign="+")] == ["room", ".", "room", ALL]


def test_a_digest_is_of_what_was_written_but_for_times(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("1 train 5.5\n")
    (tmp_path / "events.jsonl").write_text('{"event": "StepLogged", "step": 1, "loss": 5.5, "time": 1.5}\n')
    (tmp_path / "checkpoint.json").write_text('{"saved_at": 1.5, "values": {"code": "1a", "windows_read": 8}}')
    (tmp_path / "README.md").write_text("gptmill 1.0")
    before = digest(tmp_path, ["*"])
    assert list(before) == ["checkpoint.json: values.windows_read", "events.jsonl", "log.txt"]
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("1.5", "2.5").replace("1a", "2b").replace("1.0", "2.0"))
    assert digest(tmp_path, ["*"]) == before
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("5.5", "5.6").replace("8", "16"))
    after = digest(tmp_path, ["*"])
    assert [name for name in before if before[name] == after[name]] == []
    with pytest.raises(RuntimeError, match="nothing was written to runs"):
        digest(tmp_path, ["*", "runs/*"])


def test_what_differs_is_absent_or_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"one": {"a": "1", "b": "2"}, "two": {"c": "3"}, "three": {"failed": "why"}}
    assert digests.compare({"one": base["one"]}, {"one": base["one"]}) == []
    found = digests.compare(base, {"one": {"a": "1", "b": "0"}, "two": {"d": "3"}, "three": base["three"]})
    assert found == [
        Difference("one", "b", "2", "0"),
        Difference("two", "c", "3", "absent"),
        Difference("two", "d", "absent", "3"),
        Difference("three", "failed", "why", "why"),
    ]
    monkeypatch.setattr(digests, "DECIDED", {"tw*: [cd]": "1a2b3c4 decides it"})
    assert [each.row for each in found if digests.is_decided(each)] == ["two", "two"]
    monkeypatch.setattr(digests, "DECIDED", {"variant fp8*": "1a2b3c4 removes it"})
    rows, not_run = digests.choose_rows("training", "variant fp*")
    assert ([row.name for row in rows], not_run) == (["variant fp16"], digests.DECIDED)


def test_nothing_that_changes_bytes_is_forgotten() -> None:
    rows = list(digest_rows.list_rows())
    assert len({row.name for row in rows}) == len(rows)
    words = {word for row in rows for command in row.commands for word in shlex.split(command)}
    suffixes = {suffix for kinds, _ in digest_rows.FORMATS.values() for suffix in kinds.split()}
    assert FORMATS.keys() <= suffixes
    assert COMPRESSIONS.keys() <= {f".{suffix.rpartition('.')[2]}" for suffix in suffixes}
    assert TOKENIZERS.keys() <= digest_rows.TOKENIZERS.keys()
    assert set(LAYOUTS) <= digest_rows.LAYOUTS.keys()
    assert {target: set(dtypes) for target, dtypes in DTYPES.items()} == {
        target: set(dtypes.split()) for target, dtypes in digest_rows.TARGETS.items()
    }
    assert OPTIMIZERS.keys() <= words | {"adamw"}
    options = {f"--{field.name}" for cls in (ReadingOptions, CleaningOptions) for field in list_fields(cls)}
    assert options - words == {"--from_file"}  # which a named corpus has

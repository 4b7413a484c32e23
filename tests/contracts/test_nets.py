"""What later changes are held against can tell a difference."""

from __future__ import annotations

from pathlib import Path

from size import ALL, compare, measure, render

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

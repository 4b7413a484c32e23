"""Imports point down the house, and none is hidden inside a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gptmill

SOURCE = Path(gptmill.__file__).parent
# Rooms on one line are brothers: they may not import each other.
LAYERS = [
    {"config"},
    {"data", "models", "runtime"},
    {"runs"},
    {"inference"},
    {"evals"},
    {"training"},
    {"experiments"},
    {"web"},
    {"cli"},
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


def list_internal_imports(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gptmill."):
            found.append((node.module.split(".")[1], node.lineno))
        elif isinstance(node, ast.ImportFrom) and node.module == "gptmill":
            found += [(name.name, node.lineno) for name in node.names if name.name in HEIGHT]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append(("relative", node.lineno))
        elif isinstance(node, ast.Import):
            found += [(name.name.split(".")[1], node.lineno) for name in node.names if name.name.startswith("gptmill.")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    for imported, line in list_internal_imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert imported == room or HEIGHT[imported] < HEIGHT[room], f"{path}:{line} imports {imported} from {room}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_internal_import_hides_in_a_function(path: Path) -> None:
    if path.relative_to(SOURCE).parts[0] == "cli":
        return  # verbs load lazily, so that help needs no torch
    if path.with_name(f"{path.stem}_triton.py").exists():
        return  # an operation's kernel is loaded when it first runs: Triton may be absent
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert not list_internal_imports(node), f"{path}:{node.lineno} {node.name}"


def test_every_room_is_in_the_list() -> None:
    rooms = {path.relative_to(SOURCE).parts[0] for path in FILES}
    assert rooms <= HEIGHT.keys()


@pytest.mark.parametrize("path", sorted((SOURCE / "config").glob("*.py")), ids=lambda path: path.name)
def test_config_never_imports_torch(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.split(".")[0] in ("torch", "numpy") for name in names), f"{path}:{node.lineno}"

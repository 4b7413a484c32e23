"""How large each room of src/gptmill is: `make size`, and `make size BASE=COMMIT` for the difference.

Only the standard library is used, so that any Python 3.11 or newer counts any commit. What is counted:

- lines of code: those that hold a token, strings that stand alone (docstrings, those of fields too) apart; imports are
  lines of code and have a column of their own
- tokens: all of Python's `tokenize` but NL, NEWLINE, INDENT, DEDENT, COMMENT, ENCODING and ENDMARKER; an f-string is
  one, as before Python 3.12
- characters per line of code: without indentation
- one importer: modules that exactly one other file of the package imports. An `__init__` counts as a file that
  imports, and what it exports again is its own; it is not among the modules.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = "src/gptmill"
WIDEST = 100
LAYOUT = frozenset("NL NEWLINE INDENT DEDENT COMMENT ENCODING ENDMARKER".split())
STRAIGHT = "files lines code imports tokens".split()
ALL = "all"
# The heading, the counts that it divides, per how many, and the digits after the point.
RATIOS = {
    "tokens/code": ("tokens", "code", 1, 2),
    "chars/code": ("characters", "code", 1, 1),
    f"% over {WIDEST}": ("wide", "lines", 100, 2),
    "docstr/100 code": ("docstrings", "code", 100, 1),
    "comments/100 code": ("comments", "code", 100, 1),
}
LAST = ["toml", "json", "one importer"]


def measure(package: Path) -> dict[str, Counter[str]]:
    """The counts of each folder directly in the package, of the files directly in it, and of all."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    importers = find_importers(package)
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package).parts
        if path.suffix not in (".py", ".toml", ".json"):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            counts = count(text)
            counts["one importer"] = path.name != "__init__.py" and len(importers[path]) == 1
        else:
            counts = Counter({path.suffix[1:]: text.count("\n")})
        for room in (inside[0] if len(inside) > 1 else ".", ALL):
            rooms[room].update(counts)
    return rooms


def count(text: str) -> Counter[str]:
    """Counts a module."""
    lines = text.removesuffix("\n").split("\n")
    held: dict[str, set[int]] = {"docstrings": set(), "imports": set()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            held["imports"].update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held["docstrings"].update(range(node.lineno, node.end_lineno + 1))
    held |= {"code": set(), "comments": set()}
    tokens = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            held["comments"].add(token.start[0])
        if kind in LAYOUT:
            continue
        held["code"].update(range(token.start[0], token.end[0] + 1))
        depth -= kind.endswith("STRING_END")  # a part of an f-string
        tokens += not depth and not kind.endswith("STRING_END")
        depth += kind.endswith("STRING_START")
    held["code"] -= held["docstrings"]
    return Counter(
        files=1,
        lines=len(lines),
        tokens=tokens,
        characters=sum(len(lines[number - 1].strip()) for number in held["code"]),
        wide=sum(len(line) > WIDEST for line in lines),
        **{name: len(numbers) for name, numbers in held.items()},
    )


def find_importers(package: Path) -> dict[Path, set[Path]]:
    """For each module, the other files that import it, or something from it."""
    files = {name_module(path, package): path for path in package.rglob("*.py")}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [name if name in files else str(node.module) for name in inner]
            else:
                continue
            for name in named:
                if name in files and files[name] != path:
                    importers[files[name]].add(path)
    return importers


def name_module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_values(counts: Counter[str]) -> list[float]:
    ratios = [each * counts[one] / (counts[other] or 1) for one, other, each, _ in RATIOS.values()]
    return [*(counts[name] for name in STRAIGHT), *ratios, *(counts[name] for name in LAST)]


def render(values: dict[str, list[float]], sign: str = "") -> list[str]:
    """A table with a row for each room and one for all of them, right-aligned."""
    digits = [0 for _ in STRAIGHT] + [ratio[3] for ratio in RATIOS.values()] + [0 for _ in LAST]
    rooms = [*sorted(room for room in values if room != ALL), ALL]
    rows = [["room", *STRAIGHT, *RATIOS, *LAST]] + [
        [room, *(f"{value:{sign},.{places}f}" for value, places in zip(values[room], digits, strict=True))]
        for room in rooms
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def compare(base: dict[str, Counter[str]], now: dict[str, Counter[str]]) -> dict[str, list[float]]:
    """What each room has more than it had."""
    return {
        room: [after - before for before, after in zip(*(list_values(one[room]) for one in (base, now)), strict=True)]
        for room in base.keys() | now.keys()
    }


def measure_commit(commit: str) -> dict[str, Counter[str]]:
    command = ["git", "archive", "--format=zip", commit, PACKAGE]
    packed = subprocess.run(command, stdout=subprocess.PIPE)
    if packed.returncode:
        sys.exit(packed.returncode)  # git has said why
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(packed.stdout)) as files:
        files.extractall(folder)
        return measure(Path(folder, PACKAGE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a commit to compare with")
    base, now = parser.parse_args().base, measure(Path(PACKAGE))
    tables = {"now": render({room: list_values(counts) for room, counts in now.items()})}
    if base:
        before = measure_commit(base)
        tables = {base: render({room: list_values(counts) for room, counts in before.items()}), **tables}
        tables["difference"] = render(compare(before, now), sign="+")
    print("\n\n".join("\n".join([title, *table]) for title, table in tables.items()))


if __name__ == "__main__":
    main()

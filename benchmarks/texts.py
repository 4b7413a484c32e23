"""The three corpora that budgets are measured on, each cut into a text to train on and a text that is held out."""

from __future__ import annotations

import lzma
from pathlib import Path

from gptmill.data.sources.named_corpora import find_stdlib
from gptmill.experiments.budget.corpus_sample import SAMPLE_BYTES, measure_density
from gptmill.experiments.budget.excerpt import spread_pieces

CORPORA = ("books", "shakespeare", "python")
MAX_CHARS = 12_000_000
PIECES, PIECE_CHARS = 10, 10_000  # held out


def write_texts(work: Path, corpus: str, path: str | None) -> None:
    """Writes CORPUS.txt and CORPUS_val.txt, where they are not there yet; `python` is this Python's own library."""
    if (work / f"{corpus}.txt").exists():
        return
    text = read_python() if corpus == "python" else read_text(Path(path or ""))
    train, held_out = hold_out(text[:MAX_CHARS])
    (work / f"{corpus}_val.txt").write_text(held_out, encoding="utf-8")
    (work / f"{corpus}.txt").write_text(train, encoding="utf-8")


def hold_out(text: str) -> tuple[str, str]:
    """The text without ten pieces from all over it, and those: the end alone would be of one book or one play."""
    starts = [(2 * number + 1) * len(text) // (2 * PIECES) for number in range(PIECES)]
    ends = [0, *(start + PIECE_CHARS for start in starts)]
    train = "".join(text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True))
    return train, "".join(text[start : start + PIECE_CHARS] for start in starts)


def find_density(work: Path, corpus: str) -> float:
    """The density of a corpus, by as much of its text as a budget looks at."""
    text = (work / f"{corpus}.txt").read_text(encoding="utf-8")
    return measure_density(spread_pieces(text, min(1.0, SAMPLE_BYTES / len(text.encode()))))


def read_text(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return file.read(MAX_CHARS)
    return path.read_text(encoding="utf-8")


def read_python() -> str:
    """Python's standard library, in an order that mixes its packages; without a file that tells of this machine."""
    paths = [Path(path) for path, name in find_stdlib() if not name.startswith("_sysconfigdata")]
    paths.sort(key=lambda path: _mix(path.name))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def _mix(name: str) -> int:
    return sum(ord(char) * 31**place for place, char in enumerate(name)) % 1_000_003

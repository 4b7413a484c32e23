"""The same text gives the same tokens, whatever it is stored as; GPT-2's are tiktoken's own."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from gptmill.config.requests import PrepareRequest, ReadingOptions
from gptmill.data.prepare import prepare_corpus
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.slow

TEXTS = [
    f"Document {number}: naïve «quotes», 漢字, 🙂, it's\ttabs\n\nand   spaces <|endoftext|> {'x' * number}"
    for number in range(60)
]


def make_csv() -> bytes:
    sheet = io.StringIO(newline="")
    writer = csv.writer(sheet)
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(TEXTS))])
    return sheet.getvalue().encode()


def make_parquet() -> bytes:
    sink = io.BytesIO()
    table = pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
    pytest.importorskip("pyarrow.parquet").write_table(table, sink, row_group_size=7)
    return sink.getvalue()


FORMATS: dict[str, bytes] = {
    "txt": "\n=====\n".join(TEXTS).encode(),
    "json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "jsonl": "\n".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in TEXTS).encode(),
    "csv": make_csv(),
    "parquet": make_parquet(),
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


def read_tokens(place: Path, out: Path, separator: str | None) -> np.ndarray:
    request = PrepareRequest(
        out=str(out), split="documents", val_fraction=0.3, reading=ReadingOptions(separator=separator)
    )
    folder, manifest = prepare_corpus([str(place)], request, lambda _: None)
    shards = [*manifest.train.shards, *manifest.val.shards]
    return np.concatenate([np.load(folder / shard.file) for shard in shards])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Of one file for each document, which no format has a part in."""
    folder = tmp_path_factory.mktemp("files")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return read_tokens(folder, tmp_path_factory.mktemp("out") / "tokens", None)


@pytest.mark.parametrize(
    ("suffix", "compression"),
    [("txt", ""), ("json", ".gz"), ("jsonl", ".xz"), ("csv", ".bz2"), ("parquet", ".zst"), ("jsonl", ".zst")],
)
def test_every_format_gives_the_same_tokens(
    suffix: str, compression: str, expected: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / f"corpus.{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](FORMATS[suffix]))
    separator = r"\n=====\n" if suffix == "txt" else None
    np.testing.assert_array_equal(read_tokens(path, tmp_path / "out", separator), expected)


@pytest.mark.realdata
def test_real_books_are_encoded_as_tiktoken_does(realdata: Path, tmp_path: Path) -> None:
    ours = Gpt2Tokenizer()
    ranks = {ours.decode_bytes([token]): token for token in range(ours.vocab_size - 1)}
    pattern = (
        r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""  # as published with GPT-2
    )
    theirs = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    path = realdata / "books" / "books_val.txt.xz"
    books = lzma.decompress(path.read_bytes()).decode("utf-8").split("\n<|endoftext|>\n")
    tokens = read_tokens(path, tmp_path / "out", r"\n<|endoftext|>\n")
    assert len(tokens) == 925_290
    found = {tuple(piece[1:].tolist()) for piece in np.split(tokens, np.flatnonzero(tokens == 50256))[1:]}
    assert found == {tuple(theirs.encode_ordinary(book)) for book in books}

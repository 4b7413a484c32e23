"""A run that reads its shards from an address trains as one that has them, within the cache that it was given."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The test's folder, served as the web would."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def read_losses(run: Path) -> list[str]:
    return (run / "log.txt").read_text(encoding="utf-8").splitlines()


def test_far_shards_give_the_losses_of_near_ones(
    text_file: Path, gptmill: GptMill, address: str, tmp_path: Path
) -> None:
    gptmill("prepare", text_file, "--tokenizer", "byte", "--shard_tokens", "2000", "--out", "corpus")
    flags = [*TINY_FLAGS, "--order", "shards", "--max_steps", "40", "--eval_freq", "20", "--checkpoint_freq", "20"]
    cache = tmp_path / "cache"
    gptmill("train", *flags, "--data_dir", "corpus", "--run_name", "near")
    gptmill(
        "train", *flags, "--data_dir", f"{address}/corpus", "--cache_gb", "0.00002", "--run_name", "far",
        GPTMILL_CACHE=str(cache),
    )  # fmt: skip
    assert read_losses(tmp_path / "runs" / "far") == read_losses(tmp_path / "runs" / "near")
    kept = [path.stat().st_size for path in cache.rglob("*.npy")]
    assert 0 < sum(kept) <= 20_000


def test_a_shuffle_over_a_small_cache_is_refused(text_file: Path, gptmill: GptMill, address: str) -> None:
    gptmill("prepare", text_file, "--tokenizer", "byte", "--shard_tokens", "2000", "--out", "corpus")
    flags = [*TINY_FLAGS, "--data_dir", f"{address}/corpus", "--cache_gb", "0.00002"]
    process = gptmill("train", *flags, check=False)
    assert process.returncode == 2
    assert "--order shards" in process.stderr

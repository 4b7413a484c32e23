"""Corpus: prepared text as tokens, documents and batches."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

import gptmill
from gptmill.training.data_replay import replay_step

TEXTS = [f"{number}: {'word ' * (number % 7)}" for number in range(60)]


@pytest.fixture
def corpus(tmp_path: Path) -> gptmill.Corpus:
    """Sixty documents in several shards, which cut some of them."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    options = {"tokenizer": "byte", "shard_tokens": 300, "val_fraction": 0.1, "progress": False}
    return gptmill.prepare(tmp_path / "texts.jsonl", out=tmp_path / "texts", **options)


def test_documents_come_whole_and_from_any_number_on(corpus: gptmill.Corpus) -> None:
    documents = [*corpus.documents(), *corpus.documents("val")]
    assert sorted(documents) == sorted(TEXTS)
    assert len(corpus.tokens()) > 1
    train = list(corpus.documents())
    for start in range(len(train) + 2):
        assert list(corpus.documents(start=start)) == train[start:]
    tokens = next(corpus.document_tokens())
    assert tokens[0] == corpus.tokenizer.end_of_text
    assert sum(len(array) for array in corpus.document_tokens()) == corpus.info.train.tokens


def test_counts_and_fingerprint_are_those_of_the_folder(corpus: gptmill.Corpus) -> None:
    assert corpus.num_tokens == sum(len(array) for split in ("train", "val") for array in corpus.tokens(split))
    again = gptmill.open_corpus(str(corpus.path))
    assert again.fingerprint == corpus.fingerprint
    assert repr(again).startswith(f"Corpus('{corpus.path}', {corpus.info.train.tokens:,} training and ")


def test_batches_are_those_that_a_run_was_trained_on(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(straight.parent.parent)
    run, corpus = gptmill.open_run("straight"), gptmill.open_corpus("words")
    batches = corpus.batches(4, 16, seed=run.config.training.seed)
    for step in (1, 2, 3):  # of 128 tokens, so of two micro-batches
        read = [row for batch in islice(batches, 2) for row in batch.tokens.tolist()]
        rows = replay_step(run.directory, step)
        assert [corpus.tokenizer.decode_bytes(row).decode() for row in read] == [
            "".join(extract.text for extract in row.extracts) for row in rows
        ]


@pytest.mark.parametrize("order", ["shuffle", "shards", "sequential"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_go_on_from_a_saved_state_and_see_every_window(corpus: gptmill.Corpus, order: str, split: str) -> None:
    batches = corpus.batches(3, 4, split, order=order)
    first = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(batches.state_dict()))
    resumed = corpus.batches(3, 4, split, order=order)
    resumed.load_state_dict(state)
    assert state == {"position": 15}
    assert torch.equal(next(batches).tokens, next(resumed).tokens)
    assert torch.equal(next(corpus.batches(3, 4, split, order=order, start=3)).tokens, first[1].tokens)
    for batch in first:
        assert batch.tokens.shape == batch.targets.shape == (3, 4)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    singles = corpus.batches(1, 4, split, order=order)
    epoch = [tuple(next(singles).tokens[0].tolist()) for _ in range(singles.windows_per_epoch)]
    stored = [tuple(next(corpus.batches(1, 4, split, order="sequential", start=k)).tokens[0].tolist())
              for k in range(singles.windows_per_epoch)]  # fmt: skip
    assert sorted(epoch) == sorted(stored)


def test_wrong_options_are_one_error_each(corpus: gptmill.Corpus, tmp_path: Path) -> None:
    with pytest.raises(gptmill.ConfigError, match=r"(?s)split = 'test'.*order = 'random'.*batch_size = 0"):
        corpus.batches(0, 4, "test", order="random")
    with pytest.raises(gptmill.UserError, match="less than one window"):
        corpus.batches(1, 100_000)
    with pytest.raises(gptmill.ConfigError, match=r"(?s)tokeniser: .*did you mean tokenizer.*processes = 1.5"):
        gptmill.prepare("x.txt", tokeniser="byte", processes=1.5)
    with pytest.raises(gptmill.UserError, match="needs a source"):
        gptmill.prepare()
    with pytest.raises(gptmill.UserError):
        gptmill.open_corpus(tmp_path / "nothing")


def test_a_script_needs_no_main_guard_to_prepare_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "sea.txt").write_text("the sea\n" * 1000, encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "import gptmill\n"
        "print(gptmill.prepare('sea.txt', out='data', tokenizer='byte', val_fraction=0.1, processes=2))\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.count("Corpus")) == (0, 1), done.stderr

"""gptmill data, as a user runs it: info, verify, show (also of a training step) and score."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_FLAGS, GptMill

from gptmill.data.shards.opening import open_shards
from gptmill.data.tokenizers.protocol import decode

DOCUMENTS = 120


@pytest.fixture
def corpus(tmp_path: Path, gptmill: GptMill) -> Path:
    """Documents that begin with their own number, in two files."""
    generator = random.Random(5)
    texts = [
        f"<{number}>" + "".join(generator.choices("abc def", k=generator.randrange(20, 60))) for number in range(120)
    ]
    for name, part in (("first", texts[:70]), ("second", texts[70:])):
        lines = "\n".join(json.dumps({"text": text}) for text in part)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    gptmill("prepare", "first.jsonl", "second.jsonl", "--tokenizer", "byte", "--val_fraction", "0.2", "--out", "corpus")
    return tmp_path / "corpus"


def test_info_prints_counts_and_source(corpus: Path, gptmill: GptMill) -> None:
    output = gptmill("data", "info", "corpus").stdout
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    assert f"train {manifest['train']['tokens']:,} tokens of {manifest['train']['documents']} documents" in output
    assert manifest["fingerprint"] in output
    assert "  files: 2\n" in output
    assert "  reading.text_field: text\n" in output
    assert "{" not in output


def test_verify_finds_a_flipped_bit(corpus: Path, gptmill: GptMill) -> None:
    assert "is valid" in gptmill("data", "verify", "corpus").stdout
    path = corpus / "val_000000.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    process = gptmill("data", "verify", "corpus", check=False)
    assert process.returncode == 2
    assert "val_000000.npy" in process.stderr
    assert "Traceback" not in process.stderr


def test_show_prints_windows_with_their_documents_and_files(corpus: Path, gptmill: GptMill) -> None:
    shards = open_shards(corpus)
    output = gptmill("data", "show", "corpus", "--context_length", "100", "--window", "3", "--count", "2").stdout
    tokens = shards.train[0][300:500]
    expected = decode(shards.tokenizer, tokens.tolist())
    shown = re.sub(r"^(\[document .*\]|── .*)\n", "", output, flags=re.MULTILINE)
    assert "".join(shown.split()) == "".join(expected.split())
    numbers = [int(number) for number in re.findall(r"<(\d+)>", expected)]
    for number in numbers:
        origin = "first.jsonl" if number < 70 else "second.jsonl"
        assert re.search(rf"\[document \d+ of {origin}\]\n<{number}>", output)


@pytest.mark.parametrize("documents", ["packed", "whole"])
def test_a_step_names_what_it_was_trained_on(corpus: Path, gptmill: GptMill, documents: str) -> None:
    """The rows of the first step are the first tokens that the data loader of the run delivers."""
    flags = [*TINY_FLAGS, "--data_dir", "corpus", "--documents", documents, "--run_name", "seen"]
    gptmill("train", *flags, "--max_steps", "1")
    output = gptmill("data", "show", "--run", "seen", "--step", "1", "--full").stdout
    shards = open_shards(corpus)
    rows = re.findall(
        r"^row \d+: corpus/train_000000.npy, tokens (\d[\d,]*) to (\d[\d,]*)\n((?:  .*\n)+)", output, re.M
    )
    assert len(rows) >= 8
    for first, last, text in rows:
        start, end = (int(place.replace(",", "")) for place in (first, last))
        shown = "".join(re.sub(r"^  document [\d,]+ of \w+.jsonl: (\.\.\.)?", "", line) for line in text.splitlines())
        assert "".join(shown.split()) == "".join(
            decode(shards.tokenizer, shards.train[0][start : end + 1].tolist()).split()
        )


def test_scores_by_length_and_by_loss_can_order_training(corpus: Path, gptmill: GptMill) -> None:
    gptmill("data", "score", "corpus", "--by", "length")
    lengths = np.load(corpus / "scores" / "length.npy")
    starts = open_shards(corpus).train_starts[0]
    np.testing.assert_array_equal(lengths[:-1], np.diff(starts))
    gptmill("train", *TINY_FLAGS, "--data_dir", "corpus", "--run_name", "judge", "--max_steps", "2")
    gptmill("data", "score", "corpus", "--by", "loss", "--run", "judge", "--device", "cpu", "--name", "judged")
    assert len(np.load(corpus / "scores" / "judged.npy")) == len(lengths)
    flags = ["--order", "curriculum", "--score", "judged", "--run_name", "taught", "--max_steps", "2"]
    gptmill("train", *TINY_FLAGS, "--data_dir", "corpus", *flags)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "corpus", "--window", "99999"], "no window 99,999, only 0 to"),
        (["show", "corpus", "--window", "-1"], "--window -1: must be at least 0"),
        (["show", "corpus", "--count", "0"], "--count 0: must be at least 1"),
        (["show", "corpus", "--context_length", "-5"], "--context_length -5: must be at least 1"),
        (["show", "corpus", "--context_length", "99999"], "no window of 99,999 tokens; choose a smaller"),
        (["show", "corpus", "--context_length", "7" + "0" * 18], "no corpus is that large"),
        (["show", "--run", "nobody", "--step", "1"], "nobody"),
        (["score", "corpus", "--by", "loss"], "add --run RUN"),
        (["info"], "the usage is"),
        (["weigh", "corpus"], "the usage is"),
    ],
)
def test_mistakes_get_a_sentence(corpus: Path, gptmill: GptMill, words: list[str], expected: str) -> None:  # noqa: ARG001
    process = gptmill("data", *words, check=False)
    assert process.returncode == 2
    assert expected in process.stderr
    assert "Traceback" not in process.stderr

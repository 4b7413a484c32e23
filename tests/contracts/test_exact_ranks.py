"""With --exact_ranks, any number of ranks ends with the same bits: weights, optimizer, EMA and log.

A run may change its ranks at any checkpoint. Files of one step that are equal resume equally, so that it is enough to
save with every number of ranks, and to resume one of the saves with every number.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from conftest import RunRanks

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus

pytestmark = pytest.mark.slow

# Twelve micro-batches, then twenty-four: blocks of 3 and 6 are not powers of two.
FLAGS = (
    "--num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 --mini_batch_size 1 --total_batch_size 384 "
    "--batch_size_warmup 192:2 --warmup_steps 2 --max_steps 4 --checkpoint_freq 2 --eval_freq 2 --eval_tokens 160 "
    "--sample_tokens 4 --device cpu --dropout 0.1"
).split()
EVERYTHING = (
    "--mixture letters=0.7,words=0.3 --documents masked --feed_forward moe --num_experts 3 --optimizer muon "
    "--ema_decay 0.9 --snapshot_freq 1"
).split()
WAYS = {
    "everything": EVERYTHING,
    "adamw": ["--data_dir", "words"],
    "lion in fp16": "--data_dir words --precision fp16 --optimizer lion --guard off".split(),
    "modern in bf16": "--data_dir words --precision bf16 --positions rope --norm rmsnorm --tied_head false".split(),
    "whole documents": "--data_dir letters --documents whole --mtp_heads 1".split(),
}

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def _corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert words
    generator = random.Random(0)
    documents = ({"text": "ab" * generator.randint(3, 30)} for _ in range(300))
    Path("letters.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    prepare_corpus(["letters.jsonl"], PrepareRequest(out="letters", tokenizer="byte"), lambda _progress: None)


@pytest.fixture
def train(run_ranks: RunRanks) -> Train:
    """Trains with a number of ranks; returns the run's folder."""

    def run(name: str, ranks: int, *flags: str) -> Path:
        words = ["train", *flags, "--run_name", name]
        if ranks == 1:
            assert run_guarded(words) == 0
        else:
            run_ranks(*words, count=ranks)
        return Path("runs") / name

    return run


def read_bits(run: Path, step: int) -> dict[str, object]:
    """All tensors of a checkpoint, and its values but for the run's name and the ranks that computed it."""
    folder = run / f"checkpoints/step_{step:06d}"
    found: dict[str, object] = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    values = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))["values"]
    return found | {name: value for name, value in values.items() if name not in ("config", "ranks")}


def read_log(run: Path) -> list[tuple[float, ...]]:
    """Loss and norm of every step, and the validation losses, in full."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("step", "loss", "grad_norm", "val_loss", "ema_loss", "by_corpus", "expert_loads")
    return [
        tuple(event.get(name) for name in names) for event in events if event["event"] in ("StepLogged", "EvalDone")
    ]


def assert_same(one: Path, other: Path, steps: tuple[int, ...] = (4,)) -> None:
    for step in steps:
        first, second = read_bits(one, step), read_bits(other, step)
        assert first.keys() == second.keys()
        assert [name for name in first if first[name] != second[name]] == []
    assert (one / "log.txt").read_bytes() == (other / "log.txt").read_bytes()
    assert read_log(one) == read_log(other)


def test_one_two_and_four_ranks_end_with_the_same_bits_however_they_take_turns(train: Train) -> None:
    straight = {ranks: train(f"by_{ranks}", ranks, *FLAGS, *EVERYTHING) for ranks in (1, 2, 4)}
    for ranks in (2, 4):
        assert_same(straight[1], straight[ranks], (2, 4))
    for ranks in (1, 2):  # from the other end of the matrix: by four, then by fewer
        shutil.copytree(straight[4], f"runs/again_{ranks}", symlinks=True)
        assert_same(train(f"again_{ranks}", ranks, "--resume", "2"), straight[1])


@pytest.mark.torture
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_matrix(train: Train, way: str) -> None:
    straight = {ranks: train(f"by_{ranks}", ranks, *FLAGS, *WAYS[way]) for ranks in (1, 2, 3, 4)}
    for ranks in (2, 3, 4):
        assert_same(straight[1], straight[ranks], (2, 4))
    for before, after in product((1, 2, 3, 4), repeat=2):
        name = f"{before}_then_{after}"
        shutil.copytree(straight[before], f"runs/{name}", symlinks=True)
        assert_same(train(name, after, "--resume", "2"), straight[1])

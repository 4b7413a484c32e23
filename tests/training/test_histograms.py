"""Histograms of weights and gradients: right counts in the right buckets, taken in real steps without changing them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS, GptMill, RunRanks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptmill.models.kernels import bucket_count
from gptmill.runs.histogram_buckets import EDGES, LEVELS, NUM_BUCKETS, trim
from gptmill.training.histograms import count_buckets


def test_every_value_is_in_the_bucket_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_count, "CHUNK", 1000)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 100, generator=generator) * 10.0 ** torch.randint(-12, 3, (40, 100), generator=generator)
    counts = count_buckets(values).tolist()
    assert len(counts) == NUM_BUCKETS == len(EDGES) - 1
    expected = [0] * NUM_BUCKETS
    for value in values.flatten().tolist():
        inside = [index for index in range(NUM_BUCKETS) if EDGES[index] <= value <= EDGES[index + 1]]
        expected[inside[0] if inside else (NUM_BUCKETS - 1 if value > 0 else 0)] += 1
    assert counts == expected


def test_zeros_giants_and_values_that_are_not_finite() -> None:
    counts = count_buckets(torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e30, math.nan, math.inf, -math.inf])).tolist()
    assert (counts[LEVELS], counts[0], counts[-1], sum(counts)) == (3, 1, 1, 5)
    assert sum(count_buckets(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).tolist()) == 2


def test_empty_buckets_at_both_ends_are_trimmed() -> None:
    rows = torch.stack([count_buckets(torch.tensor(values)) for values in ([1.0, 1.1, 2.0], [], [-1e30, 1e30])])
    (counts, edges), empty, (all_counts, all_edges) = trim(rows.numpy())
    assert counts.tolist() == [2, 0, 1]
    assert edges.tolist() == pytest.approx([1.0, math.sqrt(2), 2.0, math.sqrt(8)])
    assert [len(part) for part in empty] == [0, 0]
    assert (len(all_counts), len(all_edges)) == (NUM_BUCKETS, NUM_BUCKETS + 1)


def read_losses(folder: Path) -> list[float]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines if '"StepLogged"' in line]


def test_a_run_takes_them_at_their_frequency_and_trains_as_without(
    gptmill: GptMill, words: list[str], run_ranks: RunRanks, tmp_path: Path
) -> None:
    flags = ["train", *TINY_FLAGS, *words, *"--max_steps 4 --eval_freq 100".split()]
    gptmill(*flags, "--run_name", "plain")
    asked = [*flags, "--use_tensorboard", "--histogram_freq", "2"]
    run_ranks(*asked, "--run_name", "with", "--total_batch_size", "128")
    plain, taken = tmp_path / "runs/plain", tmp_path / "runs/with"
    assert read_losses(taken) == pytest.approx(read_losses(plain), rel=1e-5)
    board = EventAccumulator(str(taken / "tensorboard"), {"histograms": 0})
    board.Reload()
    tags = board.Tags()["histograms"]
    names = {tag.partition("/")[2] for tag in tags}
    assert len(tags) == 2 * len(names) > 20
    for tag in tags:
        histograms = board.Histograms(tag)
        assert [histogram.step for histogram in histograms] == [2, 4], tag
    counted = sum(board.Histograms(f"weights/{name}")[0].histogram_value.num for name in names)
    assert counted == json.loads((taken / "events.jsonl").read_text(encoding="utf-8").splitlines()[0])["parameters"]


def test_histograms_without_a_tracker_are_refused(gptmill: GptMill) -> None:
    process = gptmill("train", "demo", "--histogram_freq", "5", check=False)
    assert process.returncode == 2
    assert "add --use_tensorboard" in process.stderr

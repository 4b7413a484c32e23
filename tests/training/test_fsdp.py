"""Ranks that share all weights train as one rank does: the same losses, and the same state in the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import shared_cases
import torch
from conftest import RunRanks
from shared_cases import CASES, STEPS, read_outcome, run_case
from tiny import CPU, make_shards

from gptmill.config.run import ParallelName
from gptmill.data.run_corpora import Corpora

# How far losses may differ where every number is rounded to a few bits: a rounding that falls the other way grows, with
# DDP too. Sharded weights of embeddings and norms are rounded as well.
TOLERANCES = {"fp16": 3e-3, "bf16": 3e-3, "fp8": 3e-3}
QUICK = ("gpt2", "experts", "fused")


@pytest.fixture
def corpora(text_file: Path) -> Corpora:
    return Corpora((make_shards(text_file),))


def compare(
    corpora: Corpora,
    run_ranks: RunRanks,
    folder: Path,
    strategy: ParallelName,
    names: Sequence[str],
    count: int,
    machines: int = 1,
    steps: int = STEPS,
) -> None:
    """Trains each case on `count` ranks and on one."""
    out = folder / strategy
    out.mkdir()
    corpus = str(corpora.shards[0].location)
    program = [shared_cases.__file__]
    run_ranks(strategy, ",".join(names), corpus, str(out), str(steps), program=program, count=count, machines=machines)
    for name in names:
        together, shared = read_outcome(out, name)
        alone, whole = run_case(name, corpora, CPU, steps)
        limit = TOLERANCES.get(name, 1e-5 if steps == STEPS else 1e-4)
        assert together.losses == pytest.approx(alone.losses, abs=limit), name
        assert together.norms == pytest.approx(alone.norms, rel=100 * limit), name
        assert together.val_losses == pytest.approx(alone.val_losses, abs=limit), name
        assert together.losses[-1] == together.losses[-2], f"{name}: a rollback changes the next step"
        assert (together.still, together.counted) == (alone.still, alone.counted), name
        assert name == "zeros" or not together.still, f"{name}: not every parameter moves"
        assert shared.keys() == whole.keys(), name
        if name not in TOLERANCES:
            assert together.sample == alone.sample, name
            for key, tensor in whole.items():
                torch.testing.assert_close(shared[key], tensor, rtol=0, atol=3 * limit, msg=f"{name}: {key}")


def test_two_ranks_that_shard_a_model_train_as_one(corpora: Corpora, run_ranks: RunRanks, tmp_path: Path) -> None:
    compare(corpora, run_ranks, tmp_path, "fsdp", QUICK, count=2)


def test_two_machines_of_two_ranks_each_train_as_one(corpora: Corpora, run_ranks: RunRanks, tmp_path: Path) -> None:
    compare(corpora, run_ranks, tmp_path, "hsdp", ["muon"], count=4, machines=2, steps=1)


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_over_fifty_steps(
    corpora: Corpora, run_ranks: RunRanks, tmp_path: Path, strategy: ParallelName, name: str
) -> None:
    compare(corpora, run_ranks, tmp_path, strategy, [name], count=4, machines=2, steps=50)


@pytest.mark.torture
def test_a_single_rank_that_shards_has_the_bits_of_a_plain_one(
    corpora: Corpora, run_ranks: RunRanks, tmp_path: Path
) -> None:
    compare(corpora, run_ranks, tmp_path, "fsdp", QUICK, count=1)
    for name in QUICK:
        alone, whole = run_case(name, corpora, CPU)
        together, shared = read_outcome(tmp_path / "fsdp", name)
        assert together == alone
        assert all(torch.equal(shared[key], tensor) for key, tensor in whole.items())

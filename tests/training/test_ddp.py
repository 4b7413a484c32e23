"""Ranks exchange gradients once per step, in the last micro-batch, however many there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import CPU, make_config, make_reader, make_shards
from torch.nn.parallel import DistributedDataParallel

from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.runtime.signals import StopFlag
from gptmill.training.plan import make_plan
from gptmill.training.state import build_state
from gptmill.training.step import train_step


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("mini_batch_size", [8, 4, 1])
def test_gradients_are_exchanged_once_per_step(text_file: Path, mini_batch_size: int) -> None:
    config = make_config(total_batch_size=8 * 16, mini_batch_size=mini_batch_size, context_length=16)
    corpora = Corpora((make_shards(text_file),))
    sampler = build_sampler(config, corpora)
    plan = make_plan(config, sampler, corpora.tokenizer, CPU)
    assert plan.micro_batches == 8 // mini_batch_size
    state = build_state(config, plan, CPU)
    assert isinstance(state.forward, DistributedDataParallel)
    exchanged: list[int] = []

    def count(_state, bucket):  # DDP reads annotations itself, and takes none for an answer
        exchanged.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    state.forward.register_comm_hook(None, count)
    with open_data_loader(sampler, make_reader(corpora), CPU.device, itertools.count(0, mini_batch_size)) as loader:
        for _ in range(2):
            exchanged.clear()
            train_step(state, loader, config, plan, CPU, StopFlag())
            assert exchanged
            assert len(exchanged) == len(set(exchanged)), "a bucket of gradients was exchanged twice in one step"

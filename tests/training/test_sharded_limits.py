"""What a sharded run does differently: it ends where it cannot ask the other ranks, and compiles around its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shared_cases import Training
from tiny import make_config, make_shards

from gptmill.config.errors import UserError
from gptmill.config.run import EvaluationConfig
from gptmill.data.run_corpora import Corpora
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.evals.own_evaluators import OwnEvaluators
from gptmill.models.gpt import GPT
from gptmill.runtime.parallel.mesh import arrange_ranks
from gptmill.runtime.world import World
from gptmill.training.dry_run import dry_run


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One rank that shards: all code of several, without their waiting."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield arrange_ranks(World(0, 1, torch.device("cpu")), "fsdp")
    dist.destroy_process_group()


def test_a_rank_that_runs_out_of_memory_asks_no_other(
    world: World, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(make_config(), Corpora((make_shards(text_file),)), world)

    def run_out(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(GPT, "_run_blocks", run_out)
    monkeypatch.setattr(World, "any_rank", lambda *_arguments: pytest.fail("the others wait elsewhere"))
    with pytest.raises(UserError, match="beside rank 0's part of the model; use a smaller --mini_batch_size"):
        dry_run(training.state, training.config, training.plan, world)


def test_evaluators_of_plug_ins_are_refused(world: World) -> None:
    with pytest.raises(UserError, match="they run on rank 0, which holds a part of the weights only"):
        OwnEvaluators(EvaluationConfig(evaluators="rhymes"), ByteTokenizer(), world)


def test_a_compiled_sharded_model_has_no_graph_breaks(world: World, text_file: Path) -> None:
    from torch._dynamo.utils import counters

    corpora = Corpora((make_shards(text_file),))
    fields = {"total_batch_size": 64, "gradient_checkpointing": "full"}
    plain, compiled = (Training(make_config(**fields), corpora, world) for _ in range(2))
    counters.clear()
    model = compiled.state.model
    assert isinstance(model, GPT)
    model.compile_in_place(backend="eager")
    assert compiled.step().read() == plain.step().read()
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch._dynamo.reset()

"""Micro-batches captured as CUDA graphs give the same results as eager ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_config, make_shards, open_tiny

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config as load_recipe_config
from gptmill.data.shards.opening import TokenShards
from gptmill.models.fused.dispatch import is_small
from gptmill.models.language_model import Losses
from gptmill.runtime.world import World
from gptmill.training.micro_batch import WARM_UP, EagerPass, GraphedPass, Replay, check_cuda_graphs, choose_cuda_graphs

GPU = World(0, 1, torch.device("cuda"))
FIELDS: dict[str, Any] = {"total_batch_size": 128, "mini_batch_size": 2, "context_length": 16, "max_steps": 8}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


class FakeGraphs:
    """Stands in for CUDA graphs on a CPU: a replay runs the captured function again on the same tensors."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, work: Replay) -> Replay:
        self.captured += 1

        def replay() -> Losses:
            self.replayed += 1
            return work()

        return replay


def capture_passes(tiny: Tiny) -> FakeGraphs:
    graphs = FakeGraphs()
    assert isinstance(tiny.state.micro_batch_runner, EagerPass)
    tiny.state.micro_batch_runner = GraphedPass(tiny.state.micro_batch_runner, tiny.state.model, graphs.capture)
    tiny.state.optimizer.keeps_gradients = True
    return graphs


def train(tiny: Tiny, steps: int) -> list[float]:
    return [tiny.step().read().loss for _ in range(steps)]


def assert_equal(tiny: Tiny, other: Tiny) -> None:
    for name, parameter in tiny.copy_parameters().items():
        torch.testing.assert_close(parameter, other.copy_parameters()[name], rtol=0, atol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"dropout": 0.3}, {"optimizer": "muon"}, {"label_smoothing": 0.1}])
def test_captured_micro_batches_train_alike(shards: TokenShards, fields: dict[str, Any]) -> None:
    eager, graphed = (open_tiny(shards, **FIELDS, **fields) for _ in range(2))
    graphs = capture_passes(graphed)
    assert train(graphed, 3) == train(eager, 3)
    assert_equal(graphed, eager)
    assert (graphs.captured, graphs.replayed) == (1, 3 * graphed.plan.count_micro_batches(1) - WARM_UP)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"tied_head": False, "bias": False}, {"optimizer": "muon"}])
def test_weights_are_cast_once_for_all_micro_batches(shards: TokenShards, fields: dict[str, Any]) -> None:
    """The copies are there while the pass computes only, are the weights of the step, and their gradients the same."""
    eager, graphed = (open_tiny(shards, **FIELDS, **fields, precision="bf16", max_lr=0.02) for _ in range(2))
    capture_passes(graphed)
    assert train(graphed, 4) == pytest.approx(train(eager, 4), rel=1e-4)
    for name, parameter in graphed.copy_parameters().items():
        own, expected = parameter, eager.copy_parameters()[name]
        if name.endswith("qkv.bias"):  # that of keys changes no attention: its gradient is noise, which Adam enlarges
            own, expected = (torch.cat((bias.chunk(3)[0], bias.chunk(3)[2])) for bias in (own, expected))
        torch.testing.assert_close(own, expected, rtol=0, atol=2e-3, msg=name)
    assert graphed.state.model.tied_head_copy is None
    assert graphed.state.model.state_dict().keys() == eager.state.model.state_dict().keys()
    assert all(parameter.dtype == torch.float32 for parameter in graphed.state.model.parameters())


def test_gradients_that_moved_are_captured_again(shards: TokenShards) -> None:
    """As they do where a run resumes with another optimizer."""
    eager, graphed = (open_tiny(shards, **FIELDS) for _ in range(2))
    graphs = capture_passes(graphed)
    for tiny in (eager, graphed):
        train(tiny, 2)
        tiny.state.optimizer.reset_state()
    assert train(graphed, 2) == train(eager, 2)
    assert_equal(graphed, eager)
    assert graphs.captured == 2


def test_what_a_graph_reads_and_writes_stays_where_it_is(shards: TokenShards) -> None:
    """Through steps and a rollback: a graph knows its tensors by their addresses only."""
    tiny = open_tiny(shards, **FIELDS, precision="bf16")
    capture_passes(tiny)

    def list_addresses() -> list[int]:
        runner, parameters = tiny.state.micro_batch_runner, list(tiny.state.model.parameters())
        assert isinstance(runner, GraphedPass)
        tensors = [*parameters, *runner._weights.copies.values(), *(each.grad for each in parameters)]
        return [each.data_ptr() for each in tensors if each is not None]

    train(tiny, 1)
    before = list_addresses()
    saved = copy.deepcopy(tiny.state.make_checkpoint({}))
    train(tiny, 2)
    tiny.state.restore(saved, "here")
    train(tiny, 1)
    assert len(before) > 3 * len(list(tiny.state.model.blocks))
    assert list_addresses() == before


def test_another_shape_is_captured_again(shards: TokenShards) -> None:
    stages = {"context_warmup": "8:2"}
    eager, graphed = (open_tiny(shards, **FIELDS, **stages) for _ in range(2))
    graphs = capture_passes(graphed)
    assert train(graphed, 4) == train(eager, 4)
    assert graphs.captured == 2


@pytest.mark.parametrize(
    ("world", "fields", "comeagert"),
    [
        (CPU, {}, "without an NVIDIA GPU"),
        (World(0, 2, torch.device("cuda")), {}, "under torchrun"),
        (GPU, {"feed_forward": "moe"}, "with experts"),
        (GPU, {"documents": "masked"}, "with documents masked"),
        (GPU, {"gradient_checkpointing": "full"}, "with gradient_checkpointing"),
    ],
)
def test_what_cannot_be_captured_is_refused_or_left_out(world: World, fields: dict[str, Any], comeagert: str) -> None:
    assert not choose_cuda_graphs(make_config(**FIELDS, **fields), world, is_small=True)
    with pytest.raises(UserError, match=comeagert):
        check_cuda_graphs(make_config(**FIELDS, **fields, cuda_graphs="on"), world)


@pytest.mark.parametrize(
    ("fields", "is_small", "chosen"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"cuda_graphs": "on"}, False, True),
        ({"cuda_graphs": "off"}, True, False),
        ({"compile": True, "compile_mode": "reduce-overhead"}, False, True),
        ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"}, False, False),
        ({"compile_mode": "reduce-overhead"}, False, False),
    ],
)
def test_small_micro_batches_are_captured_and_others_where_asked(
    fields: dict[str, Any], is_small: bool, chosen: bool
) -> None:
    assert choose_cuda_graphs(make_config(**FIELDS, **fields), GPU, is_small=is_small) == chosen


@pytest.mark.parametrize(
    ("recipe", "chosen"),
    [("shakespeare-char", True), ("enwik8", True), ("books-124m-modern", False), ("books-124m", False)],
)
def test_recipes_are_captured_where_the_host_is_the_slower_one(recipe: str, chosen: bool) -> None:
    config = load_recipe_config(recipe, {})
    assert is_small(config.training.mini_batch_size * config.model.context_length, config.model.embd_size) == chosen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="eager"),
        pytest.param("--compile", id="compiled"),
        pytest.param("--compile --dropout 0.2 --optimizer muon", id="compiled, with dropout and Muon"),
        pytest.param("--precision fp16", id="fp16"),
    ],
)
def test_a_gpu_trains_alike_with_graphs_and_without(gptmill: Any, text_file: Path, tmp_path: Path, flags: str) -> None:
    """Through evaluations, snapshots and checkpoints."""
    losses = {}
    for choice in ("on", "off"):
        done = gptmill(
            *f"train demo --corpus {text_file} --device cuda --logdir {tmp_path} --run_name {choice}".split(),
            *"--max_steps 40 --eval_freq 10 --snapshot_freq 7 --mini_batch_size 4 --sample_tokens 0".split(),
            *f"--cuda_graphs {choice} --kernels head".split(),  # which are used by default depends on the graphs
            *flags.split(),
        )
        assert done.returncode == 0, done.stderr
        assert ("captured as CUDA graphs" in done.stdout) == (choice == "on")
        lines = (tmp_path / choice / "events.jsonl").read_text(encoding="utf-8").splitlines()
        losses[choice] = [event["loss"] for event in map(json.loads, lines) if event["event"] == "StepLogged"]
    assert len(losses["on"]) == 40
    assert losses["on"][:10] == pytest.approx(losses["off"][:10], rel=1e-3)
    assert losses["on"] == pytest.approx(losses["off"], rel=0.1)  # by then rounding has become a matter of luck

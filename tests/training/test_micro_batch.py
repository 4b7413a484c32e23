"""Micro-batches that are recorded give what the plain ones give, wherever gradients are and whatever comes between."""

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
from gptmill.models.gpt import Losses
from gptmill.runtime.world import World
from gptmill.training.micro_batch import WARM_UP, EagerPass, GraphedPass, Replay, check_cuda_graphs, choose_cuda_graphs

GPU = World(0, 1, torch.device("cuda"))
FIELDS: dict[str, Any] = {"total_batch_size": 128, "mini_batch_size": 2, "context_length": 16, "max_steps": 8}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


class Recorder:
    """A recording as a CPU can have one: what was written down is done again, on what is then in the same places."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, work: Replay) -> Replay:
        self.recorded += 1

        def replay() -> Losses:
            self.replayed += 1
            return work()

        return replay


def record_passes(tiny: Tiny) -> Recorder:
    recorder = Recorder()
    assert isinstance(tiny.state.passes, EagerPass)
    tiny.state.passes = GraphedPass(tiny.state.passes, tiny.state.model, recorder.record)
    tiny.state.optimizer.keeps_gradients = True
    return recorder


def train(tiny: Tiny, steps: int) -> list[float]:
    return [tiny.step().read().loss for _ in range(steps)]


def assert_equal(tiny: Tiny, other: Tiny) -> None:
    for name, parameter in tiny.copy_parameters().items():
        torch.testing.assert_close(parameter, other.copy_parameters()[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("fields", [{}, {"dropout": 0.3}, {"optimizer": "muon"}, {"label_smoothing": 0.1}])
def test_recorded_micro_batches_train_alike(shards: TokenShards, fields: dict[str, Any]) -> None:
    plain, recorded = (open_tiny(shards, **FIELDS, **fields) for _ in range(2))
    recorder = record_passes(recorded)
    assert train(recorded, 3) == train(plain, 3)
    assert_equal(recorded, plain)
    assert (recorder.recorded, recorder.replayed) == (1, 3 * recorded.plan.count_micro_batches(1) - WARM_UP)


@pytest.mark.parametrize("fields", [{}, {"tied_head": False, "bias": False}, {"optimizer": "muon"}])
def test_weights_are_cast_once_for_all_micro_batches(shards: TokenShards, fields: dict[str, Any]) -> None:
    """The copies are there while the pass computes only, are the weights of the step, and their gradients the same."""
    plain, recorded = (open_tiny(shards, **FIELDS, **fields, precision="bf16", max_lr=0.02) for _ in range(2))
    record_passes(recorded)
    assert train(recorded, 4) == pytest.approx(train(plain, 4), rel=1e-4)
    for name, parameter in recorded.copy_parameters().items():
        torch.testing.assert_close(parameter, plain.copy_parameters()[name], rtol=0, atol=2e-3, msg=name)
    assert recorded.state.model.head_copy is None
    assert recorded.state.model.state_dict().keys() == plain.state.model.state_dict().keys()
    assert all(parameter.dtype == torch.float32 for parameter in recorded.state.model.parameters())


def test_gradients_that_moved_are_recorded_anew(shards: TokenShards) -> None:
    """As they do where a run goes on with another optimizer."""
    plain, recorded = (open_tiny(shards, **FIELDS) for _ in range(2))
    recorder = record_passes(recorded)
    for tiny in (plain, recorded):
        train(tiny, 2)
        tiny.state.optimizer.forget()
    assert train(recorded, 2) == train(plain, 2)
    assert_equal(recorded, plain)
    assert recorder.recorded == 2


def test_what_a_recording_reads_and_writes_stays_where_it_is(shards: TokenShards) -> None:
    """Through steps, and where a run goes back to a checkpoint: a graph knows its tensors by their addresses alone."""
    tiny = open_tiny(shards, **FIELDS, precision="bf16")
    record_passes(tiny)

    def list_addresses() -> list[int]:
        passes, parameters = tiny.state.passes, list(tiny.state.model.parameters())
        assert isinstance(passes, GraphedPass)
        tensors = [*parameters, *passes._weights.copies.values(), *(each.grad for each in parameters)]
        return [each.data_ptr() for each in tensors if each is not None]

    train(tiny, 1)
    before = list_addresses()
    saved = copy.deepcopy(tiny.state.make_checkpoint({}))
    train(tiny, 2)
    tiny.state.restore(saved, "here")
    train(tiny, 1)
    assert len(before) > 3 * len(list(tiny.state.model.blocks))
    assert list_addresses() == before


def test_another_shape_is_recorded_anew(shards: TokenShards) -> None:
    stages = {"context_warmup": "8:2"}
    plain, recorded = (open_tiny(shards, **FIELDS, **stages) for _ in range(2))
    recorder = record_passes(recorded)
    assert train(recorded, 4) == train(plain, 4)
    assert recorder.recorded == 2


@pytest.mark.parametrize(
    ("world", "fields", "complaint"),
    [
        (CPU, {}, "without an NVIDIA GPU"),
        (World(0, 2, torch.device("cuda")), {}, "under torchrun"),
        (GPU, {"feed_forward": "moe"}, "with experts"),
        (GPU, {"documents": "masked"}, "with documents masked"),
        (GPU, {"gradient_checkpointing": "full"}, "with gradient_checkpointing"),
    ],
)
def test_what_cannot_be_recorded_is_refused_or_left_out(world: World, fields: dict[str, Any], complaint: str) -> None:
    assert not choose_cuda_graphs(make_config(**FIELDS, **fields), world, is_small=True)
    with pytest.raises(UserError, match=complaint):
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
def test_small_micro_batches_are_recorded_and_others_where_asked(
    fields: dict[str, Any], is_small: bool, chosen: bool
) -> None:
    assert choose_cuda_graphs(make_config(**FIELDS, **fields), GPU, is_small=is_small) == chosen


@pytest.mark.parametrize(
    ("recipe", "chosen"),
    [("shakespeare-char", True), ("enwik8", True), ("books-124m-modern", False), ("books-124m", False)],
)
def test_recipes_are_recorded_where_the_host_is_the_slower_one(recipe: str, chosen: bool) -> None:
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
        assert ("recorded as CUDA graphs" in done.stdout) == (choice == "on")
        lines = (tmp_path / choice / "events.jsonl").read_text(encoding="utf-8").splitlines()
        losses[choice] = [event["loss"] for event in map(json.loads, lines) if event["event"] == "StepLogged"]
    assert len(losses["on"]) == 40
    assert losses["on"][:10] == pytest.approx(losses["off"][:10], rel=1e-3)
    assert losses["on"] == pytest.approx(losses["off"], rel=0.1)  # by then rounding has become a matter of luck

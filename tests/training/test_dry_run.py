"""What does not fit into memory shows before the first step, with a setting that does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_environment
from tiny import CPU, Tiny, make_shards, open_tiny
from zygote import Zygote

from gptmill.config.errors import UserError
from gptmill.data.shards.opening import TokenShards
from gptmill.models.gpt import GPT
from gptmill.models.language_model import Losses
from gptmill.training.dry_run import dry_run


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def limit_rows(monkeypatch: pytest.MonkeyPatch, most: dict[str, int]) -> None:
    """As if the memory held so many windows of a micro-batch, by how much is computed again."""
    forward = GPT.forward

    def forward_or_run_out(model: GPT, tokens: torch.Tensor, *rest: Any) -> Losses:
        if len(tokens) > most[model.activation_checkpointing]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return forward(model, tokens, *rest)

    monkeypatch.setattr(GPT, "forward", forward_or_run_out)


def dry_run_tiny(tiny: Tiny) -> None:
    dry_run(tiny.state, tiny.config, tiny.plan, CPU)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion"])
def test_a_dry_run_changes_nothing(shards: TokenShards, optimizer: str) -> None:
    fields = {"optimizer": optimizer, "dropout": 0.1, "ema_decay": 0.9}
    tried, untouched = open_tiny(shards, **fields), open_tiny(shards, **fields)
    tried.step(), untouched.step()
    dry_run_tiny(tried)
    for _ in range(2):
        assert tried.step().read() == untouched.step().read()
    first, second = (tiny.state.make_checkpoint({}) for tiny in (tried, untouched))
    assert first.values == second.values
    for group, tensors in first.tensors.items():
        assert all(tensor.equal(second.tensors[group][name]) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "advice"),
    [
        ({"none": 5, "full": 8}, "--mini_batch_size 4 does"),
        ({"none": 1, "full": 8}, "--mini_batch_size 1 does"),
        ({"none": 0, "full": 8}, "--gradient_checkpointing full does"),
        ({"none": 0, "full": 3}, "--mini_batch_size 2 --gradient_checkpointing full does"),
        ({"none": 0, "full": 0}, "use a shorter --context_length or a smaller model"),
    ],
)
def test_the_advice_is_what_was_tried_and_fits(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch, most: dict[str, int], advice: str
) -> None:
    tiny = open_tiny(shards, mini_batch_size=8)
    limit_rows(monkeypatch, most)
    with pytest.raises(UserError, match="out of memory on cpu: one micro-batch of mini_batch_size 8") as caught:
        dry_run_tiny(tiny)
    assert advice in str(caught.value)


def test_any_other_error_is_not_taken_for_one_of_memory(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> Losses:
        raise RuntimeError("shapes do not match")

    tiny = open_tiny(shards)
    monkeypatch.setattr(GPT, "forward", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        dry_run_tiny(tiny)


def spoil_gradients(model: GPT) -> None:
    model.token_embedding.weight.register_hook(lambda gradient: gradient * math.nan)


def test_gradients_of_a_fresh_model_that_are_no_numbers_end_the_run_before_it_begins(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    spoil_gradients(tiny.state.model)
    with pytest.raises(UserError, match="gradients of a fresh model on random tokens are not finite on cpu"):
        dry_run_tiny(tiny)


def test_later_non_finite_gradients_are_for_the_spike_detector(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    tiny.step()
    spoil_gradients(tiny.state.model)
    dry_run_tiny(tiny)


@pytest.mark.parametrize(
    ("sizes", "sentence", "advice"),
    [
        (
            "--embd_size 16 --mini_batch_size 4096 --total_batch_size 1048576",
            "out of memory on cpu: one micro-batch of mini_batch_size 4096 x context_length 256 does not fit",
            "--mini_batch_size",
        ),
        ("--embd_size 12288", "out of memory on cpu: the model and its optimizer do not fit", "use a smaller model"),
        ("--embd_size 1048576", "a checkpoint takes at least", "free disk space"),
    ],
)
def test_too_little_memory_or_disk_is_told_with_what_to_change_and_nothing_is_written(
    text_file: Path, tmp_path: Path, zygote: Zygote, sizes: str, sentence: str, advice: str
) -> None:
    flags = (
        f"--corpus {text_file} --tokenizer byte --val_fraction 0.4 --num_layers 1 {sizes} --num_heads 1 "
        "--context_length 256 --eval_tokens 256 --device cpu --run_name large"
    ).split()
    command = ["-m", "gptmill", "train", *flags]
    process = zygote.run(command, tmp_path, make_environment(), spare_memory_bytes=2**31)
    assert process.returncode == 2, process.stderr
    assert sentence in process.stderr
    assert advice in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "runs").exists()

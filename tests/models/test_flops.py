"""The count of operations: the figure known for GPT-2, and what torch counts while models of all kinds are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compositions import COMPOSITIONS, CONTEXT, TINY, VOCAB, draw_tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptmill.config.recipes import load_recipe
from gptmill.config.run import ModelConfig
from gptmill.config.schema import build_config
from gptmill.models.flops import count_flops
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.losses import LossConfig

ROWS = 3


def count_in_training(model: GPT, width: int = CONTEXT) -> float:
    """Operations per token, of all matmuls forward and backward; attention is plain matmuls, so that it counts."""
    tokens = draw_tokens(ROWS, width)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model.train()(tokens, tokens).objective.backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.slow
@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_the_count_is_what_torch_counts_in_training(config: ModelConfig) -> None:
    """To the operation. Plain matmuls fill the whole table of a windowed layer, so that windows are compared apart."""
    unlimited = replace(config, attention_windows=None)
    assert count_flops(unlimited, VOCAB, CONTEXT) == count_in_training(build_gpt(config, VOCAB, seed=0))


@pytest.mark.parametrize("width", [1, 4, CONTEXT])
def test_shorter_windows_cost_less_attention_and_the_same_matrices(width: int) -> None:
    assert count_flops(TINY, VOCAB, width) == count_in_training(build_gpt(TINY, VOCAB, seed=0), width)


def test_a_layer_with_a_window_is_counted_as_one_of_so_short_a_context() -> None:
    windowed = replace(TINY, num_layers=3, attention_windows="5,full,99")
    layers = [count_flops(replace(TINY, num_layers=1), VOCAB, width) for width in (5, CONTEXT, CONTEXT)]
    head = 6 * VOCAB * TINY.embd_size
    assert count_flops(windowed, VOCAB, CONTEXT) == sum(layers) - 2 * head


def test_experts_that_a_token_does_not_go_to_add_their_row_of_the_router_alone() -> None:
    mixture = COMPOSITIONS["moe"]
    wider = replace(mixture, feed_forward=replace(mixture.feed_forward, num_experts=9))
    added = count_flops(wider, VOCAB, CONTEXT) - count_flops(mixture, VOCAB, CONTEXT)
    assert added == 6 * mixture.num_layers * 5 * mixture.embd_size


def test_what_is_computed_again_to_save_memory_does_not_count() -> None:
    model = build_gpt(TINY, VOCAB, seed=0)
    model.loss_config = LossConfig(chunk_tokens=CONTEXT)
    head = 2 * VOCAB * TINY.embd_size
    assert count_in_training(model) == count_flops(TINY, VOCAB, CONTEXT) + head


def test_gpt2_has_its_known_figure() -> None:
    config = build_config(ModelConfig, load_recipe("gpt2-124m"))
    matrices, attention = 12 * 12 * 768 * 768 + 768 * 50_304, 12 * 12 * 768 * 1024
    assert matrices == pytest.approx(123.57e6, rel=1e-4)
    assert count_flops(config, 50_304, 1024) == 6 * matrices + attention
    assert count_flops(config, 50_304, 1024) == pytest.approx(854.65e6, rel=1e-5)


def test_a_tied_head_is_multiplied_with_like_one_of_its_own() -> None:
    assert count_flops(replace(TINY, tied_head=False), VOCAB, CONTEXT) == count_flops(TINY, VOCAB, CONTEXT)

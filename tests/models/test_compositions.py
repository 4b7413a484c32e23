"""What single parts of a composition promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compositions import COMPOSITIONS, CONTEXT, ROPE, TINY, VOCAB, build_wild, draw_tokens

from gptmill.config.model import LinearScaling, ModelConfig, Rope
from gptmill.models.attention import BlockContext
from gptmill.models.block import Block
from gptmill.models.gpt import build_gpt
from gptmill.models.norms import build_head_norm
from gptmill.models.rotary import apply_rope, make_rope

all_compositions = pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())


@all_compositions
def test_fresh_weights_are_what_their_names_say(config: ModelConfig) -> None:
    model = build_gpt(replace(config, embd_size=64, head_size=16), 200, seed=5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("value_gate"):
            assert (parameter == 0.5).all(), name
        else:
            is_residual = name.endswith(("proj.weight", "down_proj"))
            std = 0.02 / math.sqrt(2 * config.num_layers) if is_residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name


@all_compositions
@torch.no_grad()
def test_projections_that_begin_at_zero_make_every_block_the_identity(config: ModelConfig) -> None:
    model = build_gpt(replace(config, zero_init=True), VOCAB, seed=1).eval()
    plain = build_gpt(config, VOCAB, seed=1).eval()
    x, tokens = torch.randn(2, CONTEXT, 16), draw_tokens(2, CONTEXT)
    for blocks, is_identity in ((model.blocks, True), (model.extra_blocks, True), (plain.blocks, False)):
        for layer, block in enumerate(blocks):
            assert isinstance(block, Block)
            values = torch.randn(2, CONTEXT, config.kv_heads * config.head_width)
            context = BlockContext(make_rope(torch.arange(CONTEXT), config), value_embedding_BTW=values)
            y, _ = block(x, context)
            assert torch.equal(y, x) == is_identity, layer
    assert not torch.equal(model.logits(tokens), plain.logits(tokens))


@torch.no_grad()
def test_a_soft_cap_squeezes_logits_and_keeps_their_order() -> None:
    capped, plain, tokens = build_wild(COMPOSITIONS["soft-cap"]), build_wild(), draw_tokens(2, CONTEXT)
    logits = plain.logits(tokens)
    assert logits.abs().max() > 2
    torch.testing.assert_close(capped.logits(tokens), 2 * torch.tanh(logits / 2))
    assert capped.logits(tokens).abs().max() <= 2


@torch.no_grad()
def test_a_head_of_its_own_and_the_embedding_move_apart() -> None:
    model, tokens = build_wild(COMPOSITIONS["untied"]), draw_tokens(2, CONTEXT)
    before, hidden = model.logits(tokens), model.hidden_states(tokens)
    model.head.weight.mul_(2.0)
    torch.testing.assert_close(model.logits(tokens), 2 * before)
    assert torch.equal(model.hidden_states(tokens), hidden)


def test_value_embeddings_serve_the_first_and_the_last_layers_in_pairs() -> None:
    model = build_wild(replace(TINY, num_layers=5, value_embeddings=2))
    gates = [block.attention.value_gate for block in model.blocks]
    assert [gate is not None for gate in gates] == [True, True, False, True, True]
    tokens = draw_tokens(1, CONTEXT)
    for table, layers in enumerate([(0, 4), (1, 3)]):
        model.zero_grad()
        with torch.no_grad():
            for layer in (0, 1, 3, 4):
                gates[layer].fill_(float(layer in layers))
        model.logits(tokens).sum().backward()
        gradients = [embedding.weight.grad for embedding in model.value_embeddings]
        assert gradients[table].abs().sum() > 0
        assert gradients[1 - table].abs().sum() == 0
        used = gradients[table].abs().sum(dim=1) > 0
        assert set(used.nonzero().flatten().tolist()) == set(tokens[0].tolist())


@torch.no_grad()
def test_a_closed_gate_keeps_value_embeddings_out() -> None:
    config = COMPOSITIONS["value embeddings"]
    model, tokens = build_wild(config), draw_tokens(2, CONTEXT)
    plain = build_wild(replace(config, value_embeddings=0))
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if "value_" not in name})
    assert not torch.allclose(model.logits(tokens), plain.logits(tokens))
    for name, parameter in model.named_parameters():
        if name.endswith("value_gate"):
            parameter.zero_()
    torch.testing.assert_close(model.logits(tokens), plain.logits(tokens))


@torch.no_grad()
def test_grouped_queries_are_full_attention_with_repeated_keys_and_values() -> None:
    config = COMPOSITIONS["grouped queries"]
    model, full, tokens = build_wild(config), build_wild(), draw_tokens(2, CONTEXT)
    weights = model.state_dict()
    for name in [name for name in weights if ".qkv." in name]:
        q, k, v = weights[name].unflatten(0, (-1, 4)).split((4, 2, 2))
        repeated = [q, k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)]
        weights[name] = torch.cat(repeated).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(model.logits(tokens), full.logits(tokens))


def test_rotations_depend_on_the_distance_alone() -> None:
    config = replace(TINY, positions=ROPE)
    q, k = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0))

    def meet(place: int, other: int) -> float:
        angles = [make_rope(torch.tensor([at]), config) for at in (place, other)]
        assert angles[0] is not None
        assert angles[1] is not None
        return float((apply_rope(q, angles[0]) * apply_rope(k, angles[1])).sum())

    assert meet(9, 4) == pytest.approx(meet(5, 0), abs=1e-5)
    assert meet(9, 4) != pytest.approx(meet(6, 0), abs=1e-3)


def test_linear_scaling_puts_places_closer_together() -> None:
    plain = replace(TINY, positions=Rope())
    scaled = replace(TINY, positions=Rope(rope_scaling=LinearScaling(rope_factor=4.0)))
    near, far = make_rope(torch.arange(5), plain), make_rope(4 * torch.arange(5), scaled)
    assert near is not None
    assert far is not None
    torch.testing.assert_close(near, far)


@all_compositions
def test_a_model_in_bf16_autocast_stays_near_fp32(config: ModelConfig) -> None:
    model, tokens, targets = build_wild(config, std=0.1), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    expected = model(tokens, targets).cross_entropy
    with torch.autocast("cpu", torch.bfloat16):
        losses = model.train()(tokens, targets)
    losses.objective.backward()
    assert losses.cross_entropy.dtype == torch.float32
    assert losses.cross_entropy.item() == pytest.approx(expected.item(), rel=0.02)


def test_a_norm_of_half_precision_bothers_nobody_with_a_warning_of_torch() -> None:
    is_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or only the first test in half precision of a process could fail
    try:
        x = torch.randn(2, TINY.head_width, dtype=torch.bfloat16)
        assert build_head_norm(TINY)(x).dtype == torch.bfloat16
    finally:
        torch.set_warn_always(is_always)

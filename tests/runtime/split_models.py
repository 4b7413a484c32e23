"""One rank of several that split small models and compare losses and gradients with those of the whole model.

Started by the tests beside as `split_models.py FILE`; rank 0 writes the largest differences to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.config.model import Gelu, ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.models.attention import BlockContext
from gptmill.models.context_parallel_gpt import ContextParallelGPT, share_rows
from gptmill.models.expert_parallel_moe import share_experts
from gptmill.models.gpt import GPT, build_gpt
from gptmill.models.losses import LossConfig
from gptmill.runtime.parallel.context_parallel import RankRows
from gptmill.runtime.parallel.expert_parallel import RankExperts, split_experts
from gptmill.runtime.parallel.tensor_parallel import split_tensors

VOCAB, PADDING, ROWS, CONTEXT = 64, 3, 2, 16
GPT2 = ModelConfig(num_layers=2, embd_size=16, num_heads=4, context_length=CONTEXT)
LLAMA = replace(
    GPT2,
    positions=Rope(rope_base=50.0),
    norm=RmsNorm(),
    bias=False,
    num_kv_heads=2,
    feed_forward=SwiGlu(),
    tied_head=False,
)
EVERYTHING = replace(
    LLAMA, num_layers=3, qk_norm=True, value_embeddings=1, mtp_heads=1, attention_windows="5,full", logit_softcap=3.0
)
BIASED = replace(LLAMA, bias=True, feed_forward=SwiGlu(ffn_size=24))
DENSE = {"gpt2": GPT2, "gelu": replace(GPT2, feed_forward=Gelu(ffn_size=24)), "llama": LLAMA, "biased": BIASED}
DENSE["everything"] = EVERYTHING
MOE = replace(LLAMA, feed_forward=Moe(num_experts=4, experts_per_token=2, ffn_size=8, router_aux_loss=0.1))
MIXTURES = {"moe": MOE, "moe with an extra head": replace(MOE, mtp_heads=1)}

Batch = tuple[Tensor, Tensor, Tensor | None]
DOMAINS = torch.tensor([0, 1] * 4)
LOSSES = LossConfig(label_smoothing=0.1, z_loss=0.01, chunk_tokens=7, num_domains=2)


def make_batch(*, masked: bool, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(VOCAB - PADDING, (rows, CONTEXT), generator=generator) for _ in range(2))
    targets[1, 3] = -100
    documents = torch.tensor([[0] * 5 + [5] * 11, [0] * 9 + [9] * 7]) if masked else None
    return tokens, targets, documents


def build(config: ModelConfig, kind: type[GPT] = GPT) -> GPT:
    """A model whose every parameter matters: gates and norms are not all equal, biases not zero."""
    model = build_gpt(config, VOCAB, 1, VOCAB - PADDING, kind)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def compute(model: GPT, batch: Batch) -> Tensor:
    objective: Tensor = model(*batch).objective
    objective.backward()
    return objective.detach()


def compare_objective() -> dict[str, float]:
    """Label smoothing, z-loss, chunks and losses per domain, over a vocabulary that ranks share."""
    whole, model, (tokens, targets, _) = build(LLAMA), build(LLAMA), make_batch(masked=False)
    split_tensors(model, dist.group.WORLD)
    found = {}
    for is_training in (True, False):
        for name, padded in (("plain", False), ("padded", True)):
            results = []
            for each in (model, whole):
                each.config, each.loss_config = replace(LLAMA, padded_softmax=padded), LOSSES
                results.append(each.train(is_training)(tokens, targets, None, DOMAINS[:ROWS]))
            for field in ("objective", "cross_entropy", "per_domain_G"):
                values = (getattr(losses, field).detach() for losses in results)
                found[f"{name} {field}{' in training' * is_training}"] = compare(*values)
    return {**found, "logits": compare(model.logits(tokens).detach(), whole.logits(tokens).detach())}


def compare_tensor_parallel(config: ModelConfig, *, masked: bool, recompute: bool = False) -> dict[str, float]:
    whole, model, batch = build(config), build(config), make_batch(masked=masked)
    layouts = split_tensors(model, dist.group.WORLD)
    model.set_activation_checkpointing("full" if recompute else "none")
    model.loss_config = whole.loss_config = replace(LOSSES, num_domains=0) if recompute else LossConfig()
    found = {"loss": compare(compute(model, batch), compute(whole, batch))}
    for name, gradient, expected in list_gradients(model, whole):
        found[name] = compare(layouts[name].gather(gradient) if name in layouts else gradient, expected)
    return found


def compare_dropout() -> dict[str, float]:
    """Ranks that share every layer drop the same of what they all compute, and different heads' attention."""
    torch.manual_seed(3)
    model = build(replace(GPT2, dropout=0.5))
    split_tensors(model, dist.group.WORLD)
    found = {"loss": compare_ranks(compute(model, make_batch(masked=False)))}
    for name in ("position_embedding.weight", "blocks.0.mlp_norm.weight", "final_norm.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        found[name] = compare_ranks(gradient)
    ones = torch.ones(1, 2, 8, 4)
    attended = model.blocks[0].attention.compute_attention(ones, ones, ones, BlockContext())
    found["heads drop the same"] = 0.0 if compare_ranks(attended) > 0.1 else 1.0
    return {**found, "afterwards": compare_ranks(torch.rand(4))}


def compare_ranks(tensor: Tensor) -> float:
    """The largest difference between the first rank's and this one's, on any rank."""
    first = tensor.clone()
    dist.broadcast(first, src=0)
    largest = (first - tensor).abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def compare_context_parallel(config: ModelConfig, *, masked: bool, recompute: bool = False) -> dict[str, float]:
    whole, model, batch = build(config), build(config, ContextParallelGPT), make_batch(masked=masked)
    share_rows(model, RankRows(dist.group.WORLD))
    model.set_activation_checkpointing("full" if recompute else "none")
    found = {"loss": compare(compute(model, batch), compute(whole, batch))}
    for name, gradient, expected in list_gradients(model, whole):
        found[name] = compare(sum_ranks(gradient), expected)
    model.eval()
    whole.eval()
    with torch.no_grad():
        found["evaluation"] = compare(model(*batch).objective, whole(*batch).objective)
        found["logits of a row that cannot be cut"] = compare(
            *(each.logits(batch[0][:, :5]) for each in (model, whole))
        )
    return found


def compare_expert_parallel(config: ModelConfig) -> dict[str, float]:
    """Each rank has rows of its own; the whole model has those of all."""
    whole, model = build(config), build(config)
    layouts = split_experts(model, dist.group.WORLD)
    share_experts(model, RankExperts(dist.group.WORLD))
    tokens, targets, _ = make_batch(masked=False, rows=ROWS * dist.get_world_size())
    own = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    loss, expected_loss = compute(model, (tokens[own], targets[own], None)), compute(whole, (tokens, targets, None))
    found = {"loss": compare(sum_ranks(loss), expected_loss)}
    for name, gradient, expected in list_gradients(model, whole):
        found[name] = compare(layouts[name].gather(gradient) if name in layouts else sum_ranks(gradient), expected)
    return found


def compare_starved_experts() -> dict[str, float]:
    """All tokens of all ranks go to the first expert, or to the last one; the other ranks have nothing to do."""
    size, found = dist.get_world_size(), {}
    for chosen in (0, size - 1):
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        ends = torch.tensor([3 if expert >= chosen else 0 for expert in range(size)], dtype=torch.int32)
        y = RankExperts(dist.group.WORLD).run(x, ends, lambda x_SC, _ends: (dist.get_rank() + 2) * x_SC)
        y.sum().backward()
        assert x.grad is not None
        found[f"results of {chosen}"] = compare(y.detach(), (chosen + 2) * x.detach())
        found[f"gradients of {chosen}"] = compare(x.grad, torch.full((3, 2), chosen + 2.0))
    return found


def list_gradients(model: GPT, whole: GPT) -> Iterator[tuple[str, Tensor, Tensor]]:
    for (name, parameter), same in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert same.grad is not None, name
        yield name, parameter.grad, same.grad


def sum_ranks(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def compare(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert found.shape == expected.shape
    assert expected.abs().max() > 0
    return float((found - expected).abs().max() / expected.abs().max())


def compare_all() -> dict[str, dict[str, float]]:
    found = {"tensor, dropout": compare_dropout(), "tensor, objective": compare_objective()}
    found["tensor, recomputed"] = compare_tensor_parallel(EVERYTHING, masked=False, recompute=True)
    found["context, recomputed"] = compare_context_parallel(EVERYTHING, masked=False, recompute=True)
    for name, config in DENSE.items():
        for masked in (False, True):
            found[f"tensor, {name}{', masked' * masked}"] = compare_tensor_parallel(config, masked=masked)
            found[f"context, {name}{', masked' * masked}"] = compare_context_parallel(config, masked=masked)
    for name, config in MIXTURES.items():
        found[f"expert, {name}"] = compare_expert_parallel(config)
    return {**found, "expert, starved": compare_starved_experts()}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = compare_all()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One rank of several that split small models and compare losses and gradients with those of the whole model.

Started by the tests beside as `split_models.py FILE`; rank 0 writes the largest differences to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gptmill.config.model import Gelu, ModelConfig, RmsNorm, Rope, SwiGlu
from gptmill.models.context_parallel_gpt import ContextParallelGPT, share_rows
from gptmill.models.gpt import GPT, build_gpt
from gptmill.runtime.parallel.context_parallel import RankRows
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

Batch = tuple[Tensor, Tensor, Tensor | None]


def make_batch(*, masked: bool) -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(VOCAB - PADDING, (ROWS, CONTEXT), generator=generator) for _ in range(2))
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


def compute(model: GPT, batch: Batch) -> float:
    losses = model(*batch)
    losses.objective.backward()
    return float(losses.objective.detach())


def compare_tensor_parallel(config: ModelConfig, *, masked: bool) -> dict[str, float]:
    whole, model, batch = build(config), build(config), make_batch(masked=masked)
    layouts = split_tensors(model, dist.group.WORLD)
    loss, expected = compute(model, batch), compute(whole, batch)
    differences = {"loss": abs(loss - expected) / expected}
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        joined = layouts[name].gather(gradient) if name in layouts else gradient
        differences[name] = compare(joined, gradients[name])
    return differences


def compare_context_parallel(config: ModelConfig, *, masked: bool, recompute: bool = False) -> dict[str, float]:
    whole, model, batch = build(config), build(config, ContextParallelGPT), make_batch(masked=masked)
    share_rows(model, RankRows(dist.group.WORLD))
    model.set_activation_checkpointing("full" if recompute else "none")
    loss, expected = compute(model, batch), compute(whole, batch)
    differences = {"loss": abs(loss - expected) / expected}
    for (name, parameter), whole_parameter in zip(model.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        differences[name] = compare(parameter.grad, whole_parameter.grad)
    model.eval(), whole.eval()
    with torch.no_grad():
        differences["eval"] = compare(model(*batch).objective, whole(*batch).objective)
        differences["logits"] = compare(model.logits(batch[0][:, :5]), whole.logits(batch[0][:, :5]))
    return differences


def compare(found: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest value."""
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    assert expected.abs().max() > 0
    return float((found - expected).abs().max() / expected.abs().max())


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for name, config in DENSE.items():
        for masked in (False, True):
            found[f"tensor {name}{' masked' * masked}"] = compare_tensor_parallel(config, masked=masked)
            found[f"context {name}{' masked' * masked}"] = compare_context_parallel(config, masked=masked)
    found["context recompute"] = compare_context_parallel(EVERYTHING, masked=False, recompute=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

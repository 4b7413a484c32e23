"""The rows that pad the vocabulary are left out of the softmax: a model's loss is that of the model without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptmill.config.model import ModelConfig, RmsNorm, Rope, SwiGlu
from gptmill.config.run import KernelChoice
from gptmill.models.fused.dispatch import MODELS
from gptmill.models.fused.fp8_layers import use_fp8
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import VOCAB_TENSORS, from_hf_weights
from gptmill.models.losses import IGNORE_INDEX, LossConfig

VOCAB, CONTEXT = 100, 16
TINY = ModelConfig(num_layers=1, embd_size=32, num_heads=2, context_length=CONTEXT)
LLAMA = replace(TINY, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu(), tied_head=False)
MODEL_CONFIGS = {
    "tied": TINY,
    "untied": replace(TINY, tied_head=False),
    "soft-cap": replace(TINY, logit_softcap=2.0),
    "mtp": replace(TINY, mtp_heads=1),
}
LOSSES = {
    "plain": LossConfig(),
    "chunked": LossConfig(chunk_tokens=6),
    "smoothing and z-loss": LossConfig(0.1, 0.01),
    "all": LossConfig(0.1, 0.01, chunk_tokens=6, num_domains=2),
    "domains": LossConfig(num_domains=2),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def build(config: ModelConfig, rows: int, kernels: KernelChoice = "none") -> GPT:
    """Fresh weights; with fewer rows, the same weights cut."""
    model = build_gpt(config, rows, 0, VOCAB, MODELS[kernels])
    whole = build_gpt(config, pad_vocab(VOCAB), 0).state_dict()
    with torch.no_grad():
        for name in VOCAB_TENSORS & whole.keys():
            whole[name][VOCAB:] += 0.5  # padding that would matter
    model.load_state_dict({name: each[:rows] if name in VOCAB_TENSORS else each for name, each in whole.items()})
    return model.train()


def run(model: GPT, loss: LossConfig) -> dict[str, Tensor]:
    device, generator = model.head_weight.device, torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(VOCAB, (2, CONTEXT), generator=generator).to(device) for _ in range(2))
    targets[0, 3] = targets[1, 10:] = IGNORE_INDEX
    model.loss_config = loss
    losses = model(tokens, targets, None, torch.tensor([1, 0], device=device) if loss.num_domains else None)
    losses.objective.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    found |= {"objective": losses.objective.detach(), "cross entropy": losses.cross_entropy.detach()}
    return found | ({} if losses.per_domain_G is None else {"per domain": losses.per_domain_G})


def assert_padding_has_no_part(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name in found.keys() & VOCAB_TENSORS:
        assert not found[name][VOCAB:].any()
        found[name] = found[name][:VOCAB]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-6, name


@pytest.mark.parametrize("kernels", ["none", "head"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("config", MODEL_CONFIGS.values(), ids=MODEL_CONFIGS)
def test_losses_and_gradients_are_those_of_the_model_without_padding(
    config: ModelConfig, loss: LossConfig, kernels: KernelChoice
) -> None:
    found = run(build(config, pad_vocab(VOCAB), kernels), loss)
    assert_padding_has_no_part(found, run(build(config, VOCAB), loss))


def test_an_older_run_has_the_padding_in_its_softmax() -> None:
    config = replace(TINY, padded_softmax=True)
    plain, fused = (run(build(config, pad_vocab(VOCAB), kernels), LossConfig()) for kernels in ("none", "head"))
    assert plain["cross entropy"] > run(build(TINY, VOCAB), LossConfig())["cross entropy"] + 1
    torch.testing.assert_close(fused["cross entropy"], plain["cross entropy"])
    for found in (plain, fused):
        assert found["token_embedding.weight"][VOCAB:].any()


@pytest.mark.parametrize("kernels", ["none", "auto"])
def test_an_fp8_head_leaves_the_padding_out(kernels: KernelChoice) -> None:
    padded = build(TINY, pad_vocab(VOCAB), kernels)
    use_fp8(padded, "fused", emulated=True)
    found = run(padded, LossConfig())
    assert not found["token_embedding.weight"][VOCAB:].any()
    assert_padding_has_no_part(found, run(build(TINY, VOCAB), LossConfig()), tolerance=0.2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_head_leaves_the_padding_out(device: str) -> None:
    model = build(TINY, pad_vocab(VOCAB)).to(device)
    model.compile_parts(backend="inductor" if device == "cuda" else "aot_eager")
    assert_padding_has_no_part(run(model, LOSSES["all"]), run(build(TINY, VOCAB).to(device), LOSSES["all"]), 1e-3)


@torch.no_grad()
@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama"])
def test_the_loss_is_that_of_transformers(config: ModelConfig) -> None:
    import transformers

    torch.manual_seed(1)
    content = make_hf_config(config, VOCAB)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
    for parameter in theirs.parameters():
        parameter.mul_(5)
    ours = GPT(config, pad_vocab(VOCAB), VOCAB).eval()
    layout = "gpt2" if config is TINY else "llama"
    ours.load_state_dict(from_hf_weights(theirs.state_dict(), layout, config, pad_vocab(VOCAB)))
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    loss = ours(tokens[:, :-1], tokens[:, 1:]).cross_entropy / tokens[:, 1:].numel()
    torch.testing.assert_close(loss, theirs(tokens, labels=tokens).loss, rtol=1e-6, atol=0)

"""One decode step for a batch of texts: forward pass, sampling, and the next token in place.

Everything that changes from step to step lies in tensors that stay where they are, and the host reads none of it. So
the step can be captured as a CUDA graph and compiled as a whole.

Shape suffixes: B batch, T sequence, S steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.inference.token_sampling import SamplingConfig, draw_uniforms, sample_tokens
from gptmill.models.fused.fused_decoding import FusedDecoder
from gptmill.models.gpt import GPT, CompilePart
from gptmill.models.kernels.greedy import advance_greedily
from gptmill.models.kv_cache import LayerKVCache


@dataclass(frozen=True)
class DecodingState:
    """Where each text of a batch stands. `load` begins new texts in the same tensors."""

    tokens_B: Tensor
    """The last token of each text, which the KV cache does not hold yet."""
    positions_B: Tensor
    """Its position: the number of tokens in the KV cache."""
    step_1: Tensor
    """The number of tokens sampled for each text."""
    uniforms_BS: Tensor
    sampled_BS: Tensor
    log_probs_BS: Tensor | None
    """Log-probabilities of the sampled tokens by the model alone, before temperature and filters."""
    seen_BV: Tensor | None
    """Which tokens a text holds; for the repetition penalty."""

    def load(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Begins texts with these prompts, of which all tokens but the last will be in the KV cache."""
        num_steps = self.uniforms_BS.shape[1]
        self.tokens_B.copy_(torch.tensor([prompt[-1] for prompt in prompts]))
        self.positions_B.copy_(torch.tensor([len(prompt) - 1 for prompt in prompts]))
        self.step_1.zero_()
        self.uniforms_BS.copy_(torch.stack([draw_uniforms(seed, num_steps) for seed in seeds]))
        if self.seen_BV is not None:
            self.seen_BV.zero_()
            for seen_V, prompt in zip(self.seen_BV, prompts, strict=True):
                seen_V[torch.tensor(list(prompt), device=seen_V.device)] = True

    def accept(self, tokens_BT: Tensor, step: int) -> None:
        """Moves on by several tokens that were chosen elsewhere."""
        count = tokens_BT.shape[1]
        self.sampled_BS[:, step : step + count] = tokens_BT
        self.tokens_B.copy_(tokens_BT[:, -1])
        self.positions_B.add_(count)
        self.step_1.add_(count)


def build_state(
    batch_size: int,
    num_steps: int,
    vocab_size: int,
    sampling: SamplingConfig,
    device: torch.device,
    *,
    with_log_probs: bool,
) -> DecodingState:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    is_penalised = sampling.repetition_penalty != 1.0
    return DecodingState(
        tokens_B=zeros(batch_size),
        positions_B=zeros(batch_size),
        step_1=zeros(1),
        uniforms_BS=zeros(batch_size, num_steps, dtype=torch.float32),
        sampled_BS=zeros(batch_size, num_steps),
        log_probs_BS=zeros(batch_size, num_steps, dtype=torch.float32) if with_log_probs else None,
        seen_BV=zeros(batch_size, vocab_size, dtype=torch.bool) if is_penalised else None,
    )


def decode(
    model: GPT,
    state: DecodingState,
    layers: Sequence[LayerKVCache],
    sampling: SamplingConfig,
    vocab_size: int,
    compile_part: CompilePart = lambda part: part,
    *,
    is_filled: bool = False,
) -> None:
    """Samples the next token of each text."""
    logits_BV = compute_logits(model, state, layers, compile_part, is_filled=is_filled)
    advance(state, logits_BV[:, :vocab_size], sampling)


def decode_fused(
    fused: FusedDecoder, state: DecodingState, layers: Sequence[LayerKVCache], sampling: SamplingConfig
) -> None:
    """Samples the next token of each text, with the forward pass by kernels; greedily, by a kernel too."""
    logits_BV = fused.step(state.tokens_B, state.positions_B, layers)
    if not sampling.is_greedy or state.seen_BV is not None or state.log_probs_BS is not None:
        advance(state, logits_BV, sampling)
        return
    advance_greedily(logits_BV, state.step_1, state.tokens_B, state.positions_B, state.sampled_BS)
    state.step_1.add_(1)


def compute_logits(
    model: GPT,
    state: DecodingState,
    layers: Sequence[LayerKVCache],
    compile_part: CompilePart = lambda part: part,
    *,
    is_filled: bool = False,
) -> Tensor:
    """The forward pass alone; adds the last tokens to the KV caches."""
    # A single text has one row of positions for all: (T), the form that every model knows.
    positions = state.positions_B if len(state.positions_B) == 1 else state.positions_B[:, None]
    logits_B1V = model.decode_step(state.tokens_B[:, None], positions, layers, compile_part, is_filled=is_filled)
    return logits_B1V[:, 0]


def advance(state: DecodingState, logits_BV: Tensor, sampling: SamplingConfig) -> None:
    """Samples from the logits, and moves the state on."""
    uniforms_B = state.uniforms_BS.index_select(1, state.step_1).squeeze(1)
    tokens_B = sample_tokens(logits_BV, uniforms_B, sampling, state.seen_BV)
    state.sampled_BS.index_copy_(1, state.step_1, tokens_B[:, None])
    if state.log_probs_BS is not None:
        log_probs_B1 = logits_BV.float().log_softmax(dim=-1).gather(1, tokens_B[:, None])
        state.log_probs_BS.index_copy_(1, state.step_1, log_probs_B1)
    if state.seen_BV is not None:
        state.seen_BV.scatter_(1, tokens_B[:, None], True)
    state.tokens_B.copy_(tokens_B)
    state.positions_B.add_(1)
    state.step_1.add_(1)

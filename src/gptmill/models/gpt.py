"""GPT-2, exactly: pre-norm blocks, learned positions, GELU (tanh), biases, and a head tied to the embedding.

Shape suffixes: B batch, T time, N = B x T, C width, H heads, D width of a head, V vocabulary, S time seen so far.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.run import ModelConfig
from gptmill.models.cache import LayerCache

INIT_STD = 0.02
VOCAB_MULTIPLE = 64
IGNORED_TARGET = -100


def pad_vocab(vocab_size: int) -> int:
    """Rounds up so that the head's matmul fits the hardware's tiles: GPT-2's 50,257 become 50,304."""
    return math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Attention(nn.Module):
    """Causal multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.embd_size, 3 * config.embd_size)
        self.proj = nn.Linear(config.embd_size, config.embd_size)

    def forward(self, x_BTC: Tensor, cache: LayerCache | None = None, mask_B1TS: Tensor | None = None) -> Tensor:
        """Attends to the past: all of it, or what the mask lets through."""
        B, T, C = x_BTC.shape
        qkv_BTHD = self.qkv(x_BTC).view(B, T, 3 * self.num_heads, C // self.num_heads)
        q_BHTD, k_BHSD, v_BHSD = qkv_BTHD.transpose(1, 2).chunk(3, dim=1)
        if cache is not None:
            k_BHSD, v_BHSD = cache.extend(k_BHSD, v_BHSD)
            S = k_BHSD.shape[2]
            mask_B1TS = torch.ones(1, 1, T, S, dtype=torch.bool, device=x_BTC.device).tril(S - T)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHSD,
            v_BHSD,
            attn_mask=mask_B1TS,
            is_causal=mask_B1TS is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.proj(y_BHTD.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Widen by four, GELU, narrow again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.embd_size, 4 * config.embd_size)
        self.proj = nn.Linear(4 * config.embd_size, config.embd_size)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.proj(F.gelu(self.up(x_BTC), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then the MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.embd_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.embd_size)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, cache: LayerCache | None = None, mask_B1TS: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), cache, mask_B1TS))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens in; the summed loss out when targets are given, `logits` otherwise."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, vocab_size: int | None = None) -> None:
        """`vocab_size` is how many of the rows are tokens; without it, all are."""
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size or padded_vocab_size
        self.token_embedding = nn.Embedding(padded_vocab_size, config.embd_size)
        self.position_embedding = nn.Embedding(config.context_length, config.embd_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.embd_size)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        label_smoothing: float = 0.0,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Cross-entropy summed over the targets; the caller divides by the count that is right for it."""
        logits_NV = self.project(self.encode(tokens_BT, documents_BT=documents_BT)).flatten(0, 1).float()
        targets_N = targets_BT.flatten()
        hard = F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=IGNORED_TARGET)
        if label_smoothing == 0:
            return hard
        # Not cross_entropy's own smoothing: that would teach the model to predict the rows that only pad.
        even_N = -logits_NV.log_softmax(dim=-1)[:, : self.vocab_size].mean(dim=-1)
        return (1 - label_smoothing) * hard + label_smoothing * even_N.where(targets_N != IGNORED_TARGET, 0.0).sum()

    def logits(self, tokens_BT: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """The next-token logits at every position."""
        return self.project(self.encode(tokens_BT, caches))

    def encode(
        self, tokens_BT: Tensor, caches: list[LayerCache] | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """The final hidden states. With caches, the tokens continue what the caches hold.

        `documents_BT` holds the place in the row at which each token's document begins. Documents then do not see
        each other, and positions count from their beginnings.
        """
        past = caches[0].length if caches else 0
        positions = torch.arange(past, past + tokens_BT.shape[1], device=tokens_BT.device)
        mask_B1TS = None
        if documents_BT is not None:
            is_past_TS = positions[:, None] >= positions
            mask_B1TS = (is_past_TS & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1)
            positions = positions - documents_BT
        x_BTC = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions))
        for index, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, caches[index] if caches else None, mask_B1TS)
        return self.final_norm(x_BTC)  # type: ignore[no-any-return]

    def project(self, x_BTC: Tensor) -> Tensor:
        """The head, which is the token embedding again."""
        return F.linear(x_BTC, self.token_embedding.weight)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's: normal weights, zero biases, and residual projections scaled down by depth."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith("proj.weight") else INIT_STD
                parameter.normal_(0.0, std, generator=generator)


def build_gpt(config: ModelConfig, padded_vocab_size: int, seed: int, vocab_size: int | None = None) -> GPT:
    """A freshly initialised model on the CPU, the same on every machine and rank for the same seed."""
    with torch.device("meta"):
        model = GPT(config, padded_vocab_size, vocab_size)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(seed))
    return model

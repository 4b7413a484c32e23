"""A mixture of experts: a router dispatches each token to some of many SwiGLU experts. No token is ever dropped.

Tokens are sorted by expert, so that one grouped GEMM serves all experts, and are permuted back afterwards.

Shape suffixes: B batch, T sequence, N = B x T tokens, K experts per token, M = N x K dispatched tokens, E experts,
C channels, F hidden width of an expert, G groups of tokens that are balanced each by itself, S = N / G tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import Moe
from gptmill.config.run import ModelConfig

ALIGNMENT_BYTES = 16  # of every row that the grouped GEMM reads
GROUPED_CAPABILITY = (8, 0)


class RouterStats(NamedTuple):
    """What one layer's router did with a micro-batch; the losses are not weighted yet."""

    aux_loss: Tensor
    """Load-balancing loss per token: 1 when all experts get equally many tokens, and more the less balanced their
    loads are."""
    z_loss: Tensor
    """Mean square of the router's log-partition: how large its logits have grown (ST-MoE, Zoph et al. 2022)."""
    tokens_E: Tensor
    """How many tokens each expert got."""


class MixtureOfExperts(nn.Module):
    """Each token's result is the sum of its top K experts', weighted by their renormalised probabilities.

    The experts' matrices are uninitialised until `init_weights` fills them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config.feed_forward, Moe)
        experts, width, hidden = config.feed_forward.num_experts, config.embd_size, config.hidden_size
        self.experts_per_token = config.feed_forward.experts_per_token
        self.router_balance = config.feed_forward.router_balance
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.packed_splits = {"gate_up": (hidden, hidden)}
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x_BTC: Tensor, counts_BT: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """`counts_BT` says which tokens the losses and counts include; without it, all."""
        x_NC = x_BTC.flatten(0, 1)
        # In bf16, rounding errors would choose between experts.
        with torch.autocast(x_BTC.device.type, enabled=False):
            logits_NE = F.linear(x_NC.float(), self.router.weight.float())
        probabilities_NE = logits_NE.softmax(dim=-1)
        chosen_NK, experts_NK = probabilities_NE.topk(self.experts_per_token, dim=-1)
        weights_NK = chosen_NK / chosen_NK.sum(dim=-1, keepdim=True)

        experts_M, order_M = experts_NK.flatten().sort(stable=True)
        every_E = torch.arange(logits_NE.shape[1], device=x_BTC.device)
        ends_E = torch.searchsorted(experts_M, every_E, right=True, out_int32=True)
        mixed_NC = self._dispatch(x_NC, weights_NK, order_M, ends_E)
        if counts_BT is None:
            counts_BT = x_BTC.new_ones(x_BTC.shape[:2], dtype=torch.bool)
        counts_GS = counts_BT if self.router_balance == "sequence" else counts_BT.flatten()[None]
        return mixed_NC.view_as(x_BTC), make_stats(logits_NE, probabilities_NE, experts_NK, counts_GS)

    def _dispatch(self, x_NC: Tensor, weights_NK: Tensor, order_M: Tensor, ends_E: Tensor) -> Tensor:
        """Permutes the tokens into the order of their experts, applies these, and permutes the results back."""
        kind = x_NC.device.type
        # Autocast does not know the grouped GEMM.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_NC.dtype
        inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        x_MC = permute(x_NC.to(dtype), order_M, inverse_M, repeats=self.experts_per_token)
        y_MC = self.run_experts(x_MC, ends_E)
        y_NKC = permute(y_MC, inverse_M, order_M).unflatten(0, weights_NK.shape)
        weighted_NKC: Tensor = y_NKC * weights_NK.to(dtype).unsqueeze(-1)
        return weighted_NKC.sum(dim=1)

    def run_experts(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Each expert's result for its tokens: the first gets those up to `ends_E[0]`, the second up to the next…"""
        gate_MF, up_MF = grouped_gemm(x_MC, self.gate_up.to(x_MC.dtype), ends_E).chunk(2, dim=-1)
        return grouped_gemm(F.silu(gate_MF) * up_MF, self.down_proj.to(x_MC.dtype), ends_E)


def make_stats(logits_NE: Tensor, probabilities_NE: Tensor, experts_NK: Tensor, counts_GS: Tensor) -> RouterStats:
    """The load-balancing loss of Switch Transformers (Fedus et al. 2021), the z-loss of ST-MoE, and token counts.

    Groups weigh as much as they have tokens. With the sequences as groups (DeepSeek-V3, Liu et al. 2024), the loss of
    a step is the same in any micro-batches.
    """
    counts_N, (groups, _) = counts_GS.flatten(), counts_GS.shape
    counts_G, count = counts_GS.sum(dim=1), counts_N.sum().clamp(min=1)
    is_chosen_NE = torch.zeros_like(probabilities_NE).scatter(1, experts_NK, 1.0)
    tokens_GE = is_chosen_NE.where(counts_N[:, None], 0.0).unflatten(0, (groups, -1)).sum(dim=1)
    shares_GE = tokens_GE / tokens_GE.sum(dim=1, keepdim=True).clamp(min=1)
    sums_GE = probabilities_NE.where(counts_N[:, None], 0.0).unflatten(0, (groups, -1)).sum(dim=1)
    means_GE = sums_GE / counts_G.clamp(min=1)[:, None]
    aux_loss_G = tokens_GE.shape[1] * (shares_GE * means_GE).sum(dim=1)
    z_loss = logits_NE.logsumexp(dim=-1).square().where(counts_N, 0.0).sum() / count
    return RouterStats((aux_loss_G * (counts_G / count)).sum(), z_loss, tokens_GE.sum(dim=0))


def grouped_gemm(x_MC: Tensor, matrices_EFC: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to `ends_E[0]` times the first matrix, the next ones up to `ends_E[1]` times the second, and so on."""
    if has_grouped_gemm(x_MC, matrices_EFC):
        # torch 2.9 has it under its private name only.
        grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return grouped_mm(x_MC, matrices_EFC.transpose(-2, -1), offs=ends_E)  # type: ignore[no-any-return]
    # Synchronises with the device to learn where the groups end; only for shapes and dtypes without a grouped GEMM.
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([F.linear(x_GC, w_FC) for x_GC, w_FC in zip(x_MC.split(counts), matrices_EFC, strict=True)])


def has_grouped_gemm(x_MC: Tensor, matrices_EFC: Tensor) -> bool:
    """Whether one kernel multiplies all groups: only in bf16, and if the rows are aligned."""
    kind, widths = x_MC.device.type, matrices_EFC.shape[1:]
    if x_MC.dtype != torch.bfloat16 or any(width * x_MC.element_size() % ALIGNMENT_BYTES for width in widths):
        return False
    if kind == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(x_MC.device) >= GROUPED_CAPABILITY
    return kind == "cpu" and hasattr(F, "grouped_mm")


def permute(x_NC: Tensor, order_M: Tensor, inverse_M: Tensor, repeats: int = 1) -> Tensor:
    """Row i of the result is row `order_M[i] // repeats`; `inverse_M` is the inverse permutation of `order_M`."""
    return _Permute.apply(x_NC, order_M, inverse_M, repeats)  # type: ignore[no-any-return, no-untyped-call]


class _Permute(torch.autograd.Function):
    """Indexing whose gradient is the inverse permutation: autograd's own adds row by row, slowly or in any order."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_M: Tensor, inverse_M: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.repeats = repeats
        return x_NC[order_M // repeats if repeats > 1 else order_M]

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_M,) = ctx.saved_tensors
        grad_NC = grad_MC[inverse_M]
        if ctx.repeats > 1:
            grad_NC = grad_NC.unflatten(0, (-1, ctx.repeats)).sum(dim=1)
        return grad_NC, None, None, None

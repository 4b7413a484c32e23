"""The loss of a language model's head: cross-entropy, and what a run may ask for beside it.

Everything is a sum over the targets that count, in fp32; the caller divides by the count that is right for it.
Shape suffixes: N tokens, C width, V vocabulary, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gptmill.models.targets import IGNORE_INDEX as IGNORE_INDEX


@dataclass(frozen=True)
class LossConfig:
    """What the objective is made of, and how many tokens' logits exist at once (None: all)."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    num_domains: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the cross-entropy and nothing else."""
        return not (self.label_smoothing or self.z_loss)


class HeadLoss(NamedTuple):
    """Sums over the targets that count."""

    objective: Tensor
    """What is minimised."""
    cross_entropy: Tensor
    """What is reported: without smoothing and without z-loss."""
    per_domain_G: Tensor | None
    """The cross-entropy of each group's tokens, for reports alone: it has no gradient."""


def compute_loss(
    project: Callable[[Tensor], Tensor],
    x_NC: Tensor,
    targets_N: Tensor,
    rule: LossConfig,
    vocab_size: int,
    domains_N: Tensor | None = None,
) -> HeadLoss:
    """The loss of hidden states against targets; `project` makes logits of them, `vocab_size` of which are tokens."""

    def measure(x_NC: Tensor, targets_N: Tensor, domains_N: Tensor | None) -> HeadLoss:
        return _measure(project(x_NC).float(), targets_N, rule, vocab_size, domains_N)

    size = rule.chunk_tokens
    if size is None or size >= len(targets_N):
        return measure(x_NC, targets_N, domains_N)
    objective = cross_entropy = torch.zeros((), device=x_NC.device)
    per_domain_G = torch.zeros(rule.num_domains, device=x_NC.device) if rule.num_domains else None
    for start in range(0, len(targets_N), size):
        piece = slice(start, start + size)
        groups = None if domains_N is None else domains_N[piece]
        # No state of random numbers to keep: a head draws none.
        loss = checkpoint(measure, x_NC[piece], targets_N[piece], groups, use_reentrant=False, preserve_rng_state=False)
        objective, cross_entropy = objective + loss.objective, cross_entropy + loss.cross_entropy
        per_domain_G = None if per_domain_G is None else per_domain_G + loss.per_domain_G
    return HeadLoss(objective, cross_entropy, per_domain_G)


def summarise(total: Tensor, losses_N: Tensor, num_domains: int, domains_N: Tensor | None) -> HeadLoss:
    """Of a cross-entropy that is known already, token by token."""
    return HeadLoss(total, total, _sum_by_group(losses_N, num_domains, domains_N))


def _measure(
    logits_NV: Tensor, targets_N: Tensor, rule: LossConfig, vocab_size: int, domains_N: Tensor | None
) -> HeadLoss:
    logp_NV = logits_NV.log_softmax(dim=-1)
    hard = F.nll_loss(logp_NV, targets_N, reduction="sum", ignore_index=IGNORE_INDEX)
    objective, counts_N = hard, targets_N != IGNORE_INDEX
    if rule.label_smoothing:
        # Not cross_entropy's own smoothing: that would teach the model to predict the rows that only pad.
        even_N = -logp_NV[:, :vocab_size].mean(dim=-1)
        even = even_N.where(counts_N, 0.0).sum()
        objective = (1 - rule.label_smoothing) * objective + rule.label_smoothing * even
    if rule.z_loss:
        # As PaLM has it (arXiv:2204.02311, section 5).
        squares_N = logits_NV.logsumexp(dim=-1).square()
        objective = objective + rule.z_loss * squares_N.where(counts_N, 0.0).sum()
    if rule.num_domains == 0:
        return HeadLoss(objective, hard, None)
    hard_N = F.nll_loss(logp_NV.detach(), targets_N, reduction="none", ignore_index=IGNORE_INDEX)
    return HeadLoss(objective, hard, _sum_by_group(hard_N, rule.num_domains, domains_N))


def _sum_by_group(hard_N: Tensor, num_domains: int, domains_N: Tensor | None) -> Tensor | None:
    if num_domains == 0:
        return None
    assert domains_N is not None, "losses by group need the groups"
    # Not index_add: on a GPU its sums come out in any order.
    is_member_GN = domains_N == torch.arange(num_domains, device=domains_N.device)[:, None]
    return hard_N.where(is_member_GN, 0.0).sum(dim=-1)

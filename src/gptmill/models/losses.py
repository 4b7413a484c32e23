"""The language-modelling loss: cross-entropy, with label smoothing, z-loss and per-domain sums where a run asks for
them.

Everything is a sum over the valid targets, in fp32; the caller divides by the count that is right for it.
Shape suffixes: N tokens, C channels, V vocabulary, G domains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100
"""The target of a token whose prediction does not count, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class LossConfig:
    """What the objective consists of, and for how many tokens logits exist at once (None: all)."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    num_domains: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the objective is the cross-entropy and nothing else."""
        return not (self.label_smoothing or self.z_loss)

    def without_extras(self) -> LossConfig:
        """The cross-entropy alone, as evaluation reports it."""
        return LossConfig(chunk_tokens=self.chunk_tokens, num_domains=self.num_domains)


class VocabShare(Protocol):
    """Some consecutive tokens of the vocabulary, whose logits this process computes, and a way to the others'."""

    start: int
    """The first of them."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all shares; each gets the gradient of its own summand."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """The largest of all shares; it has no gradient."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, in their order."""
        ...


class LossSums(NamedTuple):
    """Sums over the valid targets."""

    objective: Tensor
    """What training minimises."""
    cross_entropy: Tensor
    """What is reported: without label smoothing and z-loss."""
    per_domain_G: Tensor | None
    """The cross-entropy of each domain's tokens; for reports only, it has no gradient."""


def compute_loss(
    lm_head: Callable[[Tensor], Tensor],
    x_NC: Tensor,
    targets_N: Tensor,
    config: LossConfig,
    vocab_size: int,
    domains_N: Tensor | None = None,
    *,
    padded_softmax: bool = False,
    share: VocabShare | None = None,
) -> LossSums:
    """The loss of hidden states against targets; the first `vocab_size` of the head's logits are tokens.

    The others are padding, left out of the softmax and overwritten, unless it is to be a `padded_softmax`. With a
    `share` of the vocabulary, the head gives the logits of that alone.

    Chunked cross-entropy: with `chunk_tokens`, only one chunk's logits exist at a time, and the backward pass
    computes them again.
    """

    def compute(x_NC: Tensor, targets_N: Tensor, domains_N: Tensor | None) -> LossSums:
        logits_NV = lm_head(x_NC).float()
        if not padded_softmax:
            logits_NV = _leave_out_padding(logits_NV, vocab_size if share is None else max(0, vocab_size - share.start))
        if share is not None:
            return _compute_shared(logits_NV, targets_N, config, vocab_size, domains_N, share)
        return _compute(logits_NV, targets_N, config, vocab_size, domains_N)

    size = config.chunk_tokens
    if size is None or size >= len(targets_N):
        return compute(x_NC, targets_N, domains_N)
    objective = cross_entropy = torch.zeros((), device=x_NC.device)
    per_domain_G = torch.zeros(config.num_domains, device=x_NC.device) if config.num_domains else None
    for start in range(0, len(targets_N), size):
        chunk = slice(start, start + size)
        domains = None if domains_N is None else domains_N[chunk]
        # The head draws no random numbers, so there is no RNG state to restore.
        sums = checkpoint(
            compute, x_NC[chunk], targets_N[chunk], domains, use_reentrant=False, preserve_rng_state=False
        )
        objective, cross_entropy = objective + sums.objective, cross_entropy + sums.cross_entropy
        per_domain_G = None if per_domain_G is None else per_domain_G + sums.per_domain_G
    return LossSums(objective, cross_entropy, per_domain_G)


def sum_per_domain(losses_N: Tensor, num_domains: int, domains_N: Tensor | None) -> Tensor | None:
    """The tokens' losses added up for each domain; None where there are no domains."""
    if num_domains == 0:
        return None
    assert domains_N is not None, "per-domain losses need the tokens' domains"
    # Not index_add: on a GPU it adds in any order.
    is_member_GN = domains_N == torch.arange(num_domains, device=domains_N.device)[:, None]
    return losses_N.where(is_member_GN, 0.0).sum(dim=-1)


def _leave_out_padding(logits_NV: Tensor, vocab_size: int) -> Tensor:
    """The logits, with -inf for those of the padding, without another pass over all of them.

    torch.compile fuses a mask into the softmax. Otherwise they are overwritten; autograd need not know, since a softmax
    gives -inf the probability 0 and hence the gradient 0.
    """
    if vocab_size >= logits_NV.shape[1]:
        return logits_NV
    if torch.compiler.is_compiling():
        return logits_NV.where(torch.arange(logits_NV.shape[1], device=logits_NV.device) < vocab_size, -math.inf)
    logits_NV.detach()[:, vocab_size:].fill_(-math.inf)
    return logits_NV


def _compute(
    logits_NV: Tensor, targets_N: Tensor, config: LossConfig, vocab_size: int, domains_N: Tensor | None
) -> LossSums:
    logp_NV = logits_NV.log_softmax(dim=-1)
    cross_entropy = F.nll_loss(logp_NV, targets_N, reduction="sum", ignore_index=IGNORE_INDEX)
    objective, is_valid_N = cross_entropy, targets_N != IGNORE_INDEX
    if config.label_smoothing:
        # Not cross_entropy's own smoothing: that would include the padding of the vocabulary.
        uniform_N = -logp_NV[:, :vocab_size].mean(dim=-1)
        uniform = uniform_N.where(is_valid_N, 0.0).sum()
        objective = (1 - config.label_smoothing) * objective + config.label_smoothing * uniform
    if config.z_loss:
        # As in PaLM (arXiv:2204.02311, section 5).
        squares_N = logits_NV.logsumexp(dim=-1).square()
        objective = objective + config.z_loss * squares_N.where(is_valid_N, 0.0).sum()
    if config.num_domains == 0:
        return LossSums(objective, cross_entropy, None)
    losses_N = F.nll_loss(logp_NV.detach(), targets_N, reduction="none", ignore_index=IGNORE_INDEX)
    return LossSums(objective, cross_entropy, sum_per_domain(losses_N, config.num_domains, domains_N))


def _compute_shared(
    logits_NV: Tensor,
    targets_N: Tensor,
    config: LossConfig,
    vocab_size: int,
    domains_N: Tensor | None,
    share: VocabShare,
) -> LossSums:
    """The same from the logits of a share of the vocabulary: the shares exchange a few numbers per token."""
    is_valid_N, width = targets_N != IGNORE_INDEX, logits_NV.shape[1]
    peaks_N = share.max(logits_NV.detach().amax(dim=-1))
    logsumexp_N = peaks_N + share.sum((logits_NV - peaks_N[:, None]).exp().sum(dim=-1)).log()
    columns_N = targets_N - share.start
    is_own_N = (columns_N >= 0) & (columns_N < width)
    own_N = logits_NV.gather(1, columns_N.clamp(0, width - 1)[:, None]).squeeze(1)
    losses_N = (logsumexp_N - share.sum(own_N.where(is_own_N, 0.0))).where(is_valid_N, 0.0)
    objective = cross_entropy = losses_N.sum()
    if config.label_smoothing:
        means_N = share.sum(logits_NV[:, : max(0, vocab_size - share.start)].sum(dim=-1)) / vocab_size
        uniform = (logsumexp_N - means_N).where(is_valid_N, 0.0).sum()
        objective = (1 - config.label_smoothing) * objective + config.label_smoothing * uniform
    if config.z_loss:
        objective = objective + config.z_loss * logsumexp_N.square().where(is_valid_N, 0.0).sum()
    return LossSums(objective, cross_entropy, sum_per_domain(losses_N.detach(), config.num_domains, domains_N))

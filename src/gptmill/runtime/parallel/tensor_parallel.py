"""Tensor parallelism (Shoeybi et al. 2019): every rank computes some heads of attention and some of the feed-forward's
hidden units.

The first linear layer of each half of a block is split by rows, the second by columns, and one all-reduce adds up the
halves' results. Every rank has some tokens' rows of the embedding and of the LM head, and computes their part of the
softmax. Norms, positions and the residual stream are the same on all ranks of the group. The model itself
does not know: its layers are replaced by ones that do, with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.runtime.parallel.collectives import all_gather, copy_to_ranks, gather_columns, sum_over_ranks
from gptmill.runtime.parallel.layouts import Layout

FIRST_LAYERS = frozenset({"qkv", "up", "gate_up"})
SECOND_LAYERS = frozenset({"proj"})
HEAD_COUNTS = ("num_heads", "kv_heads")
MAX_SEED = 2**62


class ColumnParallelLinear(nn.Linear):
    """Some of a linear layer's outputs: the rows of its weight that this rank holds."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank holds some inputs; the ranks' products are summed."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        y = sum_over_ranks(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """The embeddings of some tokens; those of the others come from their ranks."""

    group: dist.ProcessGroup

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.group.rank() * self.num_embeddings
        is_own = (own >= 0) & (own < self.num_embeddings)
        x = F.embedding(own.where(is_own, 0), self.weight).where(is_own[..., None], 0.0)
        return sum_over_ranks(x, self.group)


@dataclass(frozen=True)
class RankVocab:
    """The tokens whose logits a rank computes: equally many, in the order of the ranks."""

    group: dist.ProcessGroup
    start: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; each gets the gradient of its own summand."""
        return sum_over_ranks(x, self.group)

    def max(self, x: Tensor) -> Tensor:
        """The largest of all ranks'."""
        return all_gather(x, self.group).amax(dim=0)

    def gather(self, logits: Tensor) -> Tensor:
        """The logits of all tokens."""
        return gather_columns(logits, self.group)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """The LM head's product for the rank's own tokens."""
        return F.linear(copy_to_ranks(x, self.group), weight)


class SharedRMSNorm(nn.RMSNorm):
    """The norm of a rank's heads; its weight serves the heads of all ranks, so their gradients are summed."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, copy_to_ranks(self.weight, self.group), self.eps)


def split_tensors(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Replaces the weights of a whole model by this rank's share; returns how each parameter was split, by name.

    All ranks must hold the same weights before.
    """
    layouts: dict[str, Layout] = {}
    for path, module in list(model.named_modules()):
        found = _split_attention(module, group) if hasattr(module, "qkv") else {}
        found |= _split_linears(module, group)
        layouts |= {f"{path}.{name}": layout for name, layout in found.items()}
    for number, table in enumerate(getattr(model, "value_embeddings", ())):
        layouts[f"value_embeddings.{number}.weight"] = _split(table, "weight", 1, (table.embedding_dim,), group)
    return layouts | _split_vocabulary(model, group)


def _split_vocabulary(model: Any, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Leaves this rank its tokens' rows of the embedding and the LM head; all of them, if they cannot be divided."""
    rows = model.token_embedding.num_embeddings
    if rows % group.size():
        return {}
    layouts = {"token_embedding.weight": _split(model.token_embedding, "weight", 0, (rows,), group)}
    share = rows // group.size()
    _specialise(model.token_embedding, VocabParallelEmbedding, group, num_embeddings=share)
    if model.head is not None:
        layouts["head.weight"] = _split(model.head, "weight", 0, (rows,), group)
    model.vocab_share = vocab = RankVocab(group, group.rank() * share)
    model.head_linear = vocab.project
    return layouts


def _split_linears(parent: nn.Module, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Splits the linear layers of one half of a block."""
    packed: Mapping[str, tuple[int, ...]] = getattr(parent, "packed_splits", {})
    layouts = {}
    for name, layer in parent.named_children():
        if not isinstance(layer, nn.Linear):
            continue
        if name in FIRST_LAYERS:
            sections = packed.get(f"{name}.weight", (layer.weight.shape[0],))
            for part in [part for part, _ in layer.named_parameters()]:
                layouts[f"{name}.{part}"] = _split(layer, part, 0, sections, group)
            _specialise(layer, ColumnParallelLinear, group, out_features=layer.weight.shape[0])
        elif name in SECOND_LAYERS:
            layouts[f"{name}.weight"] = _split(layer, "weight", 1, (layer.weight.shape[1],), group)
            _specialise(layer, RowParallelLinear, group, in_features=layer.weight.shape[1])
    return layouts


def _split_attention(attention: Any, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Leaves this rank its heads, and what belongs to each of them."""
    layouts = {}
    if attention.value_gate is not None:
        layouts["value_gate"] = _split(attention, "value_gate", 0, (attention.kv_heads,), group)
    for norm in filter(None, (attention.query_norm, attention.key_norm)):
        _specialise(norm, SharedRMSNorm, group)
    for name in HEAD_COUNTS:
        setattr(attention, name, getattr(attention, name) // group.size())
    if attention.dropout:
        attention.compute_attention = _draw_apart(attention.compute_attention, attention, group.rank())
    return layouts


def _draw_apart(compute: Callable[..., Tensor], attention: nn.Module, rank: int) -> Callable[..., Tensor]:
    """Lets the heads of each rank draw random numbers of their own; after them, all ranks go on with the same."""

    def compute_apart(q: Tensor, *arguments: Any) -> Tensor:
        if not attention.training:
            return compute(q, *arguments)
        seed = int(torch.randint(MAX_SEED, ()))  # the same on all ranks
        with torch.random.fork_rng([q.device] if q.device.type == "cuda" else []):
            torch.manual_seed(seed + rank)
            return compute(q, *arguments)

    return compute_apart


def _split(module: nn.Module, name: str, dim: int, sections: tuple[int, ...], group: dist.ProcessGroup) -> Layout:
    """Replaces a parameter by this rank's share."""
    layout = Layout(dim, sections, group)
    whole = getattr(module, name)
    setattr(module, name, nn.Parameter(layout.take(whole.detach())))
    return layout


def _specialise(module: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup, **attributes: Any) -> None:
    """Makes a module one of a derived class, in place: its parameters and their names stay."""
    module.__class__ = kind
    for name, value in {"group": group, **attributes}.items():
        setattr(module, name, value)

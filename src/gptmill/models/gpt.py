"""GPT, composed as its config says; by default GPT-2, exactly: pre-norm blocks, learned positions, GELU (tanh),
biases, and a head tied to the embedding.

Shape suffixes: B batch, T time, N = B x T, C width, V vocabulary, L layers, E experts, G groups, W width of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gptmill.config.model import LearnedPositions, ModelConfig, Moe
from gptmill.config.run import Recompute
from gptmill.models.activation_checkpointing import run_block
from gptmill.models.attention import BlockContext, find_value_table
from gptmill.models.block import Block
from gptmill.models.fp8 import Fp8Format, fp8_linear
from gptmill.models.kernels.linear_cross_entropy import linear_cross_entropy
from gptmill.models.kv_cache import KVCache, LayerKVCache
from gptmill.models.losses import HeadLoss, LossConfig, compute_loss, summarise
from gptmill.models.masks import Mask, can_use_flex_attention, make_cached_mask, make_mask
from gptmill.models.mixture_of_experts import RouterStats
from gptmill.models.norms import build_norm, normalise
from gptmill.models.rotary import make_rotation
from gptmill.models.stream import Stream
from gptmill.models.targets import IGNORE_INDEX as IGNORE_INDEX

Build = Callable[[Callable[..., Any]], Callable[..., Any]]
COMPILED = ("_embed", "_find_values", "_run_block", "_measure")
INIT_STD = 0.02
INIT_GATE = 0.5
VOCAB_MULTIPLE = 64


def pad_vocab(vocab_size: int) -> int:
    """Rounds up so that the head's matmul fits the hardware's tiles: GPT-2's 50,257 become 50,304."""
    return math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Losses(NamedTuple):
    """Sums over the valid targets, by whose count the caller divides; `experts_LE` counts tokens."""

    objective: Tensor
    """What training makes smaller; when not training, the cross-entropy."""
    cross_entropy: Tensor
    per_domain_G: Tensor | None
    experts_LE: Tensor | None

    def detach(self) -> Losses:
        """The same numbers, with nothing left of how they were computed."""
        groups_G = None if self.per_domain_G is None else self.per_domain_G.detach()
        return Losses(self.objective.detach(), self.cross_entropy.detach(), groups_G, self.experts_LE)


class Trunk(NamedTuple):
    """What the blocks made of the tokens, before the final norm."""

    stream: Stream
    stats: list[RouterStats]
    context: BlockContext
    """As a block without a window and without value embeddings is given it."""


class GPT(nn.Module):
    """Tokens in; the summed losses out when targets are given, `logits` otherwise."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int, vocab_size: int | None = None) -> None:
        """`vocab_size` is how many of the rows are tokens; without it, all are."""
        super().__init__()
        self.config = config
        self.windows = config.list_windows()
        self.vocab_size = vocab_size or padded_vocab_size
        self.loss_config = LossConfig()
        self.fused = False
        self.fused_head = False
        self.recompute: Recompute = "none"
        self.head_format: Fp8Format | None = None
        width = config.embd_size
        self.token_embedding = nn.Embedding(padded_vocab_size, width)
        has_places = isinstance(config.positions, LearnedPositions)
        self.position_embedding = nn.Embedding(config.context_length, width) if has_places else None
        value_width = config.kv_heads * config.head_width
        self.value_embeddings = nn.ModuleList(
            nn.Embedding(padded_vocab_size, value_width) for _ in range(config.value_embeddings)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.head = None if config.tied_head else nn.Linear(width, padded_vocab_size, bias=False)
        self.head_copy: Tensor | None
        self.register_buffer("head_copy", None, persistent=False)
        self.extra_blocks = nn.ModuleList(Block(config, config.num_layers + k) for k in range(config.mtp_heads))

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        domains_B: Tensor | None = None,
    ) -> Losses:
        """The losses of predicting the targets. `documents_BT` as in `encode`; `groups_B` numbers the rows' groups."""
        rule = LossConfig(chunk_tokens=self.loss_config.chunk_tokens, num_domains=self.loss_config.num_domains)
        trunk = self._run_blocks(tokens_BT, documents_BT, targets_BT != IGNORE_INDEX)
        targets_N = targets_BT.flatten()
        domains_N = None if domains_B is None else domains_B[:, None].expand_as(tokens_BT).flatten()
        loss = self._measure(trunk.stream, targets_N, self.loss_config if self.training else rule, domains_N)
        experts_LE = torch.stack([stats.tokens_E for stats in trunk.stats]).detach() if trunk.stats else None
        objective = loss.objective
        if self.training and self.extra_blocks:
            objective = objective + self._look_further(trunk, targets_BT, documents_BT)
        if self.training and trunk.stats:
            objective = objective + (targets_N != IGNORE_INDEX).sum() * self._judge_routers(trunk.stats)
        return Losses(objective, loss.cross_entropy, loss.per_domain_G, experts_LE)

    def logits(self, tokens_BT: Tensor, caches: KVCache | None = None) -> Tensor:
        """The next-token logits at every position. With caches, the tokens continue what the caches hold."""
        if caches is None:
            return self.project(self.encode(tokens_BT))
        positions_T, layers = caches.extend(tokens_BT.shape[1])
        return self.continue_logits(tokens_BT, positions_T, layers)

    def continue_logits(
        self, tokens_BT: Tensor, positions_T: Tensor, layers: Sequence[LayerKVCache], build: Build = lambda part: part
    ) -> Tensor:
        """The logits of tokens at these places, all before which are in the layers' caches.

        `build` may compile the parts of this, of which a block is one, however many there are.
        """
        stream, contexts = build(GPT._begin)(self, tokens_BT, positions_T, layers[0].keys_BHSD.shape[2])
        run = build(Block.forward)
        for block, context, cache in zip(self.blocks, contexts, layers, strict=True):
            stream, _ = run(block, stream, context, cache)
        logits_BTV: Tensor = build(GPT._end)(self, stream)
        return logits_BTV

    def encode(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """The final hidden states.

        `documents_BT` holds the place in the row at which each token's document begins. Documents then do not see
        each other, and learned positions count from their beginnings.
        """
        return self._finish(self._run_blocks(tokens_BT, documents_BT).stream)

    @property
    def head_weight(self) -> Tensor:
        """The head's own; or the embedding, or a copy of it in another format, where somebody has put one."""
        if self.head is not None:
            return self.head.weight
        return self.token_embedding.weight if self.head_copy is None else self.head_copy

    def project(self, x_BTC: Tensor) -> Tensor:
        """The head: the token embedding again, or a matrix of its own."""
        logits_BTV = (
            F.linear(x_BTC, self.head_weight)
            if self.head_format is None
            else fp8_linear(x_BTC, self.head_weight, emulated=self.head_format == "fp8-emulated")
        )
        if (cap := self.config.logit_softcap) is None:
            return logits_BTV
        return cap * torch.tanh(logits_BTV.float() / cap)

    def compile_parts(self, **options: Any) -> None:
        """Compiles what the model consists of, with torch.compile's options: a block once, however many there are."""
        for name in COMPILED:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    def __getstate__(self) -> dict[str, Any]:
        """What is compiled stays with this model: a copy of it would compute with these weights."""
        return {name: value for name, value in super().__getstate__().items() if name not in COMPILED}  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's: normal weights, zero biases, and residual projections scaled down by depth, or zero if asked."""
        residual_std = 0.0 if self.config.zero_init else INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("value_gate"):
                parameter.fill_(INIT_GATE)
            else:
                std = residual_std if name.endswith(("proj.weight", "down_proj")) else INIT_STD
                parameter.normal_(0.0, std, generator=generator)

    def _run_blocks(self, tokens_BT: Tensor, documents_BT: Tensor | None, counts_BT: Tensor | None = None) -> Trunk:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        rotation = make_rotation(places_T, self.config)
        in_blocks = can_use_flex_attention(self.config, tokens_BT.device, training=self.training)
        masks: dict[int | None, Mask] = {}
        for window in dict.fromkeys([*self.windows, None] if self.extra_blocks else self.windows):
            masks[window] = make_mask(window, tokens_BT, documents_BT, in_blocks=in_blocks)
        stream = Stream(self._embed(tokens_BT, places_T if documents_BT is None else places_T - documents_BT))
        stats: list[RouterStats] = []
        for layer, block in enumerate(self.blocks):
            values_BTW = self._find_values(tokens_BT, layer)
            context = BlockContext(rotation, masks[self.windows[layer]], values_BTW, counts_BT=counts_BT)
            stream, layer_stats = self._run_block(block, stream, context)
            if layer_stats is not None:
                stats.append(layer_stats)
        return Trunk(stream, stats, BlockContext(rotation, masks.get(None, Mask()), counts_BT=counts_BT))

    def _run_block(self, block: nn.Module, stream: Stream, context: BlockContext) -> tuple[Stream, RouterStats | None]:
        result: tuple[Stream, RouterStats | None] = run_block(block, self.recompute, stream, context)
        return result

    def _embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTC = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTC = x_BTC + self.position_embedding(positions)
        kind = x_BTC.device.type
        if self.fused and torch.is_autocast_enabled(kind):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(kind))
        return self.dropout(x_BTC)  # type: ignore[no-any-return]

    def _begin(self, tokens_BT: Tensor, positions_T: Tensor, num_places: int) -> tuple[Stream, list[BlockContext]]:
        """What the first block is given, and each with its cache of so many places.

        It uses nothing that is compiled for training: that would be compiled again, for these shapes.
        """
        rotation = make_rotation(positions_T, self.config)
        masks = {window: make_cached_mask(window, positions_T, num_places) for window in dict.fromkeys(self.windows)}
        contexts = [
            BlockContext(rotation, masks[window], GPT._find_values(self, tokens_BT, layer), positions_T)
            for layer, window in enumerate(self.windows)
        ]
        return Stream(GPT._embed(self, tokens_BT, positions_T)), contexts

    def _end(self, stream: Stream) -> Tensor:
        return self.project(self._finish(stream))

    def _finish(self, stream: Stream) -> Tensor:
        return normalise(self.final_norm, stream, self.fused)[1].x_BTC

    def _measure(
        self, stream: Stream, targets_N: Tensor, rule: LossConfig, domains_N: Tensor | None = None
    ) -> HeadLoss:
        """The head's loss."""
        x_NC = self._finish(stream).flatten(0, 1)
        if self.fused_head and rule.is_plain and self.config.logit_softcap is None:
            losses = linear_cross_entropy(x_NC, self.head_weight, targets_N, rule.chunk_tokens, self.head_format)
            return summarise(*losses, rule.num_domains, domains_N)
        return compute_loss(self.project, x_NC, targets_N, rule, self.vocab_size, domains_N)

    def _find_values(self, tokens_BT: Tensor, layer: int) -> Tensor | None:
        table = find_value_table(self.config, layer)
        return None if table is None else self.value_embeddings[table](tokens_BT)

    def _look_further(self, trunk: Trunk, targets_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """The losses of heads that predict tokens further ahead, each from the trunk by a block of its own (Gloeckle
        et al. 2024). Sums like the next token's: all tokens weigh the same, whatever micro-batch they are in."""
        rule = LossConfig(chunk_tokens=self.loss_config.chunk_tokens)
        total = torch.zeros((), device=targets_BT.device)
        for ahead, block in enumerate(self.extra_blocks, start=1):
            stream, stats = self._run_block(block, trunk.stream, trunk.context)
            if stats is not None:
                trunk.stats.append(stats)
            further_BT = _shift_targets(targets_BT, documents_BT, ahead)
            total = total + self._measure(stream, further_BT.flatten(), rule).objective
        return total

    def _judge_routers(self, stats: list[RouterStats]) -> Tensor:
        """What the routers' losses add for each token, all of them alike."""
        moe = self.config.feed_forward
        assert isinstance(moe, Moe)
        balance = torch.stack([each.router_aux_loss for each in stats]).mean()
        z_loss = torch.stack([each.z_loss for each in stats]).mean()
        return moe.router_aux_loss * balance + moe.router_z_loss * z_loss


def _shift_targets(targets_BT: Tensor, documents_BT: Tensor | None, ahead: int) -> Tensor:
    """The targets of tokens further ahead; those past the row's end, or past the document's, are ignored."""
    further_BT = F.pad(targets_BT, (0, ahead), value=IGNORE_INDEX)[:, ahead:]
    if documents_BT is None:
        return further_BT
    same_BT = documents_BT == F.pad(documents_BT, (0, ahead), value=-1)[:, ahead:]
    return further_BT.where(same_BT, IGNORE_INDEX)


class SkipInit(TorchFunctionMode):
    """Within it, layers are built without the numbers that torch begins with, which it would draw for nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def build_gpt(config: ModelConfig, padded_vocab_size: int, seed: int, vocab_size: int | None = None) -> GPT:
    """A freshly initialised model on the CPU, the same on every machine and rank for the same seed."""
    with SkipInit():
        model = GPT(config, padded_vocab_size, vocab_size)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model

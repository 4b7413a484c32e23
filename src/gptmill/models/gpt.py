"""GPT: a Transformer with the losses of its predictions, which continues texts from a KV cache.

By default it is GPT-2, exactly: pre-norm blocks, learned positions, GELU (tanh), biases, and an LM head tied to the
token embedding.

Shape suffixes: B batch, T sequence, N = B x T tokens, C channels, V vocabulary, L layers, E experts, G domains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.config.model import ModelConfig, Moe
from gptmill.models.attention import Attention, BlockContext
from gptmill.models.initialisation import SkipInit, init_weights
from gptmill.models.kv_cache import KVCache, LayerKVCache
from gptmill.models.language_model import Losses
from gptmill.models.losses import IGNORE_INDEX, LossConfig, LossSums, compute_loss
from gptmill.models.masks import Mask, make_cached_mask
from gptmill.models.mixture_of_experts import RouterStats
from gptmill.models.rotary import make_rope
from gptmill.models.transformer import Backbone, Transformer

CompilePart = Callable[[Callable[..., Any]], Callable[..., Any]]
VOCAB_MULTIPLE = 64


def pad_vocab(vocab_size: int) -> int:
    """Rounds up so that the LM head's GEMM fits the hardware's tiles: GPT-2's 50,257 become 50,304."""
    return math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class GPT(Transformer):
    """The built-in architecture."""

    compiled_parts: ClassVar[tuple[str, ...]] = (*Transformer.compiled_parts, "_compute_loss")

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None, domains_B: Tensor | None = None
    ) -> Losses:
        """The losses of predicting the targets. `documents_BT` as in `hidden_states`; `domains_B` numbers the rows'
        domains."""
        backbone = self._run_blocks(tokens_BT, documents_BT, targets_BT != IGNORE_INDEX)
        targets_N = targets_BT.flatten()
        domains_N = None if domains_B is None else domains_B[:, None].expand_as(tokens_BT).flatten()
        config = self.loss_config if self.training else self.loss_config.without_extras()
        x_BTC = self._fork(backbone.x_BTC) if self.extra_blocks else backbone.x_BTC
        sums = self._compute_loss(x_BTC, targets_N, config, domains_N)
        stats = backbone.router_stats
        experts_LE = torch.stack([layer.tokens_E for layer in stats]).detach() if stats else None
        objective = sums.objective
        if self.training and self.extra_blocks:
            objective = objective + self._predict_further(backbone, targets_BT, documents_BT)
        if self.training and stats:
            objective = objective + (targets_N != IGNORE_INDEX).sum() * self._router_loss(stats)
        return Losses(objective, sums.cross_entropy, sums.per_domain_G, experts_LE)

    def logits(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The next-token logits at every position. With a KV cache, the tokens continue what it holds."""
        if cache is None:
            return self.lm_head(self.hidden_states(tokens_BT))
        positions_T, layers = cache.extend(tokens_BT.shape[1])
        return self.decode_step(tokens_BT, positions_T, layers, is_filled=tokens_BT.shape[1] == 1)

    def decode_step(
        self,
        tokens_BT: Tensor,
        positions: Tensor,
        layers: Sequence[LayerKVCache],
        compile_part: CompilePart = lambda part: part,
        *,
        is_filled: bool = False,
    ) -> Tensor:
        """The logits of tokens at these positions, (T) or (B, T); the layers' KV caches hold all tokens before them.

        `is_filled` says that each token sees all that the caches hold. `compile_part` may compile the step's parts. All
        blocks share one of them.
        """
        x_BTC = self.fill_cache(tokens_BT, positions, layers, compile_part, is_filled=is_filled)
        logits_BTV: Tensor = compile_part(GPT._finish_decoding)(self, x_BTC)
        return logits_BTV

    def fill_cache(
        self,
        tokens_BT: Tensor,
        positions: Tensor,
        layers: Sequence[LayerKVCache],
        compile_part: CompilePart = lambda part: part,
        *,
        is_filled: bool = False,
    ) -> Tensor:
        """Decodes without the LM head: adds the tokens to the KV caches, and returns what the blocks made of them."""
        num_positions = layers[0].keys_BHSD.shape[2]
        begin = compile_part(GPT._begin_decoding)
        x_BTC, contexts = begin(self, tokens_BT, positions, num_positions, is_filled)
        run = compile_part(self.block_class.forward)
        for block, context, cache in zip(self.blocks, contexts, layers, strict=True):
            x_BTC, _ = run(block, x_BTC, context, cache)
        return x_BTC  # type: ignore[no-any-return]

    @property
    def has_kv_cache(self) -> bool:
        """Whether all attention can continue from a KV cache; that of a plug-in can if it derives from `Attention`."""
        return all(isinstance(block.attention, Attention) for block in self.blocks)

    @property
    def takes_branches(self) -> bool:
        """Whether all attention keeps to a dense mask with positions of its own; that of a plug-in may not."""
        return type(self) is GPT and self.has_kv_cache

    def _begin_decoding(
        self, tokens_BT: Tensor, positions: Tensor, num_positions: int, is_filled: bool
    ) -> tuple[Tensor, list[BlockContext]]:
        """The embedded tokens, and each block's context for a KV cache of `num_positions`.

        It calls the class's methods: the instance's may be compiled, for the shapes of training.
        """
        cls, rope = type(self), make_rope(positions, self.config)
        masks = {
            window: Mask(is_causal=False)
            if is_filled and (window is None or window >= num_positions)
            else make_cached_mask(window, positions, num_positions)
            for window in dict.fromkeys(self.windows)
        }
        slots = positions % num_positions
        contexts = [
            BlockContext(rope, masks[window], cls._embed_values(self, tokens_BT, layer), slots)
            for layer, window in enumerate(self.windows)
        ]
        return cls._embed(self, tokens_BT, positions), contexts

    def _finish_decoding(self, x_BTC: Tensor) -> Tensor:
        return self.lm_head(self._normalise(x_BTC))

    def _compute_loss(
        self, x_BTC: Tensor, targets_N: Tensor, config: LossConfig, domains_N: Tensor | None = None
    ) -> LossSums:
        x_NC = self._normalise(x_BTC).flatten(0, 1)
        size, padded, share = self.vocab_size, self.config.padded_softmax, self.vocab_share
        head = self._compute_logits
        return compute_loss(head, x_NC, targets_N, config, size, domains_N, padded_softmax=padded, share=share)

    def _predict_further(self, backbone: Backbone, targets_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """The loss of multi-token prediction (Gloeckle et al. 2024): for each further token ahead a block of its own
        on top of the backbone. A sum like the next token's: every token weighs the same in any micro-batch."""
        config = LossConfig(chunk_tokens=self.loss_config.chunk_tokens)
        total = torch.zeros((), device=targets_BT.device)
        for ahead, block in enumerate(self.extra_blocks, start=1):
            x_BTC, stats = self._run_block(block, self._fork(backbone.x_BTC), backbone.context)
            if stats is not None:
                backbone.router_stats.append(stats)
            further_BT = _shift_targets(targets_BT, documents_BT, ahead)
            total = total + self._compute_loss(x_BTC, further_BT.flatten(), config).objective
        return total

    def _fork(self, x_BTC: Tensor) -> Tensor:
        """A view for one of several consumers: autograd sums that consumer's gradients first, then those of all."""
        return x_BTC.view_as(x_BTC)

    def _router_loss(self, stats: list[RouterStats]) -> Tensor:
        """The routers' auxiliary losses per token: load balancing and z-loss, weighted and averaged over layers."""
        moe = self.config.feed_forward
        assert isinstance(moe, Moe)
        aux_loss = torch.stack([layer.aux_loss for layer in stats]).mean()
        z_loss = torch.stack([layer.z_loss for layer in stats]).mean()
        return moe.router_aux_loss * aux_loss + moe.router_z_loss * z_loss


def _shift_targets(targets_BT: Tensor, documents_BT: Tensor | None, ahead: int) -> Tensor:
    """The targets of tokens further ahead; past the end of the row or of the document they are ignored."""
    further_BT = F.pad(targets_BT, (0, ahead), value=IGNORE_INDEX)[:, ahead:]
    if documents_BT is None:
        return further_BT
    same_BT = documents_BT == F.pad(documents_BT, (0, ahead), value=-1)[:, ahead:]
    return further_BT.where(same_BT, IGNORE_INDEX)


def build_gpt(
    config: ModelConfig,
    padded_vocab_size: int,
    seed: int,
    vocab_size: int | None = None,
    model_class: type[GPT] = GPT,
) -> GPT:
    """A freshly initialised model on the CPU, the same on every machine and rank for the same seed."""
    with SkipInit():
        model = model_class(config, padded_vocab_size, vocab_size)
    init_weights(model, config, torch.Generator().manual_seed(seed))
    return model


def build_meta_gpt(
    config: ModelConfig, padded_vocab_size: int, vocab_size: int | None = None, model_class: type[GPT] = GPT
) -> GPT:
    """A model on the meta device: shapes without memory, for weights that come later."""
    with torch.device("meta"), SkipInit():
        return model_class(config, padded_vocab_size, vocab_size)

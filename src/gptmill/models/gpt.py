"""GPT, composed as its config says. By default it is GPT-2, exactly: pre-norm blocks, learned positions, GELU (tanh),
biases, and an LM head tied to the token embedding.

Shape suffixes: B batch, T sequence, N = B x T tokens, C channels, V vocabulary, L layers, E experts, G domains,
W width of value embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import LearnedPositions, ModelConfig, Moe
from gptmill.config.run import ActivationCheckpointing
from gptmill.models.activation_checkpointing import run_block, run_forward
from gptmill.models.attention import Attention, BlockContext, find_value_table
from gptmill.models.block import Block
from gptmill.models.initialisation import SkipInit, init_weights
from gptmill.models.kv_cache import KVCache, LayerKVCache
from gptmill.models.language_model import LanguageModel
from gptmill.models.language_model import Losses as Losses
from gptmill.models.losses import IGNORE_INDEX, LossConfig, LossSums, VocabShare, compute_loss
from gptmill.models.masks import (
    Branches,
    Mask,
    can_use_flex_attention,
    make_branch_mask,
    make_cached_mask,
    make_mask,
)
from gptmill.models.mixture_of_experts import RouterStats
from gptmill.models.norms import build_norm
from gptmill.models.rotary import make_rope

CompilePart = Callable[[Callable[..., Any]], Callable[..., Any]]
COMPILED_PARTS = ("_embed", "_embed_values", "_run_block", "_compute_loss")
VOCAB_MULTIPLE = 64


def pad_vocab(vocab_size: int) -> int:
    """Rounds up so that the LM head's GEMM fits the hardware's tiles: GPT-2's 50,257 become 50,304."""
    return math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Backbone(NamedTuple):
    """What the blocks made of the tokens, before the final norm."""

    x_BTC: Tensor
    router_stats: list[RouterStats]
    context: BlockContext
    """The context of a block without a sliding window and value embeddings."""


class GPT(LanguageModel):
    """The built-in architecture."""

    block_class: ClassVar[type[Block]] = Block
    vocab_share: VocabShare | None = None
    """The tokens whose rows of the embedding and of the head this process has, where these are not all."""
    inference_methods: ClassVar[tuple[str, ...]] = ("hidden_states",)

    def __init__(self, config: ModelConfig, padded_vocab_size: int, vocab_size: int | None = None) -> None:
        """`vocab_size` is how many rows of the embedding are tokens; by default all of them."""
        super().__init__()
        self.config = config
        self.windows = config.list_windows()
        self.vocab_size = vocab_size or padded_vocab_size
        self.loss_config = LossConfig()
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.head_linear: Callable[[Tensor, Tensor], Tensor] = F.linear
        width = config.embd_size
        self.token_embedding = nn.Embedding(padded_vocab_size, width)
        has_positions = isinstance(config.positions, LearnedPositions)
        self.position_embedding = nn.Embedding(config.context_length, width) if has_positions else None
        value_width = config.kv_heads * config.head_width
        self.value_embeddings = nn.ModuleList(
            nn.Embedding(padded_vocab_size, value_width) for _ in range(config.value_embeddings)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block_class(config, layer) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.head = None if config.tied_head else nn.Linear(width, padded_vocab_size, bias=False)
        self.tied_head_copy: Tensor | None
        self.register_buffer("tied_head_copy", None, persistent=False)
        # Multi-token prediction: one block for each further token ahead.
        self.extra_blocks = nn.ModuleList(
            self.block_class(config, config.num_layers + ahead) for ahead in range(config.mtp_heads)
        )

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        domains_B: Tensor | None = None,
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

    def hidden_states(
        self, tokens_BT: Tensor, documents_BT: Tensor | None = None, branches: Branches | None = None
    ) -> Tensor:
        """The final hidden states, behind the last norm.

        `documents_BT` holds, for each token, the position in the row at which its document begins. Documents then do
        not attend to each other, and learned positions count from their beginnings. `branches` are for models that
        take them, instead of documents.
        """
        if branches is None:
            return self._normalise(self._run_blocks(tokens_BT, documents_BT).x_BTC)
        rope = make_rope(branches.positions_BT, self.config)
        contexts = {window: BlockContext(rope, make_branch_mask(window, branches)) for window in self.list_masks()}
        x_BTC = self._embed(tokens_BT, branches.positions_BT)
        return self._normalise(self._run_layers(tokens_BT, x_BTC, contexts).x_BTC)

    def lm_head(self, x_BTC: Tensor) -> Tensor:
        """Logits: the product with the token embedding, or with a matrix of its own, and the soft-cap."""
        logits_BTV = self._compute_logits(x_BTC)
        return logits_BTV if self.vocab_share is None else self.vocab_share.gather(logits_BTV)

    def _compute_logits(self, x_BTC: Tensor) -> Tensor:
        """The same for the tokens whose weights this process has."""
        logits_BTV = self.head_linear(x_BTC, self.head_weight)
        if (cap := self.config.logit_softcap) is None:
            return logits_BTV
        return cap * torch.tanh(logits_BTV.float() / cap)

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight: its own, or the token embedding; or the copy of that in another dtype that a caller
        has put in its place."""
        if self.head is not None:
            return self.head.weight
        return self.token_embedding.weight if self.tied_head_copy is None else self.tied_head_copy

    @property
    def has_kv_cache(self) -> bool:
        """Whether all attention can continue from a KV cache; that of a plug-in can if it derives from `Attention`."""
        return all(isinstance(block.attention, Attention) for block in self.blocks)

    @property
    def takes_branches(self) -> bool:
        """Whether all attention keeps to a dense mask with positions of its own; that of a plug-in may not."""
        return type(self) is GPT and self.has_kv_cache

    def set_activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        """Chooses what training keeps of a block for the backward pass."""
        self.activation_checkpointing = mode

    def compile_parts(self, **options: Any) -> None:
        """Compiles the model's parts with torch.compile's options: one graph for all blocks, however many there are."""
        for name in COMPILED_PARTS:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    def compile_in_place(self, **options: Any) -> None:
        for name in COMPILED_PARTS:
            if name != "_run_block":
                setattr(self, name, torch.compile(getattr(self, name), **options))
        run, mode = torch.compile(run_forward, **options), self.activation_checkpointing
        for block in self.list_blocks():
            block.forward = partial(run, block, mode)
        self.activation_checkpointing = "none"  # it is a part of the compiled code

    def list_blocks(self) -> list[nn.Module]:
        return [*self.blocks, *self.extra_blocks]

    def __getstate__(self) -> dict[str, Any]:
        """Without the compiled parts: in a copy of the model they would still use this model's weights."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in COMPILED_PARTS}

    def _run_blocks(self, tokens_BT: Tensor, documents_BT: Tensor | None, counts_BT: Tensor | None = None) -> Backbone:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        contexts = self._make_contexts(tokens_BT, documents_BT, counts_BT)
        x_BTC = self._embed(tokens_BT, positions_T if documents_BT is None else positions_T - documents_BT)
        return self._run_layers(tokens_BT, x_BTC, contexts)

    def _run_layers(self, tokens_BT: Tensor, x_BTC: Tensor, contexts: Mapping[int | None, BlockContext]) -> Backbone:
        stats: list[RouterStats] = []
        for layer, block in enumerate(self.blocks):
            values_BTW = self._embed_values(tokens_BT, layer)
            context = contexts[self.windows[layer]]._replace(value_embedding_BTW=values_BTW)
            x_BTC, layer_stats = self._run_block(block, x_BTC, context)
            if layer_stats is not None:
                stats.append(layer_stats)
        return Backbone(x_BTC, stats, contexts.get(None, BlockContext()))

    def _make_contexts(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, counts_BT: Tensor | None
    ) -> dict[int | None, BlockContext]:
        """The context of blocks with each sliding window, still without value embeddings."""
        rope = make_rope(torch.arange(tokens_BT.shape[1], device=tokens_BT.device), self.config)
        use_flex = can_use_flex_attention(self.config, tokens_BT.device, training=self.training)
        return {
            window: BlockContext(
                rope, make_mask(window, tokens_BT, documents_BT, use_flex=use_flex), counts_BT=counts_BT
            )
            for window in self.list_masks()
        }

    def list_masks(self) -> list[int | None]:
        """The sliding windows for which blocks need a mask; multi-token prediction has none."""
        return list(dict.fromkeys([*self.windows, None] if self.extra_blocks else self.windows))

    def _run_block(self, block: nn.Module, x_BTC: Tensor, context: BlockContext) -> tuple[Tensor, RouterStats | None]:
        result: tuple[Tensor, RouterStats | None] = run_block(block, self.activation_checkpointing, x_BTC, context)
        return result

    def _embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self._sum_embeddings(tokens_BT, positions))  # type: ignore[no-any-return]

    def _sum_embeddings(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        x_BTC: Tensor = self.token_embedding(tokens_BT)
        return x_BTC if self.position_embedding is None else x_BTC + self.position_embedding(positions)

    def _embed_values(self, tokens_BT: Tensor, layer: int) -> Tensor | None:
        table = find_value_table(self.config, layer)
        return None if table is None else self.value_embeddings[table](tokens_BT)

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

    def _normalise(self, x_BTC: Tensor) -> Tensor:
        return self.final_norm(x_BTC)  # type: ignore[no-any-return]

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

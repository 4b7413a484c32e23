"""The Transformer that GPT is made of: embeddings, blocks and an LM head, composed as its config says.

Shape suffixes: B batch, T sequence, C channels, V vocabulary, W width of value embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.model import LearnedPositions, ModelConfig
from gptmill.config.run import ActivationCheckpointing
from gptmill.models.activation_checkpointing import run_block, run_forward
from gptmill.models.attention import BlockContext, find_value_table
from gptmill.models.block import Block
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import LossConfig, VocabShare
from gptmill.models.masks import Branches, can_use_flex_attention, make_branch_mask, make_mask
from gptmill.models.mixture_of_experts import RouterStats
from gptmill.models.norms import build_norm
from gptmill.models.rotary import make_rope


class Backbone(NamedTuple):
    """What the blocks made of the tokens, before the final norm."""

    x_BTC: Tensor
    router_stats: list[RouterStats]
    context: BlockContext
    """The context of a block without a sliding window and value embeddings."""


class Transformer(LanguageModel):
    """Tokens in, hidden states and logits out."""

    block_class: ClassVar[type[Block]] = Block
    compiled_parts: ClassVar[tuple[str, ...]] = ("_embed", "_embed_values", "_run_block")
    inference_methods: ClassVar[tuple[str, ...]] = ("hidden_states",)
    vocab_share: VocabShare | None = None
    """The tokens whose rows of the embedding and of the head this process has, where these are not all."""

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

    def set_activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        """Chooses what training keeps of a block for the backward pass."""
        self.activation_checkpointing = mode

    def compile_parts(self, **options: Any) -> None:
        """Compiles the model's parts with torch.compile's options: one graph for all blocks, however many there are."""
        for name in self.compiled_parts:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    def compile_in_place(self, **options: Any) -> None:
        for name in self.compiled_parts:
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
        return {name: value for name, value in state.items() if name not in self.compiled_parts}

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

    def _normalise(self, x_BTC: Tensor) -> Tensor:
        return self.final_norm(x_BTC)  # type: ignore[no-any-return]

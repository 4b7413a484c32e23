"""ModelConfig: the architecture of a model. Defaults are GPT-2 124M.

A component with variants is a union of dataclasses: `--feed_forward moe` selects one by its tag, and the variant's own
fields are flat flags and recipe keys like all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gptmill.config.value_syntax import parse_windows

HIDDEN_MULTIPLE = 64  # keeps GEMM dimensions aligned with the hardware's tiles

RouterBalance = Literal["sequence", "batch"]


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm: subtracts the mean and divides by the standard deviation."""

    tag: ClassVar[str] = "layernorm"
    norm_bias: bool = True
    """layernorm: add a bias to the norms."""


@dataclass(frozen=True)
class RmsNorm:
    """RMSNorm: divides by the root mean square; no mean, no bias."""

    tag: ClassVar[str] = "rmsnorm"


@dataclass(frozen=True)
class LearnedPositions:
    """Learned absolute position embeddings, as in GPT-2."""

    tag: ClassVar[str] = "learned"


@dataclass(frozen=True)
class NoScaling:
    """Unscaled RoPE."""

    tag: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling:
    """Linear RoPE scaling (position interpolation): all positions are divided by rope_factor."""

    tag: ClassVar[str] = "linear"
    rope_factor: float = 8.0
    """rope_scaling linear, llama3: factor by which positions are compressed."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's RoPE scaling: low frequencies are divided by rope_factor, high frequencies are unchanged."""

    tag: ClassVar[str] = "llama3"
    rope_factor: float = 8.0
    """rope_scaling linear, llama3: factor by which positions are compressed."""
    rope_original_context: int = 8192
    """rope_scaling llama3: context length before scaling (original_max_position_embeddings)."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (RoPE) on queries and keys."""

    tag: ClassVar[str] = "rope"
    rope_base: float = 10_000.0
    """rope: base of the frequencies (rope_theta)."""
    rope_scaling: NoScaling | LinearScaling | Llama3Scaling = NoScaling()
    """rope: none, linear (position interpolation) or llama3 (low frequencies only)."""


@dataclass(frozen=True)
class NoPositions:
    """No position embeddings (NoPE): order comes from the causal mask alone."""

    tag: ClassVar[str] = "none"


@dataclass(frozen=True)
class Gelu:
    """MLP with GELU (tanh approximation), as in GPT-2."""

    tag: ClassVar[str] = "gelu"
    ffn_size: int | None = None
    """MLP intermediate size (default: 4 x embd_size; swiglu: 8/3 x embd_size; moe: that / experts_per_token)."""


@dataclass(frozen=True)
class Relu2:
    """MLP with squared ReLU."""

    tag: ClassVar[str] = "relu2"
    ffn_size: int | None = None
    """MLP intermediate size (default: 4 x embd_size; swiglu: 8/3 x embd_size; moe: that / experts_per_token)."""


@dataclass(frozen=True)
class SwiGlu:
    """Gated MLP with SiLU (SwiGLU), as in Llama."""

    tag: ClassVar[str] = "swiglu"
    ffn_size: int | None = None
    """MLP intermediate size (default: 4 x embd_size; swiglu: 8/3 x embd_size; moe: that / experts_per_token)."""


@dataclass(frozen=True)
class Moe:
    """Mixture of SwiGLU experts with top-k routing; no token is dropped."""

    tag: ClassVar[str] = "moe"
    num_experts: int = 8
    """moe: experts per layer."""
    experts_per_token: int = 2
    """moe: experts that each token is routed to (top-k)."""
    ffn_size: int | None = None
    """MLP intermediate size (default: 4 x embd_size; swiglu: 8/3 x embd_size; moe: that / experts_per_token)."""
    router_aux_loss: float = 0.01
    """moe: weight of the load-balancing loss."""
    router_z_loss: float = 0.001
    """moe: weight of the router z-loss, which keeps router logits small."""
    router_balance: RouterBalance = "sequence"
    """moe: balance the experts' loads in each sequence, or in each micro-batch (batch; depends on mini_batch_size)."""


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax attention: multi-head, or grouped-query with num_kv_heads."""

    tag: ClassVar[str] = "softmax"


@dataclass(frozen=True)
class Gpt:
    """A GPT of blocks with attention and a feed-forward layer."""

    tag: ClassVar[str] = "gpt"


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    num_layers: int = 12
    """Number of transformer blocks (n_layer)."""
    embd_size: int = 768
    """Hidden size (n_embd, d_model)."""
    num_heads: int = 12
    """Attention heads (n_head); must divide embd_size unless head_size is set."""
    context_length: int = 1024
    """Sequence length in tokens (block_size): training windows and the model's context."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and residual branches."""
    norm: LayerNorm | RmsNorm = LayerNorm()
    """Normalisation before attention, MLP and output head: layernorm or rmsnorm."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    bias: bool = True
    """Use biases in the linear layers."""
    positions: LearnedPositions | Rope | NoPositions = LearnedPositions()
    """Position encoding: learned (absolute), rope (rotary) or none."""
    num_kv_heads: int | None = None
    """Key/value heads for grouped-query attention (GQA); 1 is multi-query (default: num_heads)."""
    head_size: int | None = None
    """Dimension of an attention head (default: embd_size / num_heads)."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys, per head (QK-norm)."""
    attention_windows: str | None = None
    """Sliding-window attention: windows of the layers, e.g. 256,256,full, repeated over all layers (default: full)."""
    attention: SoftmaxAttention = SoftmaxAttention()
    """Attention of the blocks: softmax, or one registered by a plug-in."""
    feed_forward: Gelu | Relu2 | SwiGlu | Moe = Gelu()
    """Feed-forward layer (MLP): gelu, relu2, swiglu, or moe (mixture of experts)."""
    tied_head: bool = True
    """Share the weights of token embedding and LM head (tied embeddings)."""
    logit_softcap: float | None = None
    """Soft-cap the logits at c: c * tanh(logits / c) (default: off)."""
    value_embeddings: int = 0
    """Value embeddings: N extra token embeddings, added to the attention values of the first and last N layers."""
    zero_init: bool = False
    """Zero-initialise the projections into the residual stream: each block starts as the identity."""
    mtp_heads: int = 0
    """Multi-token prediction (MTP): extra blocks that predict further tokens ahead; used in training only."""
    padded_softmax: bool = False
    """Let the rows that only pad the vocabulary take part in the loss's softmax, as runs of older versions do."""
    architecture: Gpt = Gpt()
    """gpt, or a whole model registered by a plug-in."""

    @property
    def head_width(self) -> int:
        return self.head_size or self.embd_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_size(self) -> int:
        """Intermediate size of the MLP or of each expert; the defaults give a token the same number of weights."""
        ffn_size: int | None = getattr(self.feed_forward, "ffn_size", None)  # a registered variant may have none
        if ffn_size is not None:
            return ffn_size
        if not isinstance(self.feed_forward, SwiGlu | Moe):
            return 4 * self.embd_size
        share = self.feed_forward.experts_per_token if isinstance(self.feed_forward, Moe) else 1
        return HIDDEN_MULTIPLE * math.ceil(8 * self.embd_size / 3 / share / HIDDEN_MULTIPLE)

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The fields whose variant a plug-in has registered."""
        is_own = {
            "architecture": not isinstance(self.architecture, Gpt),
            "attention": not isinstance(self.attention, SoftmaxAttention),
            "feed_forward": not isinstance(self.feed_forward, Gelu | Relu2 | SwiGlu | Moe),
        }
        return tuple(name for name, own in is_own.items() if own)

    def list_windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, the current token included; None for full attention."""
        if self.attention_windows is None:
            return (None,) * self.num_layers
        pattern = parse_windows(self.attention_windows)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

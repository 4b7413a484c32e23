"""How much memory training takes on one rank, estimated from the config before anything is built.

The estimate follows what autograd keeps of the blocks under autocast with fused attention, and errs on the high side.
The allocator, CUDA itself and other programs need more memory on top of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptmill.config.model import Gelu, ModelConfig, Moe, Relu2, RmsNorm, Rope
from gptmill.config.run import ActivationCheckpointing, PrecisionName, RunConfig
from gptmill.models.fused.dispatch import PRECISIONS
from gptmill.models.parameters import count_parameters

FP32 = 4
HALF = 2
HALF_PRECISIONS = ("bf16", "fp16", "fp8")
INDEX = 8
# Bytes per logit: what the forward pass keeps, and what the loss's backward pass adds. Eager: the log-probabilities;
# their gradient and that of the logits. A compiled model materialises neither.
EAGER_LOGITS = (4, 8)
COMPILED_LOGITS = (2, 4)
OPTIMIZER_BYTES = {"adamw": 8, "muon": 8, "lion": 4, "adamw8bit": 3}  # upper bounds, per parameter
USUAL_OPTIMIZER_BYTES = 8  # two moments, as most optimizers of plug-ins have
EMA_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose, at the peak of a step."""

    weights: int
    """The fp32 weights, and their casts for GEMMs in half precision."""
    gradients: int
    optimizer: int
    activations: int
    """What the blocks keep for the backward pass."""
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_run_memory(
    config: RunConfig,
    padded_vocab_size: int,
    mini_batch_size: int,
    precision: PrecisionName,
    *,
    has_kernels: bool,
    micro_batches: int = 1,
) -> MemoryEstimate:
    """The estimate for a run whose device can run the kernels, or cannot; `micro_batches` are those of a rank."""
    machine, optimizer = config.machine, config.optimizer
    estimate = estimate_memory(
        config.model,
        padded_vocab_size,
        mini_batch_size,
        precision=precision,
        recompute=machine.gradient_checkpointing,
        loss_chunk=machine.loss_chunk,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES.get(optimizer.optimizer.tag, USUAL_OPTIMIZER_BYTES)
        + EMA_BYTES * (optimizer.ema_decay is not None),
        compiled=machine.compile,
        fused_head=machine.kernels != "none" and precision in PRECISIONS and has_kernels,
    )
    if not machine.exact_ranks:
        return estimate
    # One sum for each level of the tree above the micro-batches: see exact_sum.
    return replace(estimate, gradients=estimate.gradients * max(1, (micro_batches - 1).bit_length()))


def estimate_memory(
    config: ModelConfig,
    vocab_size: int,
    mini_batch_size: int,
    *,
    precision: str,
    recompute: ActivationCheckpointing,
    loss_chunk: int | None,
    optimizer_bytes_per_parameter: int = 8,
    compiled: bool = False,
    fused_head: bool = False,
) -> MemoryEstimate:
    """Bytes of a training step with micro-batches of `mini_batch_size` windows; `vocab_size` includes padding."""
    parameters = count_parameters(config, vocab_size).total
    number = HALF if precision in HALF_PRECISIONS else FP32
    tokens = mini_batch_size * config.context_length
    if fused_head:
        logits = _count_fused_logits(config, vocab_size, min(tokens, loss_chunk or tokens))
    else:
        logits = _count_logits(config, vocab_size, tokens, number, loss_chunk, compiled)
    # The logits are freed before the last block's backward pass.
    transient = tokens * _count_transient(config, number, recompute)
    return MemoryEstimate(
        weights=parameters * (FP32 + (HALF if number == HALF else 0)),
        gradients=parameters * FP32,
        optimizer=parameters * optimizer_bytes_per_parameter,
        activations=tokens * _count_activations(config, number, recompute) + max(0, transient - logits),
        logits=logits,
    )


def _count_activations(config: ModelConfig, number: int, recompute: ActivationCheckpointing) -> int:
    """Bytes per token that the backbone, blocks of multi-token prediction included, keeps for the backward pass."""
    width, blocks = config.embd_size, config.num_layers + config.mtp_heads
    stream = FP32 * width
    kept = stream + _count_dropout(config)
    if recompute == "none":
        kept = _count_block(config, number)
    elif recompute == "selective":
        kept += _count_kept_matmuls(config, number)
    values = 2 * config.value_embeddings * config.kv_heads * config.head_width * (FP32 + number)
    ends = (1 + config.mtp_heads) * (stream + _count_norm(config) + number * width) + stream + 2 * INDEX
    return blocks * kept + values + ends


def _count_transient(config: ModelConfig, number: int, recompute: ActivationCheckpointing) -> int:
    """Bytes per token that exist only during a block's backward pass: gradients, and recomputed activations."""
    gradients = 3 * FP32 * config.embd_size + 2 * number * _count_hidden(config)
    return gradients + (0 if recompute == "none" else _count_block(config, number))


def _count_block(config: ModelConfig, number: int) -> int:
    """All of a block: the residual stream before each half, and what the halves keep."""
    parts = _count_attention(config, number) + _count_feed_forward(config, number)
    return 2 * (FP32 * config.embd_size + _count_norm(config)) + parts


def _count_norm(config: ModelConfig) -> int:
    """What a norm keeps besides its input: RMSNorm, which is not one kernel, its output too."""
    return FP32 * config.embd_size if isinstance(config.norm, RmsNorm) else 0


def _count_attention(config: ModelConfig, number: int) -> int:
    """The norm's output, queries, keys and values, attention's output and its log-sum-exps."""
    queries, keys = config.num_heads * config.head_width, config.kv_heads * config.head_width
    kept = number * (config.embd_size + queries + 2 * keys + queries) + FP32 * config.num_heads
    if config.qk_norm:  # input and output in fp32
        kept += 2 * FP32 * (queries + keys)
    if isinstance(config.positions, Rope):
        kept += number * (queries + keys)
    return kept + _count_dropout(config)


def _count_feed_forward(config: ModelConfig, number: int) -> int:
    """The norm's output, and the activations between the GEMMs."""
    hidden, width = _count_hidden(config), config.embd_size
    if isinstance(config.feed_forward, Gelu | Relu2):
        return number * (width + 2 * hidden) + _count_dropout(config)
    inside = number * 4 * hidden  # both projections, SiLU of one, and the product
    if isinstance(config.feed_forward, Moe):
        choices = config.feed_forward.experts_per_token
        # Each chosen expert has the token as input, and an output that is weighted and added; the router runs in fp32.
        inside += choices * width * (2 * number + FP32) + FP32 * (width + 3 * config.feed_forward.num_experts)
    return number * width + inside + _count_dropout(config)


def _count_kept_matmuls(config: ModelConfig, number: int) -> int:
    """What selective activation checkpointing keeps inside a block."""
    queries, keys = config.num_heads * config.head_width, config.kv_heads * config.head_width
    attention = number * (2 * queries + 2 * keys + config.embd_size) + FP32 * config.num_heads
    hidden, width = _count_hidden(config), config.embd_size
    if isinstance(config.feed_forward, Gelu | Relu2):
        return attention + number * (hidden + width)
    if isinstance(config.feed_forward, Moe):
        width *= config.feed_forward.experts_per_token
        attention += FP32 * config.feed_forward.num_experts
    return attention + number * (2 * hidden + width)


def _count_hidden(config: ModelConfig) -> int:
    """Hidden width of a token, over all the experts that it is routed to."""
    share = config.feed_forward.experts_per_token if isinstance(config.feed_forward, Moe) else 1
    return share * config.hidden_size


def _count_dropout(config: ModelConfig) -> int:
    return config.embd_size if config.dropout else 0


def _count_logits(
    config: ModelConfig, vocab_size: int, tokens: int, number: int, loss_chunk: int | None, compiled: bool
) -> int:
    left, added = COMPILED_LOGITS if compiled else EAGER_LOGITS
    if compiled:
        left, added = left * number // HALF, added * number // HALF
    if loss_chunk is None or loss_chunk >= tokens:
        return tokens * vocab_size * (left * (1 + config.mtp_heads) + added)
    # Each chunk also produces a gradient of the whole head, to be added to the others'.
    return loss_chunk * vocab_size * (left + added) + 2 * FP32 * vocab_size * config.embd_size


def _count_fused_logits(config: ModelConfig, vocab_size: int, tokens: int) -> int:
    """One half-precision copy of the logits; the backward pass scales each head's weight gradient, kept until then."""
    weight = vocab_size * config.embd_size
    return tokens * vocab_size * HALF + (2 + config.mtp_heads) * FP32 * weight + HALF * weight

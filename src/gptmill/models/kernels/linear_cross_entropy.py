"""Fused linear cross-entropy: the LM head, its loss, and the gradients of both, with one copy of the logits.

With logits = x @ weight.T (N x V) and p = softmax(logits), the gradient of the summed cross-entropy is known as soon as
the logits are, but for the scalar d_total that the backward pass brings:

    loss     = sum over tokens of logsumexp(logits) - logits[target]
    d_logits = (p - one_hot(target)) * d_total
    dx       = d_logits @ weight,    d_weight = d_logits.T @ x

So all of it happens in the forward pass: one GEMM for the logits, one kernel that replaces them in place by p - one_hot
and stores the losses, two GEMMs for the gradients. Backward only multiplies both gradients by d_total. Autograd would
keep log-probabilities in fp32, 4 N V bytes, and add 8 N V for their gradient and that of the logits; here N V e bytes
exist for a moment, and N C e + 4 V C bytes of gradients wait for the backward pass. `chunk` tokens at a time, the
logits take chunk x V x e bytes, and d_weight is added up over the chunks in fp32.

In fp8, x and weight are e4m3, and d_logits is a tensor of its own in e5m2. Since -1 <= p - one_hot <= 1, its scale is a
constant: no amax pass. The GEMMs of the gradients sum over V and N, for which operands are transposed (`transpose.py`).

The idea is that of Liger Kernel (Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training"). Cut
Cross-Entropy (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models") goes further and never stores
the logits, for which it computes them twice; here the GEMMs stay cuBLASLt's.

Shape suffixes: N tokens, C channels, V vocabulary; M, K, N the sizes of a GEMM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmill.models.kernels.fp8 import TILE, Fp8Format, ScaledTensor, emulated_scaled_gemm, quantize_fp8
from gptmill.models.kernels.gemm import gemm, gemm_fp32
from gptmill.models.kernels.transpose import transpose_bytes
from gptmill.models.losses import IGNORE_INDEX

Results = tuple[Tensor, Tensor, Tensor, Tensor]
GRADIENT_SCALE = 2.0**15  # |p - one_hot| <= 1, and e5m2 ends at 57,344


class LmHead(NamedTuple):
    """The three GEMMs of the LM head in x's dtype: the logits, and the gradients of x and of the weight."""

    x_NC: Tensor
    weight_VC: Tensor
    with_fp32_gradient: bool
    """Whether the weight's gradient is returned in fp32."""

    def make_logits(self, chunk: slice) -> Tensor:
        return gemm(self.x_NC[chunk], self.weight_VC.t())

    def allocate_gradient(self, logits_NV: Tensor) -> Tensor:
        """Memory for the gradient of the logits: their own."""
        return logits_NV

    def backward(self, gradient_NV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the weight."""
        weight_gemm = gemm_fp32 if self.with_fp32_gradient else gemm
        return gemm(gradient_NV, self.weight_VC), weight_gemm(gradient_NV.t(), self.x_NC[chunk])


class Fp8LmHead(NamedTuple):
    """The same three GEMMs in fp8."""

    x_NC: ScaledTensor
    weight_VC: ScaledTensor
    dtype: torch.dtype
    emulated: bool

    def make_logits(self, chunk: slice) -> Tensor:
        x_NC = ScaledTensor(self.x_NC.fp8[chunk], self.x_NC.inverse_scale)
        return self._gemm(x_NC, self.weight_VC)

    def allocate_gradient(self, logits_NV: Tensor) -> Tensor:
        return torch.empty_like(logits_NV, dtype=torch.float8_e5m2)

    def backward(self, gradient_NV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        inverse_scale = torch.full((), 1 / GRADIENT_SCALE, device=gradient_NV.device)
        x_CN = ScaledTensor(transpose_bytes(self.x_NC.fp8[chunk]), self.x_NC.inverse_scale)
        weight_CV = ScaledTensor(transpose_bytes(self.weight_VC.fp8), self.weight_VC.inverse_scale)
        dx_NC = self._gemm(ScaledTensor(gradient_NV, inverse_scale), weight_CV, is_gradient=True)
        d_weight_VC = self._gemm(ScaledTensor(transpose_bytes(gradient_NV), inverse_scale), x_CN, is_gradient=True)
        return dx_NC, d_weight_VC

    def _gemm(self, a_MK: ScaledTensor, b_NK: ScaledTensor, *, is_gradient: bool = False) -> Tensor:
        if self.emulated:
            return emulated_scaled_gemm(a_MK, b_NK).to(self.dtype)
        scales = a_MK.inverse_scale, b_NK.inverse_scale
        return gemm(a_MK.fp8, b_NK.fp8.t(), None, *scales, use_fast_accum=not is_gradient).to(self.dtype)


def linear_cross_entropy(
    x_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    chunk_tokens: int | None,
    fp8: Fp8Format | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of `x @ weight.T`, and that of each token, which has no gradient.

    Under autocast the logits have its dtype, and what is computed from them is fp32. `fp8` is None, "fp8" or
    "fp8-emulated"; shapes that are not multiples of fp8's tile are computed without it. Rows of the weight from
    `vocab_size` on are padding, which is left out of the softmax; by default no row is.
    """
    kind = x_NC.device.type
    x_NC = x_NC.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_NC.dtype)
    chunk, with_gradient = chunk_tokens or len(targets_N), torch.is_grad_enabled()
    size = len(weight_VC) if vocab_size is None else vocab_size
    if fp8 is None or any(size % TILE for size in (*x_NC.shape, len(weight_VC), chunk)):
        total, losses_N, _, _ = _linear_cross_entropy(x_NC, weight_VC, targets_N, size, chunk, with_gradient)
        return total, losses_N.detach()
    x8, weight8 = (quantize_fp8(each.detach(), torch.float8_e4m3fn) for each in (x_NC, weight_VC))
    total, losses_N, _, _ = _fp8_linear_cross_entropy(
        x_NC, weight_VC, *x8, *weight8, targets_N, size, chunk, with_gradient, fp8 == "fp8-emulated"
    )
    return total, losses_N.detach()


@torch.library.custom_op(
    "gptmill::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, SymInt chunk, bool with_gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _linear_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab_size: int, chunk: int, with_gradient: bool
) -> Results:
    # Several chunks are summed in fp32, but read faster in half precision.
    with_fp32_gradient = weight_VC.dtype == torch.float32 and chunk >= len(x_NC)
    head = LmHead(x_NC, weight_VC.to(x_NC.dtype), with_fp32_gradient)
    return run_chunks(head, x_NC, targets_N, vocab_size, chunk, weight_VC.dtype if with_gradient else None)


@torch.library.custom_op(
    "gptmill::fp8_linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor x8, Tensor x_scale, Tensor weight8, Tensor weight_scale, Tensor targets, "
    "SymInt vocab_size, SymInt chunk, bool with_gradient, bool emulated) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fp8_linear_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, x8_NC: Tensor, x_scale: Tensor, weight8_VC: Tensor, weight_scale: Tensor,
    targets_N: Tensor, vocab_size: int, chunk: int, with_gradient: bool, emulated: bool,
) -> Results:  # fmt: skip
    head = Fp8LmHead(ScaledTensor(x8_NC, x_scale), ScaledTensor(weight8_VC, weight_scale), x_NC.dtype, emulated)
    return run_chunks(head, x_NC, targets_N, vocab_size, chunk, weight_VC.dtype if with_gradient else None)


def run_chunks(
    head: LmHead | Fp8LmHead,
    x_NC: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    chunk: int,
    gradient_dtype: torch.dtype | None,
) -> Results:
    """The summed loss, each token's, and the gradients of x and, in `gradient_dtype`, of the weight.

    Without a dtype no gradients are computed: they are empty.
    """
    cross_entropy = _cross_entropy_triton if x_NC.device.type == "cuda" else cross_entropy_reference
    losses, dx, d_weight_VC = [], [], x_NC.new_empty(0)
    sum_dtype = torch.float32 if len(x_NC) > chunk else gradient_dtype
    for start in range(0, len(x_NC), chunk):
        part = slice(start, start + chunk)
        logits_NV = head.make_logits(part)
        gradient_NV = None if gradient_dtype is None else head.allocate_gradient(logits_NV)
        losses.append(cross_entropy(logits_NV, targets_N[part].contiguous(), gradient_NV, vocab_size))
        del logits_NV  # frees memory for the backward GEMMs, unless the gradient is in place
        if gradient_NV is not None:
            d_part_NC, d_part_VC = head.backward(gradient_NV, part)
            dx.append(d_part_NC)
            d_weight_VC = d_part_VC.to(sum_dtype) if start == 0 else d_weight_VC.add_(d_part_VC)
    if gradient_dtype is not None:
        d_weight_VC = d_weight_VC.to(gradient_dtype)
    losses_N = _concatenate(losses)
    return losses_N.sum(), losses_N, _concatenate(dx) if dx else x_NC.new_empty(0), d_weight_VC


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def find_scale(gradient_NV: Tensor) -> float:
    """The factor by which a gradient is multiplied to use the range of its dtype."""
    return GRADIENT_SCALE if gradient_NV.dtype == torch.float8_e5m2 else 1.0


def _cross_entropy_triton(logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor | None, vocab_size: int) -> Tensor:
    from gptmill.models.kernels.linear_cross_entropy_triton import run_cross_entropy

    scale = 1.0 if gradient_NV is None else find_scale(gradient_NV)
    return run_cross_entropy(logits_NV, targets_N, IGNORE_INDEX, gradient_NV, scale, vocab_size)


def cross_entropy_reference(
    logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor | None, vocab_size: int
) -> Tensor:
    """Reference implementation: returns each token's loss, and writes the gradient of their sum to `gradient_NV`.

    The logits from `vocab_size` on are padding, which gets no gradient.
    """
    is_token_V = torch.arange(logits_NV.shape[1], device=logits_NV.device) < vocab_size
    logp_NV = logits_NV.float().where(is_token_V, -torch.inf).log_softmax(dim=-1)
    is_counted_N1 = (targets_N != IGNORE_INDEX).unsqueeze(1)
    columns_N1 = targets_N.clamp(min=0).unsqueeze(1)
    losses_N = -logp_NV.gather(1, columns_N1).where(is_counted_N1, 0.0).squeeze(1)
    if gradient_NV is not None:
        d_logits_NV = logp_NV.exp().scatter_add(1, columns_N1, -torch.ones_like(columns_N1, dtype=torch.float32))
        gradient_NV.copy_(d_logits_NV.where(is_counted_N1, 0.0) * find_scale(gradient_NV))
    return losses_N


def _make_fake(x: Tensor, weight: Tensor, with_gradient: bool) -> Results:
    losses = x.new_empty(x.shape[:1], dtype=torch.float32)
    if not with_gradient:
        return losses.new_empty(()), losses, x.new_empty(0), x.new_empty(0)
    return losses.new_empty(()), losses, x.new_empty(x.shape), weight.new_empty(weight.shape)


@_linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int, with_gradient: bool) -> Results:
    return _make_fake(x, weight, with_gradient)


@_fp8_linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Results:
    return _make_fake(x, weight, rest[-2])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.num_other_inputs = len(inputs) - 2


def _backward(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Any, ...]:
    dx_NC, d_weight_VC = ctx.saved_tensors
    return (dx_NC.float() * d_total).to(dx_NC.dtype), d_weight_VC * d_total, *[None] * ctx.num_other_inputs


_linear_cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)
_fp8_linear_cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)

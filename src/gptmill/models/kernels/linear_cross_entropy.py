"""The head and its cross-entropy, with the gradients of both: logits exist in one narrow copy, for a while.

The gradient of a sum of cross-entropies is known as soon as the logits are, up to one factor that the backward pass
brings. So it is computed at once, in place of the logits, a chunk of tokens at a time.

N tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmill.models.kernels.fp8 import TILE, Fp8Format, ScaledTensor, emulated_scaled_gemm, quantize_fp8
from gptmill.models.kernels.gemm import gemm_fp32, multiply
from gptmill.models.kernels.transpose import transpose_bytes
from gptmill.models.losses import IGNORE_INDEX

Results = tuple[Tensor, Tensor, Tensor, Tensor]
GRADIENT_SCALE = 2.0**15  # a logit's gradient is a difference of probabilities: its largest value is known


class Head(NamedTuple):
    """The head's three matmuls: its own, and those of the gradients of x and of its weight."""

    x_NC: Tensor
    weight_VC: Tensor
    is_wide: bool
    """Whether the weight's gradient is to be in fp32."""

    def make_logits(self, piece: slice) -> Tensor:
        return multiply(self.x_NC[piece], self.weight_VC.t())

    def make_gradient(self, logits_NV: Tensor) -> Tensor:
        """Memory for the logits' gradient: their own."""
        return logits_NV

    def go_back(self, gradient_NV: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        go_to_weight = gemm_fp32 if self.is_wide else multiply
        return multiply(gradient_NV, self.weight_VC), go_to_weight(gradient_NV.t(), self.x_NC[piece])


class Fp8Head(NamedTuple):
    """The same in fp8."""

    x_NC: ScaledTensor
    weight_VC: ScaledTensor
    dtype: torch.dtype
    emulated: bool

    def make_logits(self, piece: slice) -> Tensor:
        x_NC = ScaledTensor(self.x_NC.fp8[piece], self.x_NC.inverse_scale)
        return self._multiply(x_NC, self.weight_VC)

    def make_gradient(self, logits_NV: Tensor) -> Tensor:
        return torch.empty_like(logits_NV, dtype=torch.float8_e5m2)

    def go_back(self, gradient_NV: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        inverse_scale = torch.full((), 1 / GRADIENT_SCALE, device=gradient_NV.device)
        x_CN = ScaledTensor(transpose_bytes(self.x_NC.fp8[piece]), self.x_NC.inverse_scale)
        weight_CV = ScaledTensor(transpose_bytes(self.weight_VC.fp8), self.weight_VC.inverse_scale)
        dx_NC = self._multiply(ScaledTensor(gradient_NV, inverse_scale), weight_CV, is_gradient=True)
        d_weight_VC = self._multiply(ScaledTensor(transpose_bytes(gradient_NV), inverse_scale), x_CN, is_gradient=True)
        return dx_NC, d_weight_VC

    def _multiply(self, a_MK: ScaledTensor, b_NK: ScaledTensor, *, is_gradient: bool = False) -> Tensor:
        if self.emulated:
            return emulated_scaled_gemm(a_MK, b_NK).to(self.dtype)
        scales = a_MK.inverse_scale, b_NK.inverse_scale
        return multiply(a_MK.fp8, b_NK.fp8.t(), None, *scales, use_fast_accum=not is_gradient).to(self.dtype)


def linear_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk_tokens: int | None, fp8: Fp8Format | None = None
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of `x @ weight.T`, and that of each token, which has no gradient.

    Under autocast the logits are in its format, and everything computed of them in fp32. `fp8` is None, "fp8" or
    "fp8-emulated"; shapes that fp8 has no tiles for are multiplied as usual.
    """
    kind = x_NC.device.type
    x_NC = x_NC.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_NC.dtype)
    chunk, with_gradient = chunk_tokens or len(targets_N), torch.is_grad_enabled()
    if fp8 is None or any(size % TILE for size in (*x_NC.shape, len(weight_VC), chunk)):
        total, losses_N, _, _ = _head_loss(x_NC, weight_VC, targets_N, chunk, with_gradient)
        return total, losses_N.detach()
    x8, weight8 = (quantize_fp8(each.detach(), torch.float8_e4m3fn) for each in (x_NC, weight_VC))
    total, losses_N, _, _ = _fp8_head_loss(
        x_NC, weight_VC, *x8, *weight8, targets_N, chunk, with_gradient, fp8 == "fp8-emulated"
    )
    return total, losses_N.detach()


@torch.library.custom_op(
    "gptmill::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, SymInt chunk, bool with_gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _head_loss(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int, with_gradient: bool) -> Results:
    # Pieces are added up in fp32, but narrow ones take less time to read.
    is_wide = weight_VC.dtype == torch.float32 and chunk >= len(x_NC)
    head = Head(x_NC, weight_VC.to(x_NC.dtype), is_wide)
    return run_chunks(head, x_NC, targets_N, chunk, weight_VC.dtype if with_gradient else None)


@torch.library.custom_op(
    "gptmill::fp8_linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor x8, Tensor x_scale, Tensor weight8, Tensor weight_scale, Tensor targets, "
    "SymInt chunk, bool with_gradient, bool emulated) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _fp8_head_loss(
    x_NC: Tensor, weight_VC: Tensor, x8_NC: Tensor, x_scale: Tensor, weight8_VC: Tensor, weight_scale: Tensor,
    targets_N: Tensor, chunk: int, with_gradient: bool, emulated: bool,
) -> Results:  # fmt: skip
    head = Fp8Head(ScaledTensor(x8_NC, x_scale), ScaledTensor(weight8_VC, weight_scale), x_NC.dtype, emulated)
    return run_chunks(head, x_NC, targets_N, chunk, weight_VC.dtype if with_gradient else None)


def run_chunks(
    head: Head | Fp8Head, x_NC: Tensor, targets_N: Tensor, chunk: int, gradient_dtype: torch.dtype | None
) -> Results:
    """The sum, each token's loss, and the gradients of x and of the weight, the latter in the format that is given."""
    measure = _measure_in_triton if x_NC.device.type == "cuda" else measure_reference
    losses, dx, d_weight_VC = [], [], x_NC.new_empty(0)
    sum_dtype = torch.float32 if len(x_NC) > chunk else gradient_dtype
    for start in range(0, len(x_NC), chunk):
        piece = slice(start, start + chunk)
        logits_NV = head.make_logits(piece)
        gradient_NV = None if gradient_dtype is None else head.make_gradient(logits_NV)
        losses.append(measure(logits_NV, targets_N[piece].contiguous(), gradient_NV))
        del logits_NV  # whose memory the way back may need
        if gradient_NV is not None:
            d_piece_NC, d_piece_VC = head.go_back(gradient_NV, piece)
            dx.append(d_piece_NC)
            d_weight_VC = d_piece_VC.to(sum_dtype) if start == 0 else d_weight_VC.add_(d_piece_VC)
    if gradient_dtype is not None:
        d_weight_VC = d_weight_VC.to(gradient_dtype)
    losses_N = _join(losses)
    return losses_N.sum(), losses_N, _join(dx) if dx else x_NC.new_empty(0), d_weight_VC


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def find_scale(gradient_NV: Tensor) -> float:
    """What a gradient is multiplied by, to be told in its format."""
    return GRADIENT_SCALE if gradient_NV.dtype == torch.float8_e5m2 else 1.0


def _measure_in_triton(logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor | None) -> Tensor:
    from gptmill.models.kernels.linear_cross_entropy_triton import run_cross_entropy

    scale = 1.0 if gradient_NV is None else find_scale(gradient_NV)
    return run_cross_entropy(logits_NV, targets_N, IGNORE_INDEX, gradient_NV, scale)


def measure_reference(logits_NV: Tensor, targets_N: Tensor, gradient_NV: Tensor | None) -> Tensor:
    """The kernel's twin: the loss of each token; the gradient of their sum is written where it is wanted."""
    logp_NV = logits_NV.float().log_softmax(dim=-1)
    counts_N1 = (targets_N != IGNORE_INDEX).unsqueeze(1)
    columns_N1 = targets_N.clamp(min=0).unsqueeze(1)
    losses_N = -logp_NV.gather(1, columns_N1).where(counts_N1, 0.0).squeeze(1)
    if gradient_NV is not None:
        found_NV = logp_NV.exp().scatter_add(1, columns_N1, -torch.ones_like(columns_N1, dtype=torch.float32))
        gradient_NV.copy_(found_NV.where(counts_N1, 0.0) * find_scale(gradient_NV))
    return losses_N


def _make_shapes(x: Tensor, weight: Tensor, with_gradient: bool) -> Results:
    losses = x.new_empty(x.shape[:1], dtype=torch.float32)
    if not with_gradient:
        return losses.new_empty(()), losses, x.new_empty(0), x.new_empty(0)
    return losses.new_empty(()), losses, x.new_empty(x.shape), weight.new_empty(weight.shape)


@_head_loss.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, with_gradient: bool) -> Results:
    return _make_shapes(x, weight, with_gradient)


@_fp8_head_loss.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Results:
    return _make_shapes(x, weight, rest[-2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.others = len(inputs) - 2


def _go_back(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Any, ...]:
    dx_NC, d_weight_VC = ctx.saved_tensors
    return (dx_NC.float() * d_total).to(dx_NC.dtype), d_weight_VC * d_total, *[None] * ctx.others


_head_loss.register_autograd(_go_back, setup_context=_keep)
_fp8_head_loss.register_autograd(_go_back, setup_context=_keep)

"""Linear layers that multiply in fp8, with PyTorch alone: tensors are scaled to the format's range as they come.

Weights and activations are e4m3, gradients e5m2: less precise, but of a wider range (Micikevicius et al. 2022).
Parameters, the optimizer and everything between the matmuls keep their own formats.

Shape suffixes: M rows, K width that goes in, N width that comes out.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.run import Fp8Layers

Fp8Format = Literal["fp8", "fp8-emulated"]
TILE = 16
TINIEST_AMAX = 1e-30  # whose scale fp32 still holds, and so does its inverse
FEED_FORWARD_PARTS = ("mlp.up", "mlp.gate_up", "mlp.proj")
ATTENTION_PARTS = ("attention.qkv", "attention.proj")
PARTS: dict[Fp8Layers, tuple[str, ...]] = {
    "fused": ("mlp.up", "mlp.gate_up", "attention.qkv"),
    "feed_forward": FEED_FORWARD_PARTS,
    "blocks": FEED_FORWARD_PARTS + ATTENTION_PARTS,
    "all": FEED_FORWARD_PARTS + ATTENTION_PARTS,
}


def use_fp8(model: nn.Module, layers: Fp8Layers, *, emulated: bool) -> int:
    """Makes the chosen layers of a GPT multiply in fp8, and returns how many. Parameters and their names stay.

    "fused" are those whose casts ride on a pass that is made anyway: behind norms, forward alone, and the head.
    Emulated, the same rounding happens on any device, and the multiplication itself is fp32's.
    """
    names = [name for name, module in model.named_modules() if is_wanted(name, module, layers)]
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = build_fp8_linear(model.get_submodule(name), emulated, forward_only=layers == "fused")
        setattr(model.get_submodule(parent), last, layer)
    if layers not in ("fused", "all"):
        return len(names)
    model.head_format = "fp8-emulated" if emulated else "fp8"  # type: ignore[assignment]
    return len(names) + 1


def is_wanted(name: str, module: nn.Module, layers: Fp8Layers) -> bool:
    return isinstance(module, nn.Linear) and name.endswith(PARTS[layers])


class Fp8Linear(nn.Linear):
    """A linear layer whose three matmuls, forward and backward, are fp8's, or the forward one alone."""

    emulated: bool
    forward_only: bool

    def forward(self, x: Tensor) -> Tensor:
        return apply_layer(self, x)


def build_fp8_linear(linear: nn.Module, emulated: bool, forward_only: bool = False) -> Fp8Linear:
    """The same layer, holding the same parameters."""
    assert isinstance(linear, nn.Linear)
    layer = Fp8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    layer.weight, layer.bias = linear.weight, linear.bias
    layer.emulated, layer.forward_only = emulated, forward_only
    return layer.train(linear.training)


class Scaled(NamedTuple):
    """An fp8 tensor, and what it must be multiplied by to get the numbers that it stands for."""

    fp8: Tensor
    inverse_scale: Tensor


def apply_weight(linear: nn.Linear, x: Tensor, narrow: Scaled | None = None) -> Tensor:
    """What the layer computes, in its own format, but without its bias. `narrow` is x in fp8, where that is known."""
    if isinstance(linear, Fp8Linear):
        return fp8_linear(x, linear.weight, linear.emulated, forward_only=linear.forward_only, narrow=narrow)
    return F.linear(x, linear.weight)


def apply_layer(linear: nn.Linear, x: Tensor, narrow: Scaled | None = None) -> Tensor:
    """What the layer computes."""
    if not isinstance(linear, Fp8Linear):
        return linear(x)  # type: ignore[no-any-return]
    y = apply_weight(linear, x, narrow)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def wants_fp8_input(linear: nn.Linear) -> bool:
    """Whether the layer gains where what comes before it makes x in fp8 along with x."""
    return isinstance(linear, Fp8Linear) and linear.forward_only


def fp8_linear(
    x: Tensor, weight_NK: Tensor, emulated: bool, *, forward_only: bool = False, narrow: Scaled | None = None
) -> Tensor:
    """`x @ weight.T` in fp8, for shapes that fp8 has tiles for; as usual for the others.

    A sampled token or the last rows of a validation set do not fill a tile, and are too few to gain from it.
    """
    kind = x.device.type
    x_MK = x.flatten(0, -2)
    if not fits_tiles(x_MK, weight_NK):
        return F.linear(x, weight_NK)
    if torch.is_autocast_enabled(kind):
        x_MK = x_MK.to(torch.get_autocast_dtype(kind))
    if forward_only:
        narrow = narrow or scale_to_fp8(x_MK.detach(), torch.float8_e4m3fn)
        y_MN: Tensor = _Fp8Forward.apply(x_MK, weight_NK, *narrow, emulated)  # type: ignore[no-untyped-call]
    else:
        y_MN = _Fp8Linear.apply(x_MK, weight_NK, emulated)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], len(weight_NK))


def find_fp8_input(
    layer: nn.Linear, x_MK: Tensor, known: Scaled | None
) -> tuple[Tensor, Tensor, bool] | tuple[None, None, bool]:
    """x in fp8 and its inverse scale, where the layer multiplies so; and whether it only emulates that."""
    if not isinstance(layer, Fp8Linear) or not fits_tiles(x_MK, layer.weight):
        return None, None, False
    return *(known or scale_to_fp8(x_MK.detach(), torch.float8_e4m3fn)), layer.emulated


def fits_tiles(x_MK: Tensor, weight_NK: Tensor) -> bool:
    return not any(size % TILE for size in (*x_MK.shape, len(weight_NK)))


def scale_to_fp8(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Scaled by one number, so that the largest element becomes the format's largest. NaN and infinity become NaN."""
    limit = torch.finfo(dtype).max
    scale = limit / x.abs().amax().float().clamp(min=TINIEST_AMAX)
    # The clamp is for rounding: what ends beyond the limit would become NaN or infinity.
    return Scaled((x.float() * scale).clamp(-limit, limit).to(dtype).contiguous(), scale.reciprocal())


def multiply(
    a_MK: Scaled,
    b_NK: Scaled,
    dtype: torch.dtype,
    emulated: bool,
    is_gradient: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """`a @ b.T`, plus a bias. Both lie row by row, as the hardware wants them."""
    if emulated:
        product_MN = emulated_scaled_gemm(a_MK, b_NK)
        return (product_MN if bias_N is None else product_MN + bias_N).to(dtype)
    return torch._scaled_mm(
        a_MK.fp8,
        b_NK.fp8.t(),
        scale_a=a_MK.inverse_scale,
        scale_b=b_NK.inverse_scale,
        bias=None if bias_N is None else bias_N.to(dtype),
        out_dtype=dtype,
        use_fast_accum=not is_gradient,  # sums of fewer bits, which gradients need
    )


def emulated_scaled_gemm(a_MK: Scaled, b_NK: Scaled) -> Tensor:
    """`a @ b.T` of the same numbers, in fp32."""
    with torch.autocast(a_MK.fp8.device.type, enabled=False):
        product_MN = a_MK.fp8.float() @ b_NK.fp8.float().t()
    return product_MN * (a_MK.inverse_scale * b_NK.inverse_scale)


def turn(a_MK: Scaled) -> Scaled:
    return Scaled(a_MK.fp8.t().contiguous(), a_MK.inverse_scale)


class _Fp8Linear(torch.autograd.Function):
    """Keeps for the backward what it made in fp8, half of what bf16 would keep."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, emulated: bool) -> Tensor:
        x, weight = scale_to_fp8(x_MK, torch.float8_e4m3fn), scale_to_fp8(weight_NK, torch.float8_e4m3fn)
        ctx.save_for_backward(*x, *weight)
        ctx.emulated, ctx.weight_dtype = emulated, weight_NK.dtype
        return multiply(x, weight, x_MK.dtype, emulated)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors  # once: what is computed again is handed out a single time
        x_MK, weight_NK = Scaled(*saved[:2]), Scaled(*saved[2:])
        grad = scale_to_fp8(grad_MN, torch.float8_e5m2)
        grad_x_MK = multiply(grad, turn(weight_NK), grad_MN.dtype, ctx.emulated, is_gradient=True)
        grad_weight_NK = multiply(turn(grad), turn(x_MK), ctx.weight_dtype, ctx.emulated, is_gradient=True)
        return grad_x_MK, grad_weight_NK, None


class _Fp8Forward(torch.autograd.Function):
    """fp8 on the way forward alone; x comes in both formats. The gradients are as usual."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, narrow_MK: Tensor, inverse_scale: Tensor, emulated: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        weight = scale_to_fp8(weight_NK, torch.float8_e4m3fn)
        return multiply(Scaled(narrow_MK, inverse_scale), weight, x_MK.dtype, emulated)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_MK, weight_NK = ctx.saved_tensors
        grad_x_MK = grad_MN @ weight_NK.to(grad_MN.dtype)
        return grad_x_MK, (grad_MN.t() @ x_MK).to(weight_NK.dtype), None, None, None

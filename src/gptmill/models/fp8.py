"""Linear layers that multiply in fp8, with PyTorch alone: tensors are scaled to the format's range as they come.

Weights and activations are e4m3, gradients e5m2: less precise, but of a wider range (Micikevicius et al. 2022).
Parameters, the optimizer and everything between the matmuls keep their own formats.

Shape suffixes: M rows, K width that goes in, N width that comes out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.run import Fp8Layers

TILE = 16
TINIEST_AMAX = 1e-30  # whose scale fp32 still holds, and so does its inverse
FEED_FORWARD_PARTS = ("mlp.up", "mlp.gate_up", "mlp.proj")
ATTENTION_PARTS = ("attention.qkv", "attention.proj")
PARTS: dict[Fp8Layers, tuple[str, ...]] = {
    "feed_forward": FEED_FORWARD_PARTS,
    "blocks": FEED_FORWARD_PARTS + ATTENTION_PARTS,
    "all": FEED_FORWARD_PARTS + ATTENTION_PARTS,
}


def use_fp8(model: nn.Module, layers: Fp8Layers, *, emulated: bool) -> int:
    """Makes the chosen layers of a GPT multiply in fp8, and returns how many. Parameters and their names stay.

    Emulated, the same rounding happens on any device, and the multiplication itself is fp32's.
    """
    names = [name for name, module in model.named_modules() if is_wanted(name, module, layers)]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, build_fp8_linear(model.get_submodule(name), emulated))
    if layers != "all":
        return len(names)
    model.project_linear = partial(fp8_linear, emulated=emulated)  # type: ignore[assignment]
    return len(names) + 1


def is_wanted(name: str, module: nn.Module, layers: Fp8Layers) -> bool:
    return isinstance(module, nn.Linear) and name.endswith(PARTS[layers])


class Fp8Linear(nn.Linear):
    """A linear layer whose three matmuls, forward and backward, are fp8's."""

    emulated: bool

    def forward(self, x: Tensor) -> Tensor:
        y = fp8_linear(x, self.weight, emulated=self.emulated)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def build_fp8_linear(linear: nn.Module, emulated: bool) -> Fp8Linear:
    """The same layer, holding the same parameters."""
    assert isinstance(linear, nn.Linear)
    layer = Fp8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    layer.weight, layer.bias, layer.emulated = linear.weight, linear.bias, emulated
    return layer.train(linear.training)


def fp8_linear(x: Tensor, weight_NK: Tensor, emulated: bool) -> Tensor:
    """`x @ weight.T` in fp8, for shapes that fp8 has tiles for; as usual for the others.

    A sampled token or the last rows of a validation set do not fill a tile, and are too few to gain from it.
    """
    kind = x.device.type
    x_MK = x.flatten(0, -2)
    if any(size % TILE for size in (*x_MK.shape, len(weight_NK))):
        return F.linear(x, weight_NK)
    if torch.is_autocast_enabled(kind):
        x_MK = x_MK.to(torch.get_autocast_dtype(kind))
    y_MN: Tensor = _Fp8Linear.apply(x_MK, weight_NK, emulated)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], len(weight_NK))


class Scaled(NamedTuple):
    """An fp8 tensor, and what it must be multiplied by to get the numbers that it stands for."""

    fp8: Tensor
    inverse_scale: Tensor


def scale_to_fp8(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Scaled by one number, so that the largest element becomes the format's largest. NaN and infinity become NaN."""
    limit = torch.finfo(dtype).max
    scale = limit / x.abs().amax().float().clamp(min=TINIEST_AMAX)
    # The clamp is for rounding: what ends beyond the limit would become NaN or infinity.
    return Scaled((x.float() * scale).clamp(-limit, limit).to(dtype).contiguous(), scale.reciprocal())


def multiply(a_MK: Scaled, b_NK: Scaled, dtype: torch.dtype, emulated: bool, is_gradient: bool = False) -> Tensor:
    """`a @ b.T`. Both lie row by row, as the hardware wants them."""
    if emulated:
        with torch.autocast(a_MK.fp8.device.type, enabled=False):
            product_MN = a_MK.fp8.float() @ b_NK.fp8.float().t()
        return (product_MN * (a_MK.inverse_scale * b_NK.inverse_scale)).to(dtype)
    return torch._scaled_mm(
        a_MK.fp8,
        b_NK.fp8.t(),
        scale_a=a_MK.inverse_scale,
        scale_b=b_NK.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=not is_gradient,  # sums of fewer bits, which gradients need
    )


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

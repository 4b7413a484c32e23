"""Linear layers whose GEMMs run in fp8, put in the place of a model's own. Parameters, the optimizer and everything
between the GEMMs keep their dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.config.run import Fp8Layers
from gptmill.models.gpt import GPT
from gptmill.models.kernels.fp8 import Fp8Format, Fp8Input, ScaledTensor, fits_tiles, fp8_linear, quantize_fp8

FEED_FORWARD_LAYERS = ("mlp.up", "mlp.gate_up", "mlp.proj")
ATTENTION_LAYERS = ("attention.qkv", "attention.proj")
LAYERS: dict[Fp8Layers, tuple[str, ...]] = {
    "fused": ("mlp.up", "mlp.gate_up", "attention.qkv"),
    "feed_forward": FEED_FORWARD_LAYERS,
    "blocks": FEED_FORWARD_LAYERS + ATTENTION_LAYERS,
    "all": FEED_FORWARD_LAYERS + ATTENTION_LAYERS,
}


class Fp8Linear(nn.Linear):
    """A linear layer with all three GEMMs in fp8, or with `forward_only` just the forward one."""

    emulated: bool
    forward_only: bool

    def forward(self, x: Tensor) -> Tensor:
        return apply_layer(self, x)


@dataclass(frozen=True)
class Fp8HeadLinear:
    """The LM head's GEMM in fp8, for `GPT.head_linear`."""

    format: Fp8Format

    def __call__(self, x: Tensor, weight_VC: Tensor) -> Tensor:
        return fp8_linear(x, weight_VC, emulated=self.format == "fp8-emulated")


def use_fp8(model: GPT, layers: Fp8Layers, *, emulated: bool) -> int:
    """Makes the chosen layers of a model multiply in fp8, and returns how many. Parameters and their names stay.

    "fused" are the layers whose input is quantized by a pass that runs anyway: those behind norms, forward only, and
    the LM head. Emulated, the same rounding happens on any device, and the multiplication runs in fp32.
    """
    names = [name for name, module in model.named_modules() if is_chosen(name, module, layers)]
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = build_fp8_linear(model.get_submodule(name), emulated, forward_only=layers == "fused")
        setattr(model.get_submodule(parent), last, layer)
    if layers not in ("fused", "all"):
        return len(names)
    model.head_linear = Fp8HeadLinear("fp8-emulated" if emulated else "fp8")
    return len(names) + 1


def is_chosen(name: str, module: nn.Module, layers: Fp8Layers) -> bool:
    return isinstance(module, nn.Linear) and name.endswith(LAYERS[layers])


def build_fp8_linear(linear: nn.Module, emulated: bool, forward_only: bool = False) -> Fp8Linear:
    """The same layer with the same parameters, in fp8."""
    assert isinstance(linear, nn.Linear)
    layer = Fp8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    layer.weight, layer.bias = linear.weight, linear.bias
    layer.emulated, layer.forward_only = emulated, forward_only
    return layer.train(linear.training)


def find_head_format(model: GPT) -> Fp8Format | None:
    """The fp8 format that a model's LM head multiplies in; None for its ordinary dtype."""
    return model.head_linear.format if isinstance(model.head_linear, Fp8HeadLinear) else None


def apply_weight(linear: nn.Linear, x: Tensor, x_fp8: ScaledTensor | None = None) -> Tensor:
    """The layer without its bias. `x_fp8` is x quantized already, where the pass before has done so."""
    if isinstance(linear, Fp8Linear):
        return fp8_linear(x, linear.weight, linear.emulated, forward_only=linear.forward_only, x_fp8=x_fp8)
    return F.linear(x, linear.weight)


def apply_layer(linear: nn.Linear, x: Tensor, x_fp8: ScaledTensor | None = None) -> Tensor:
    """The layer, given its input in both formats where that exists."""
    if not isinstance(linear, Fp8Linear):
        return linear(x)  # type: ignore[no-any-return]
    y = apply_weight(linear, x, x_fp8)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def wants_fp8_input(linear: nn.Linear) -> bool:
    """Whether the layer gains if the pass before it also writes its input in fp8."""
    return isinstance(linear, Fp8Linear) and linear.forward_only


def find_fp8_input(linear: nn.Linear, x_MK: Tensor, known: ScaledTensor | None) -> Fp8Input:
    """The layer's input in fp8, where the layer multiplies so: as it is known already, or quantized now."""
    if not isinstance(linear, Fp8Linear) or not fits_tiles(x_MK, linear.weight):
        return Fp8Input(None, None, emulated=False)
    scaled = known or quantize_fp8(x_MK.detach(), torch.float8_e4m3fn)
    return Fp8Input(*scaled, emulated=linear.emulated)

"""Compressed models: the record in a checkpoint, quantizing, pruning, and back to plain weights."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gptmill.config.compress_request import GROUP_SIZES, QUANTIZING, CompressRequest, Method
from gptmill.config.errors import UserError
from gptmill.config.model import Moe
from gptmill.models.compressible import list_linears, list_matrices
from gptmill.models.gpt import GPT
from gptmill.models.language_model import LanguageModel
from gptmill.models.pruning import OF, make_2_of_4_mask, make_magnitude_mask
from gptmill.models.quantized_linear import DynamicInt8Linear, Int4Linear, Int8Linear, QuantizedLinear

VALUE = "compression"  # the name of the record among a checkpoint's values


@dataclass(frozen=True)
class Compression:
    """How the weights of a checkpoint were compressed."""

    method: Method
    group_size: int | None = None
    """int4 only."""
    sparsity: float | None = None
    """Pruning only."""
    source: str = ""
    """The checkpoint that was compressed."""

    @property
    def is_quantized(self) -> bool:
        return self.method in QUANTIZING

    def make_value(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)


def make_compression(request: CompressRequest, source: str) -> Compression:
    group_size = request.group_size if request.method == "int4" else None
    sparsity = {"prune": request.sparsity, "prune-2:4": 0.5}.get(request.method)
    return Compression(request.method, group_size, sparsity, source)


def read_compression(values: dict[str, Any], where: str) -> Compression | None:
    """The record of a checkpoint, which may be untrusted; None for plain weights."""
    if (record := values.get(VALUE)) is None:
        return None
    method: Any = record.get("method") if isinstance(record, dict) else None
    if method not in get_args(Method):
        raise UserError(f"{where} is compressed by the unknown method {method!r:.60}; update gptmill")
    group_size, sparsity = record.get("group_size"), record.get("sparsity")
    is_group = group_size in GROUP_SIZES if method == "int4" else group_size is None
    is_share = sparsity is None or (isinstance(sparsity, float) and math.isfinite(sparsity))
    if not is_group or isinstance(group_size, bool) or not is_share:
        raise UserError(f"the compression recorded in {where} is damaged; use another checkpoint")
    return Compression(method, group_size, sparsity, str(record.get("source"))[:1000])


def check_compressible(model: LanguageModel, compression: Compression, where: str) -> GPT:
    """Raises UserError for a model that the method cannot compress."""
    if not isinstance(model, GPT):
        raise UserError(f"{where} has an architecture of a plug-in; gptmill compresses its own architecture only")
    if compression.is_quantized and model.config.own_parts:
        parts = ", ".join(sorted(model.config.own_parts))
        raise UserError(f"{where} has parts of a plug-in ({parts}), which cannot be quantized; use --method prune")
    if compression.is_quantized and isinstance(model.config.feed_forward, Moe):
        raise UserError(f"{where} is a mixture of experts, which cannot be quantized; use --method prune")
    divisor = OF if compression.method == "prune-2:4" else compression.group_size or 1
    for name, weight in list_matrices(model).items():
        if weight.shape[-1] % divisor:
            fix = "use --method prune" if divisor == OF else "choose a smaller --group_size, or use --method int8"
            raise UserError(f"{name} has {weight.shape[-1]} inputs, which are no groups of {divisor}; {fix}")
    return model


def compress_model(model: GPT, compression: Compression) -> GPT:
    """A compressed copy."""
    model = copy.deepcopy(model)
    if compression.is_quantized:
        plain = {name: linear.weight.detach() for name, linear in list_linears(model).items()}
        replace_linears(model, compression)
        for name, weight in plain.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantizedLinear)
            layer.quantize(weight)
        return model
    with torch.no_grad():
        for weight in list_matrices(model).values():
            weight.mul_(make_mask(weight, compression))
    return model


def make_mask(weight: Tensor, compression: Compression) -> Tensor:
    """Which weights pruning keeps."""
    if compression.method == "prune-2:4":
        return make_2_of_4_mask(weight)
    assert compression.sparsity is not None
    return make_magnitude_mask(weight, compression.sparsity)


def replace_linears(model: GPT, compression: Compression) -> None:
    """Puts quantized layers, still without weights, in the place of the blocks' linear layers; biases stay."""
    for name, linear in list_linears(model).items():
        layer = build_layer(linear, compression)
        layer.bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, layer)


def build_layer(linear: nn.Linear, compression: Compression) -> QuantizedLinear:
    inputs, outputs, has_bias = linear.in_features, linear.out_features, linear.bias is not None
    with linear.weight.device:
        if compression.method == "int4":
            assert compression.group_size is not None
            return Int4Linear(inputs, outputs, compression.group_size, has_bias=has_bias)
        kind = DynamicInt8Linear if compression.method == "int8-dynamic" else Int8Linear
        return kind(inputs, outputs, has_bias=has_bias)


def pack_layers(model: nn.Module) -> None:
    """Lets the quantized layers prepare for the device that they are on."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.pack()


def list_quantized(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def dequantize(model: GPT) -> GPT:
    """A copy with plain linear layers and fp32 weights: what formats without our integers can hold."""
    model = copy.deepcopy(model)
    for name, layer in list_quantized(model).items():
        with layer.scale.device:
            linear = nn.Linear(layer.inputs, layer.outputs, bias=layer.bias is not None)
        linear.weight = nn.Parameter(layer.dequantize())
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.detach().clone())
        model.set_submodule(name, linear)
    return model

"""Quantized layers: the integers of torchao, errors within half a step, and kernels that agree with the weights."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmill.models.pruning import make_2_of_4_mask, make_magnitude_mask
from gptmill.models.quantized_linear import DynamicInt8Linear, Int4Linear, Int8Linear, QuantizedLinear

for name in ("torchao", "torch.utils._pytree"):  # it complains of extensions that a CPU does not need
    logging.getLogger(name).setLevel(logging.ERROR)


def make_weight(outputs: int = 64, inputs: int = 128) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3] = 0  # a row without any weight has a scale too
    return weight


def quantize(layer: QuantizedLinear, weight: Tensor) -> QuantizedLinear:
    layer.quantize(weight)
    if layer.bias is not None:
        layer.bias.normal_(generator=torch.Generator().manual_seed(2))
    layer.pack()
    return layer


LAYERS = {
    "int8": lambda outputs, inputs: Int8Linear(inputs, outputs, has_bias=True),
    "int8-dynamic": lambda outputs, inputs: DynamicInt8Linear(inputs, outputs, has_bias=True),
    "int4": lambda outputs, inputs: Int4Linear(inputs, outputs, 32, has_bias=True),
}


def test_int8_weights_are_those_of_torchao() -> None:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    weight = make_weight()
    theirs = Int8Tensor.from_hp(weight, PerRow())
    ours = quantize(Int8Linear(128, 64, has_bias=False), weight)
    assert torch.equal(ours.weight, theirs.qdata)
    assert torch.equal(ours.scale, theirs.scale.flatten())
    assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_dynamic_int8_computes_what_torchao_does() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    weight, linear = make_weight(), torch.nn.Linear(128, 64)
    linear.weight = torch.nn.Parameter(weight.clone())
    ours = DynamicInt8Linear(128, 64, has_bias=True)
    ours.quantize(weight)
    ours.bias = linear.bias.detach()
    quantize_(linear, Int8DynamicActivationInt8WeightConfig(version=2))
    x = torch.randn(5, 7, 128, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), linear(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_weights_are_those_of_torchao(group_size: int) -> None:
    from torchao.quantization.utils import groupwise_affine_dequantize_tensor, groupwise_affine_quantize_tensor

    weight = make_weight()
    levels, scales_and_zeros = groupwise_affine_quantize_tensor(weight, 4, group_size, dtype=torch.bfloat16)
    ours = Int4Linear(128, 64, group_size, has_bias=False)
    quantize(ours, weight)
    assert torch.equal(ours.unpack().int(), levels)
    assert torch.equal(ours.scale, scales_and_zeros[..., 0].t())
    assert torch.equal(ours.zero, scales_and_zeros[..., 1].t())
    theirs = groupwise_affine_dequantize_tensor(levels, scales_and_zeros, 4, group_size)
    torch.testing.assert_close(ours.dequantize(), theirs.float(), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("method", LAYERS)
def test_no_weight_is_off_by_more_than_about_half_a_step(method: str) -> None:
    weight = make_weight()
    layer = quantize(LAYERS[method](64, 128), weight)
    step = layer.scale.float()[..., None]
    errors = (layer.dequantize() - weight).abs().view(64, -1, 32 if method == "int4" else 128)
    # The largest weight lies half a step beyond 127, and bf16 rounds INT4's scales and zero points.
    slack = 0.15 if method == "int4" else 0.01
    assert (errors <= (0.5 + slack) * step.view(64, -1, 1)).all()
    assert layer.dequantize()[3].abs().max() < 1e-5


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (24, 32)])  # with a kernel, and without
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("method", LAYERS)
def test_the_layer_multiplies_by_its_weight(method: str, rows: int, outputs: int, inputs: int) -> None:
    layer = quantize(LAYERS[method](outputs, inputs), make_weight(outputs, inputs))
    x = torch.randn(1, rows, inputs, generator=torch.Generator().manual_seed(1))
    expected = F.linear(x, layer.dequantize(), layer.bias)
    assert layer(x).dtype == torch.float32
    # Kernels for few rows round inputs and results to bf16; dynamic INT8 rounds activations to 1/127 of the largest.
    torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.015)


@pytest.mark.parametrize("method", LAYERS)
def test_weights_at_odd_addresses_do_not_crash_the_kernels(method: str) -> None:
    layer = quantize(LAYERS[method](64, 128), make_weight())
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    expected, buffer = layer(x), torch.empty(layer.weight.numel() + 1, dtype=layer.weight.dtype)
    layer.weight = buffer[1:].view(layer.weight.shape).copy_(layer.weight)
    layer.pack()
    assert torch.equal(layer(x), expected)


def test_dynamic_int8_gives_a_token_the_same_result_in_any_batch() -> None:
    layer = quantize(LAYERS["int8-dynamic"](64, 128), make_weight())
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)


@pytest.mark.parametrize("method", LAYERS)
def test_autocast_decides_the_dtype_of_the_result(method: str) -> None:
    layer = quantize(LAYERS[method](64, 128), make_weight())
    for rows in (1, 40):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(rows, 128)).dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("method", LAYERS)
def test_the_kernels_of_a_gpu_agree(method: str, rows: int) -> None:
    layer = quantize(LAYERS[method](64, 256), make_weight(64, 256)).cuda()
    layer.pack()
    x = torch.randn(rows, 256, device="cuda")
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantize(), layer.bias), rtol=0.03, atol=0.03)


def test_2_of_4_keeps_what_torchao_keeps() -> None:
    from torchao.sparsity.utils import mask_creator

    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    mask = make_2_of_4_mask(weight)
    assert torch.equal(mask.float(), mask_creator(weight))
    assert (mask.view(16, 8, 4).sum(-1) == 2).all()


def test_2_of_4_keeps_two_even_of_equal_weights() -> None:
    assert (make_2_of_4_mask(torch.zeros(3, 8)).view(3, 2, 4).sum(-1) == 2).all()


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_magnitude_pruning_drops_the_smallest_as_torch_does(sparsity: float) -> None:
    from torch.nn.utils import prune

    linear = torch.nn.Linear(32, 16)
    weight = linear.weight.detach().clone()
    prune.l1_unstructured(linear, "weight", amount=sparsity)
    assert torch.equal(make_magnitude_mask(weight, sparsity).float(), linear.weight_mask)

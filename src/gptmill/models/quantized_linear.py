"""Linear layers with integer weights: INT8, INT8 with activations quantized on the fly, and INT4 in groups.

The weights are those of torchao's `Int8WeightOnlyConfig`, `Int8DynamicActivationInt8WeightConfig` and
`Int4WeightOnlyConfig`, bit for bit. The kernels are torch's own, so that a quantized model needs no other library.

Shape suffixes: N tokens, O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 16  # up to here reading the weights dominates, and kernels that read integers win
INT8_MIN, INT8_MAX = -128, 127
INT8_EPS = torch.finfo(torch.float32).eps  # smallest scale: that of a row of zeros
INT4_LEVELS = 16
INT4_EPS = 1e-6
KERNEL_GROUPS = (32, 64, 128, 256)
ALIGNMENT_BYTES = 64
TILE = 64  # widths that the CPU kernels take in whole vectors
CUDA_INNER_TILES = 8  # tiles of 16 inputs that one thread block of the INT4 kernel reads
CUDA_GEMM_ROWS = 32  # the INT8 GEMM on CUDA wants more than 16


class QuantizedLinear(nn.Module):
    """A linear layer that stores integers and scales; it dequantizes them unless a kernel reads them directly."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, *, has_bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("bias", torch.empty(outputs) if has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= FEW_ROWS * self.inputs and self.has_kernel(x.device):
            y_NO = self.multiply_few(x.reshape(-1, self.inputs)).to(find_dtype(x))
            y_NO = y_NO if self.bias is None else y_NO + self.bias.to(y_NO.dtype)
            return y_NO.view(*x.shape[:-1], self.outputs)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantize().to(x.dtype), bias)

    def quantize(self, weight_OI: Tensor) -> None:
        """Stores the nearest weights that the format can hold."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The weight as fp32."""
        raise NotImplementedError

    def has_kernel(self, device: torch.device) -> bool:
        """Whether a kernel of this device multiplies the stored integers."""
        raise NotImplementedError

    def multiply_few(self, x_NI: Tensor) -> Tensor:
        """The product with the weight by that kernel, in bf16: as under autocast, inputs and results are rounded."""
        raise NotImplementedError

    def pack(self) -> None:
        """Prepares what the kernel of the weight's device reads beside what is stored."""


class Int8Linear(QuantizedLinear):
    """Weight-only INT8: symmetric, one scale per output."""

    def __init__(self, inputs: int, outputs: int, *, has_bias: bool) -> None:
        super().__init__(inputs, outputs, has_bias=has_bias)
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(outputs))
        self.is_aligned = False

    def quantize(self, weight_OI: Tensor) -> None:
        self.weight, scale_O1 = quantize_rows(weight_OI.float())
        self.scale = scale_O1.flatten()

    def dequantize(self) -> Tensor:
        return self.weight.float() * self.scale[:, None]

    def has_kernel(self, device: torch.device) -> bool:
        is_whole = self.inputs % TILE == 0 and self.outputs % TILE == 0
        return device.type == "cpu" and self.is_aligned and is_whole

    def pack(self) -> None:
        # The kernel crashes on what lies at an odd address, as a tensor in a mapped file does.
        if self.weight.data_ptr() % ALIGNMENT_BYTES:
            self.weight = self.weight.clone()
        self.is_aligned = True

    def multiply_few(self, x_NI: Tensor) -> Tensor:
        # The kernel would round the scales to bf16; applied afterwards, they stay exact.
        ones_O = self.scale.new_ones(self.outputs, dtype=torch.bfloat16)
        return torch._weight_int8pack_mm(x_NI.bfloat16(), self.weight, ones_O) * self.scale


class DynamicInt8Linear(Int8Linear):
    """INT8 weights and INT8 activations, one scale per token; sums are exact, so that no batch changes a result."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = find_dtype(x)
        x_NI, scale_N1 = quantize_rows(x.reshape(-1, self.inputs).float())
        y_NO = multiply_int8(x_NI, self.weight).float().mul_(scale_N1).mul_(self.scale)
        y_NO = y_NO if self.bias is None else y_NO.add_(self.bias)
        return y_NO.view(*x.shape[:-1], self.outputs).to(dtype)


class Int4Linear(QuantizedLinear):
    """Weight-only INT4: a scale and a zero point, both bf16, for each group of inputs. Two weights share a byte."""

    def __init__(self, inputs: int, outputs: int, group_size: int, *, has_bias: bool) -> None:
        assert inputs % group_size == 0, "groups must be whole"
        super().__init__(inputs, outputs, has_bias=has_bias)
        self.group_size, groups = group_size, inputs // group_size
        self.zero: Tensor
        self.packed: Tensor | None
        self.scale_and_zero: Tensor | None
        self.register_buffer("weight", torch.empty(outputs, inputs // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.empty(outputs, groups, dtype=torch.bfloat16))
        self.register_buffer("zero", torch.empty(outputs, groups, dtype=torch.bfloat16))
        self.register_buffer("packed", None, persistent=False)
        self.register_buffer("scale_and_zero", None, persistent=False)

    def quantize(self, weight_OI: Tensor) -> None:
        groups_OGI = weight_OI.float().unflatten(1, (-1, self.group_size))
        low_OG, high_OG = groups_OGI.aminmax(dim=-1)
        scale_OG = ((high_OG - low_OG) / (INT4_LEVELS - 1)).clamp(min=INT4_EPS)
        self.zero = (low_OG + scale_OG * (INT4_LEVELS / 2)).bfloat16()
        self.scale = scale_OG.bfloat16()
        # From here on with the rounded scales, by which the weights will be dequantized.
        low_OG = self.zero - self.scale * (INT4_LEVELS / 2)
        levels_OGI = (groups_OGI - low_OG[..., None]) / self.scale[..., None]
        levels_OI = levels_OGI.round().clamp(0, INT4_LEVELS - 1).to(torch.uint8).flatten(1)
        self.weight = levels_OI[:, ::2] << 4 | levels_OI[:, 1::2]

    def dequantize(self) -> Tensor:
        centred_OGI = self.unpack().unflatten(1, (-1, self.group_size)).float() - INT4_LEVELS / 2
        weight_OGI: Tensor = centred_OGI * self.scale[..., None].float() + self.zero[..., None].float()
        return weight_OGI.flatten(1)

    def unpack(self) -> Tensor:
        """The levels, 0 to 15, one byte each."""
        return torch.stack([self.weight >> 4, self.weight & 0xF], dim=-1).flatten(1)

    def has_kernel(self, device: torch.device) -> bool:
        return self.packed is not None and device == self.packed.device

    def pack(self) -> None:
        kind, has_groups = self.weight.device.type, self.group_size in KERNEL_GROUPS
        self.packed = self.scale_and_zero = None
        if kind == "cpu" and has_groups and self.outputs % TILE == 0:
            self.packed = torch._convert_weight_to_int4pack_for_cpu(self.unpack().int(), 1)
        elif kind == "cuda" and has_groups and can_use_tinygemm(self.inputs, self.outputs, self.weight.device):
            self.packed = torch._convert_weight_to_int4pack(self.weight, CUDA_INNER_TILES)
        if self.packed is not None:
            self.scale_and_zero = torch.stack([self.scale, self.zero], dim=-1).transpose(0, 1).contiguous()

    def multiply_few(self, x_NI: Tensor) -> Tensor:
        assert self.packed is not None
        assert self.scale_and_zero is not None
        multiply = torch._weight_int4pack_mm if x_NI.is_cuda else torch._weight_int4pack_mm_for_cpu
        product: Tensor = multiply(x_NI.bfloat16(), self.packed, self.group_size, self.scale_and_zero)
        return product


def quantize_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 with one scale per row: the integers, and the scales as a column."""
    scale_N1 = (x_NI.abs().amax(dim=-1, keepdim=True) / ((INT8_MAX - INT8_MIN) / 2)).clamp(min=INT8_EPS)
    return (x_NI * (1.0 / scale_N1)).round_().clamp_(INT8_MIN, INT8_MAX).to(torch.int8), scale_N1


def multiply_int8(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """The product of two INT8 matrices, the second transposed, in INT32; where no GEMM does it exactly, in fp32."""
    device, (rows, width) = x_NI.device, x_NI.shape
    if device.type == "cpu" and torch.cpu._is_vnni_supported():  # others saturate their sums
        return torch._int_mm(x_NI, weight_OI.t())
    if device.type == "cuda" and width % 8 == 0 and len(weight_OI) % 8 == 0:
        padded_NI = F.pad(x_NI, (0, 0, 0, max(0, CUDA_GEMM_ROWS - rows)))
        return torch._int_mm(padded_NI, weight_OI.t())[:rows]
    return F.linear(x_NI.float(), weight_OI.float())


def can_use_tinygemm(inputs: int, outputs: int, device: torch.device) -> bool:
    """Whether torch's INT4 kernel for CUDA takes a weight of this shape."""
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new and inputs % (16 * CUDA_INNER_TILES) == 0 and outputs % 8 == 0


def find_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer returns: autocast's, or that of its input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

"""Options of gptmill export. The rules are RunConfig's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.errors import UserError
from gptmill.config.plugins import PluginConfig
from gptmill.config.requests import LoadingOptions
from gptmill.config.run import ExportFormat
from gptmill.config.trust import TrustOptions

ExportDtype = Literal["float32", "bfloat16", "float16", "f32", "bf16", "f16", "q8_0"]
SPELLINGS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# The dtypes of each format; the first is the default.
DTYPES: dict[ExportFormat, tuple[str, ...]] = {
    "hf": ("float32", "bfloat16", "float16"),
    "gguf": ("float16", "float32", "bfloat16", "q8_0"),
    "onnx": ("float32",),
}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class ExportRequest:
    """Export"""

    to: ExportFormat = "hf"
    """hf: folder for transformers and vLLM; gguf: file for llama.cpp; onnx: folder for ONNX Runtime."""
    dtype: ExportDtype | None = None
    """Weights; hf: float32, bfloat16, float16; gguf: f16, f32, bf16, q8_0; onnx: float32 (default: the first)."""
    out: str | None = None
    """Output folder, or .gguf file (default: exports/RUN-hf, exports/RUN-onnx, exports/RUN-DTYPE.gguf)."""
    overwrite: bool = False
    """Replace an earlier export at that path."""
    shard_size: str = "5GB"
    """hf: largest size of a safetensors file, e.g. 500MB; larger models are split."""
    license: str | None = None
    """License that the model card states, e.g. apache-2.0 (default: none)."""
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)
    trusting: TrustOptions = field(default_factory=TrustOptions)


def choose_dtype(request: ExportRequest) -> str:
    """The dtype under its long name; raises UserError for one that the format does not have."""
    allowed = DTYPES[request.to]
    if request.dtype is None:
        return allowed[0]
    dtype = SPELLINGS.get(request.dtype, request.dtype)
    if dtype not in allowed:
        raise UserError(
            f"--dtype {request.dtype}: --to {request.to} has {' and '.join(allowed)} only; use one of those"
        )
    return dtype


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB; raises UserError for anything else."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(KB|MB|GB)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"--shard_size {text}: expected a size such as 5GB or 500MB")
    return size

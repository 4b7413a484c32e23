"""Writes an ONNX folder: model.onnx, which takes and returns a KV cache, tokenizer files and a model card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptmill.config.model import ModelConfig
from gptmill.data.tokenizers.json_export import make_tokenizer_files
from gptmill.inference.export.model_card import make_model_card
from gptmill.inference.export.onnx_graph import OPSET, OnnxGraph
from gptmill.inference.export.onnx_model import INPUT, LOGITS, OnnxModel, list_caches
from gptmill.inference.export.passes import Advance, Report, count_passes
from gptmill.inference.export.source import ExportSource
from gptmill.inference.export.staging import write_json, write_texts
from gptmill.inference.export.verification import Verification, compare, make_probe

if TYPE_CHECKING:
    from onnx import TensorProto

MODEL, DATA = "model.onnx", "model.onnx.data"
IR_VERSION = 8  # of opset 17; newer ones are unknown to older runtimes
MAX_INLINE_BYTES = 1_500_000_000  # a file of ONNX holds 2 GB at most; above this, weights lie beside it
SMALL_BYTES = 1024  # constants of the graph stay in it
ALIGNMENT = 4096
PROBE_STEPS = 4
USAGE = """\
`model.onnx` runs in ONNX Runtime and others. Inputs: `input_ids` (batch, sequence), and for every layer i
`past.i.key` and `past.i.value` (batch, key/value heads, past, head dimension), of length 0 at first. Outputs:
`logits` (batch, sequence, vocabulary), and `present.i.key` and `present.i.value`, which are the past of the next call.
`io.json` lists names and shapes."""


def write_onnx_folder(
    folder: Path, source: ExportSource, license_name: str | None, remarks: list[str], report: Report
) -> None:
    """Writes all files of the folder, which must not exist yet."""
    folder.mkdir()
    config = source.config
    write_texts(folder, make_tokenizer_files(source.tokenizer, config.context_length))
    graph = OnnxModel(config, source.weights, source.vocab_size).build()
    write_model(folder, graph, config, source.vocab_size, count_passes(report, source.parameters, 2))
    cache = ["batch", config.kv_heads, "past", config.head_width]
    content = {
        "inputs": {INPUT: ["batch", "sequence"], **dict.fromkeys(list_caches(config, "past"), cache)},
        "outputs": [LOGITS, *list_caches(config, "present")],
        "context_length": config.context_length,
        "bos_token_id": source.tokenizer.end_of_text,
        "eos_token_id": source.tokenizer.end_of_text,
    }
    write_json(folder / "io.json", content)
    write_texts(folder, {"README.md": make_model_card(source, "float32", license_name, USAGE, remarks, "onnx")})


def write_model(
    folder: Path,
    graph: OnnxGraph,
    config: ModelConfig,
    vocab_size: int,
    advance: Advance = lambda _count: None,
) -> None:
    """model.onnx, and beside it the weights of a model that is too large for one file."""
    import onnx
    from onnx.helper import make_model, make_opsetid, make_tensor_value_info

    float_, int_ = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    inputs = [make_tensor_value_info(INPUT, int_, ["batch", "sequence"])]
    outputs = [make_tensor_value_info(LOGITS, float_, ["batch", "sequence", vocab_size])]
    for values, kind, length in ((inputs, "past", "past"), (outputs, "present", "past + sequence")):
        shape: list[str | int | None] = ["batch", config.kv_heads, length, config.head_width]
        values += [make_tensor_value_info(name, float_, shape) for name in list_caches(config, kind)]
    is_large = sum(array.nbytes for array in graph.weights.values()) > MAX_INLINE_BYTES
    tensors = _write_beside(folder / DATA, graph, advance) if is_large else _make_inline(graph, advance)
    model = make_model(
        graph.finish(inputs, outputs, tensors),
        opset_imports=[make_opsetid("", OPSET)],
        producer_name="gptmill",
        ir_version=IR_VERSION,
    )
    onnx.save_model(model, folder / MODEL)
    advance(sum(array.size for array in graph.weights.values()))
    onnx.checker.check_model(str(folder / MODEL))


def _make_inline(graph: OnnxGraph, advance: Advance) -> list[TensorProto]:
    from onnx.numpy_helper import from_array

    tensors = []
    for name, array in graph.weights.items():
        tensors.append(from_array(array, name))
        advance(array.size)
    return tensors


def _write_beside(path: Path, graph: OnnxGraph, advance: Advance) -> list[TensorProto]:
    """Writes the weights to a file of their own; returns tensors that refer to it."""
    import onnx
    from onnx.helper import np_dtype_to_tensor_dtype
    from onnx.numpy_helper import from_array

    tensors = []
    with path.open("wb") as file:
        for name, array in graph.weights.items():
            if array.nbytes <= SMALL_BYTES:
                tensors.append(from_array(array, name))
                continue
            file.write(bytes(-file.tell() % ALIGNMENT))  # runtimes map the file into memory
            tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=np_dtype_to_tensor_dtype(array.dtype))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", path.name), ("offset", file.tell()), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            file.write(array.data)
            tensors.append(tensor)
            advance(array.size)
    return tensors


def verify_onnx(folder: Path, source: ExportSource) -> Verification:
    """Runs it in ONNX Runtime: a prompt, then several steps from the cache; all logits must be ours."""
    tokens_BT = make_probe(source)
    expected = source.logits(tokens_BT)
    steps = min(PROBE_STEPS, tokens_BT.shape[1] - 1)
    parts = [tokens_BT.shape[1] - steps, *[1] * steps]
    error = compare(run_onnx(open_onnx(folder), tokens_BT, parts, source.config), expected, "onnxruntime")
    return Verification(("onnxruntime",), error, 0.0)


OnnxSession = Callable[[dict[str, NDArray[Any]]], list[NDArray[Any]]]


def open_onnx(folder: Path) -> OnnxSession:
    """The model on the CPU: a function from inputs by name to outputs in order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / MODEL, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


def run_onnx(session: OnnxSession, tokens_BT: Tensor, parts: list[int], config: ModelConfig) -> Tensor:
    """The logits of tokens that come in parts of these lengths, each with the cache of those before."""
    shape = (len(tokens_BT), config.kv_heads, 0, config.head_width)
    past = {name: np.zeros(shape, np.float32) for name in list_caches(config, "past")}
    logits = []
    for ids_BT in tokens_BT.split(parts, dim=1):
        found, *present = session({INPUT: ids_BT.numpy(), **past})
        past = dict(zip(past, present, strict=True))
        logits.append(torch.from_numpy(found))
    return torch.cat(logits, dim=1)

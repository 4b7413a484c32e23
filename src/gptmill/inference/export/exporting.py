"""gptmill export: opens a model, writes it in a format, verifies what was written, and only then lets it appear."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.export_request import SPELLINGS, ExportRequest, choose_dtype, parse_size
from gptmill.config.model import ModelConfig
from gptmill.config.run import ExportFormat
from gptmill.inference.export.gguf_file import check_gguf_model, write_gguf
from gptmill.inference.export.gguf_reading import verify_gguf
from gptmill.inference.export.hf_folder import TORCH_DTYPES, write_hf_folder
from gptmill.inference.export.onnx_folder import verify_onnx, write_onnx_folder
from gptmill.inference.export.passes import Report, Stage
from gptmill.inference.export.source import ExportSource, open_export_source
from gptmill.inference.export.staging import check_target, write_beside
from gptmill.inference.export.verification import Verification, verify_hf_folder
from gptmill.models.huggingface.layouts import choose_layout, explain_no_layout

EXPORTS = Path("exports")
LIBRARIES: dict[ExportFormat, tuple[str, ...]] = {"hf": (), "gguf": ("gguf",), "onnx": ("onnx", "onnxruntime")}
BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "q8_0": 8.5}


@dataclass(frozen=True)
class Export:
    """A finished export."""

    path: Path
    size_bytes: int
    verification: Verification
    remarks: tuple[str, ...]
    """What of the model is not in it."""


def export(source: str, request: ExportRequest, stage: Stage) -> Export:
    """Exports the model of a run, a checkpoint or a Hugging Face folder; raises UserError and leaves nothing else."""
    check_request(request)
    if request.out is not None:
        _check_target(Path(request.out), request)
    with stage(f"reading {source}"):
        opened = open_export_source(source, request.loading)
    check_exportable(opened.config, request.to)
    return write_export(opened, request, stage)


def check_request(request: ExportRequest) -> None:
    """Raises UserError for options that do not fit together, and for a format whose libraries are not installed."""
    choose_dtype(request)
    parse_size(request.shard_size)
    for library in LIBRARIES[request.to]:
        if find_spec(library) is None:
            raise UserError(f"--to {request.to} needs the library {library}; run: pip install 'gptmill[export]'")


def check_exportable(config: ModelConfig, to: ExportFormat) -> None:
    """Raises UserError, with what to change, for a model that the format cannot represent. Needs no weights."""
    if to != "onnx" and choose_layout(config) is None:
        raise UserError(explain_no_layout(config))
    if to == "gguf":
        check_gguf_model(config)
    if config.own_parts:
        raise UserError(f"{config.own_parts[0]} is a plug-in's, which --to {to} cannot represent; use a built-in one")


def write_export(source: ExportSource, request: ExportRequest, stage: Stage) -> Export:
    """Writes an opened model beside its target, verifies it there, and renames it."""
    dtype, remarks = choose_dtype(request), list_remarks(source)
    target = Path(request.out) if request.out is not None else make_default_path(source.name, request.to, dtype)
    _check_target(target, request)
    with write_beside(target, int(source.parameters * BITS[dtype] / 8)) as partial:
        with stage(f"writing {target}") as report:
            write(partial, source, request, dtype, remarks, report)
        try:
            with stage("comparing its logits with gptmill's") as report:
                verification = verify(partial, source, request.to, dtype, report)
        except (ValueError, KeyError, RuntimeError) as error:  # gguf's writer does not notice a full disk
            raise UserError(f"{target} could not be read back ({error!s:.200}); is the disk full?") from error
        files = list(partial.iterdir()) if partial.is_dir() else [partial]
        size_bytes = sum(file.stat().st_size for file in files)
    return Export(target, size_bytes, verification, tuple(remarks))


def write(
    path: Path, source: ExportSource, request: ExportRequest, dtype: str, remarks: list[str], report: Report
) -> None:
    if request.to == "hf":
        write_hf_folder(path, source, dtype, parse_size(request.shard_size), request.license, remarks, report)
    elif request.to == "gguf":
        write_gguf(path, source, dtype, request.license, report)
    else:
        write_onnx_folder(path, source, request.license, remarks, report)


def verify(path: Path, source: ExportSource, to: ExportFormat, dtype: str, report: Report) -> Verification:
    """Reads what was written and compares logits. Rounds the weights of `source` on the way, so it comes last."""
    if to == "hf":
        return verify_hf_folder(path, source, TORCH_DTYPES[dtype], report)
    return verify_gguf(path, source, dtype, report) if to == "gguf" else verify_onnx(path, source)


def list_remarks(source: ExportSource) -> list[str]:
    """What of the model the export leaves out."""
    remarks, count = [], source.config.mtp_heads
    if source.is_dequantized:
        remarks.append("the quantized weights were dequantized: the format has no place for gptmill's integers")
    if count:
        heads = f"{count} MTP heads were" if count > 1 else "1 MTP head was"
        remarks.append(f"{heads} left out: they are used in training only")
    return remarks


def make_default_path(name: str, to: ExportFormat, dtype: str) -> Path:
    short = {long: short for short, long in SPELLINGS.items()}.get(dtype, dtype)
    return EXPORTS / (f"{name}-{short}.gguf" if to == "gguf" else f"{name}-{to}")


def _check_target(target: Path, request: ExportRequest) -> None:
    check_target(target, is_folder=request.to != "gguf", may_overwrite=request.overwrite)

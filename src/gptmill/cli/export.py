"""gptmill export: writes a trained model for other software."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gptmill.cli.flags import Command
from gptmill.cli.output import print_line
from gptmill.config.export_request import ExportRequest
from gptmill.config.schema import build_config

SUMMARY = """\
Writes the model of a run for transformers and vLLM (hf), llama.cpp (gguf) or ONNX Runtime (onnx), and compares its
logits with gptmill's before it appears. RUN is the name of a run, the path of its folder or of a checkpoint, or a
Hugging Face folder."""


def run(arguments: list[str]) -> int:
    command = Command("export", "RUN", SUMMARY, (ExportRequest,), aliases={"step": "checkpoint"})
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 1)
    request = build_config(ExportRequest, parsed.values)
    from gptmill.api.exporting import show_parameters
    from gptmill.inference.export.exporting import export
    from gptmill.inference.export.passes import Report
    from gptmill.runs.checkpoints.disk_space import format_bytes

    def show_stage(stage: str) -> AbstractContextManager[Report]:
        print_line(stage)
        return show_parameters(stage)

    result = export(parsed.words[0], request, show_stage)
    for remark in result.remarks:
        print_line(remark)
    print_line(f"verified: {result.verification.describe()}")
    print_line(f"done: {result.path} ({format_bytes(result.size_bytes)})")
    return 0

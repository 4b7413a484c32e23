"""gptmill import: makes a run of a model that other software has saved."""

from __future__ import annotations

from gptmill.cli.flags import Command
from gptmill.cli.output import print_line
from gptmill.config.import_request import ImportRequest
from gptmill.config.schema import build_config

SUMMARY = """\
Makes a run of a published model, with its tokenizer. SOURCE is a Hugging Face folder (GPT-2, Llama, Mistral, SmolLM2,
Qwen3 and Qwen3-MoE in safetensors), a GGUF file, llm.c's .bin or nanoGPT's ckpt.pt."""


def run(arguments: list[str]) -> int:
    command = Command("import", "SOURCE", SUMMARY, (ImportRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 1)
    request = build_config(ImportRequest, parsed.values)
    from gptmill.api.importing import run_import

    print_line(f"run {run_import(parsed.words[0], request).path}, made of {parsed.words[0]}")
    return 0

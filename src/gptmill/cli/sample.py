"""gptmill sample: generates text with a trained model."""

from __future__ import annotations

import codecs
import sys
from dataclasses import replace

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.requests import SampleRequest
from gptmill.config.schema import build_config

SUMMARY = """\
Generates text with the model of a run. RUN is the name of a run, or the path of its folder or of a checkpoint."""


def run(arguments: list[str]) -> int:
    command = Command("sample", "RUN", SUMMARY, (SampleRequest,), aliases={"step": "checkpoint"})
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 1)
    request = build_config(SampleRequest, parsed.values)
    if request.prompt == "-":
        request = replace(request, prompt=read_prompt())
    from gptmill.inference.sampling import open_sampler
    from gptmill.runs.display import make_writable

    def write(text: str) -> None:
        sys.stdout.write(make_writable(text, sys.stdout.encoding))

    sampler = open_sampler(parsed.words[0], request)
    for number in range(request.num_samples):
        if number:
            write("\n" + "─" * 72 + "\n")
        write(request.prompt)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for piece in sampler.sample(number):
            write(decoder.decode(piece))
            sys.stdout.flush()
        write(decoder.decode(b"", final=True) + "\n")
    return 0


def read_prompt() -> str:
    """Standard input without its last line break, which `echo` and editors add."""
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not UTF-8 at byte {error.start}; convert it first") from None

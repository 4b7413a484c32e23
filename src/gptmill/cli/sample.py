"""gptmill sample: generates text with a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.sample_request import STOP_SEPARATOR, SampleRequest
from gptmill.config.schema import build_config
from gptmill.config.text import find_raw

if TYPE_CHECKING:
    from gptmill.inference.sampling import PromptedBatch, TextSampler

SUMMARY = """\
Generates text with the model of a run. RUN is the name of a run, or the path of its folder, of a checkpoint, or of a
Hugging Face folder. Several samples are generated in batches; the first one not finished is shown as it comes."""
LINE = "\n" + "─" * 72 + "\n"


def run(arguments: list[str]) -> int:
    command = Command("sample", "RUN", SUMMARY, (SampleRequest,), aliases={"step": "checkpoint"})
    parsed = command.parse(join_stops(arguments))
    command.check_words(parsed.words, 1, 1)
    request = build_config(SampleRequest, parsed.values)
    if request.prompt == "-":
        request = replace(request, prompt=read_prompt())
    from gptmill.inference.sampling import open_sampler

    sampler = open_sampler(parsed.words[0], request)
    if request.interactive:
        from gptmill.cli.sample_prompt import ask_for_prompts

        ask_for_prompts(sampler)
    elif request.json:
        print_objects(sampler)
    else:
        warn_of_long_prompts(sampler)
        for number, (started, pieces) in enumerate(stream_batches(sampler)):
            if number:
                write(LINE)
            show(started, pieces)
    return 0


def stream_batches(sampler: TextSampler) -> Iterator[tuple[PromptedBatch, Iterator[tuple[int, str]]]]:
    """All batches, each with the pieces of its texts as they come. Shows progress, unless the text itself does."""
    from gptmill.api.progress import show_amount

    shows_progress = sampler.request.json or not find_raw(sys.stdout).isatty()
    length = sampler.request.max_new_tokens
    total, done = len(sampler.prompts) * sampler.request.num_samples * length, 0
    with show_amount("sampling", "tokens") if shows_progress else nullcontext(ignore) as report:

        def stream(started: PromptedBatch) -> Iterator[tuple[int, str]]:
            for piece in started.batch.stream():
                yield piece
                report(done + len(started.prompts) * started.batch.steps_done, total)

        for started in sampler.start_batches():
            yield started, stream(started)
            done += len(started.prompts) * length  # texts that ended early are done too


def ignore(_done: int, _total: int) -> None:
    """Progress that is not shown."""


def show(started: PromptedBatch, stream: Iterator[tuple[int, str]]) -> None:
    """Prints the texts in order: the first that has not ended as it comes, the others when their turn comes."""
    pending = [[prompt] for prompt in started.prompts]
    current = 0
    write(pending[0][0])
    for row, piece in stream:
        if row == current:
            write(piece)
        else:
            pending[row].append(piece)
        while current + 1 < len(pending) and started.batch.has_ended(current):
            current += 1
            write_all(["\n", LINE, *pending[current]])
    for pieces in pending[current + 1 :]:
        write_all(["\n", LINE, *pieces])
    write("\n")


def write_all(pieces: list[str]) -> None:
    """Piece by piece: a character that the output cannot hold affects its own piece only."""
    for piece in pieces:
        write(piece)


def print_objects(sampler: TextSampler) -> None:
    """One JSON object per sample and line."""
    from gptmill.inference.text_generation import describe

    for started, pieces in stream_batches(sampler):
        for _ in pieces:
            pass
        for text, prompt, seed in zip(started.batch.texts, started.prompts, started.seeds, strict=True):
            sys.stdout.write(json.dumps(describe(text, prompt, seed)) + "\n")
        sys.stdout.flush()


def write(text: str) -> None:
    """Into a file or a pipe exactly as it was generated."""
    from gptmill.runs.display import make_writable

    is_terminal = find_raw(sys.stdout).isatty()
    stream = sys.stdout if is_terminal else find_raw(sys.stdout)
    stream.write(make_writable(text, stream.encoding))
    stream.flush()


def warn_of_long_prompts(sampler: TextSampler) -> None:
    from gptmill.inference.sampling import encode_prompt

    context = sampler.model.config.context_length
    longest = max(len(encode_prompt(sampler.model, prompt)) for prompt in sampler.prompts)
    if longest > context:
        sys.stderr.write(f"warning: a prompt has {longest:,} tokens; the model sees its last {context:,}\n")


def join_stops(arguments: list[str]) -> list[str]:
    """The arguments with all values of --stop in one."""
    rest: list[str] = []
    stops: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--stop":
            stops += [value for value in [next(words, None)] if value is not None]
        elif word.startswith("--stop="):
            stops.append(word.removeprefix("--stop="))
        else:
            rest.append(word)
    return [*rest, f"--stop={STOP_SEPARATOR.join(stops)}"] if stops else rest


def read_prompt() -> str:
    """Standard input without its last line break, which `echo` and editors add."""
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not UTF-8 at byte {error.start}; convert it first") from None

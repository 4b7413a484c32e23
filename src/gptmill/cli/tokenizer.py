"""gptmill tokenizer: trains a BPE tokenizer, or inspects one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.requests import ReadingOptions, TokenizerRequest
from gptmill.config.schema import build_config

if TYPE_CHECKING:
    from gptmill.data.sources import DefectReport
    from gptmill.data.tokenizers.bpe_training import Compression, Training

FORMS = "train SOURCE [SOURCE ...] | show TOKENIZER"
SUMMARY = """\
train: trains a byte-level BPE tokenizer and writes a tokenizer.json, for --tokenizer of the other verbs.
show: vocabulary size, fingerprint and end-of-text token of a tokenizer, and the tokens of --text."""


def run(arguments: list[str]) -> int:
    command = Command("tokenizer", FORMS, SUMMARY, (TokenizerRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 2, len(arguments))
    request = build_config(TokenizerRequest, parsed.values)
    action, *words = parsed.words
    if action == "train":
        return train(words, request)
    if action == "show" and len(words) == 1:
        return show(words[0], request.text)
    raise UserError(f"gptmill tokenizer {' '.join(parsed.words)}: the usage is gptmill tokenizer {FORMS}")


def train(sources: list[str], request: TokenizerRequest) -> int:
    from gptmill.api.progress import show_reading
    from gptmill.data.files import write_durably
    from gptmill.data.sources import DefectReport
    from gptmill.data.tokenizers.bpe_training import MIN_VOCAB_SIZE, train_tokenizer

    problems = []
    if request.reading.max_errors < 1:
        problems.append(Problem(f"--max_errors {request.reading.max_errors}", "must be at least 1"))
    if request.vocab_size < MIN_VOCAB_SIZE:
        advice = f"must be at least {MIN_VOCAB_SIZE}: 256 bytes and the end-of-text token"
        problems.append(Problem(f"--vocab_size {request.vocab_size}", advice))
    if request.max_mb < 1:
        problems.append(Problem(f"--max_mb {request.max_mb}", "must be at least 1"))
    path = Path(request.out)
    if path.is_dir():
        problems.append(Problem(f"--out {path}", f"is a folder; give a file, e.g. {path / 'tokenizer.json'}"))
    elif path.exists() and not request.overwrite:
        problems.append(Problem(f"--out {path}", "already exists; add --overwrite, or choose another file"))
    if problems:
        raise ConfigError(problems)
    defects = DefectReport()
    with show_reading() as report:
        texts = _read_texts(sources, request.reading, defects)
        training = train_tokenizer(texts, request.vocab_size, request.max_mb * 1_000_000, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, training.definition)
    sys.stdout.writelines(line + "\n" for line in defects.describe())
    sys.stdout.write(describe_training(training))
    sys.stdout.write(f"{path} is ready; use it with: gptmill prepare SOURCE --tokenizer {shlex.quote(str(path))}\n")
    return 0


def _read_texts(sources: list[str], options: ReadingOptions, defects: DefectReport) -> Iterator[str]:
    from gptmill.data.sources import Defect, read_documents, resolve_source

    def note(defect: Defect) -> None:
        defects.add(defect)
        defects.check_limit(options.max_errors)

    return read_documents(resolve_source(sources, options), options, note)


def describe_training(training: Training) -> str:
    extent = "all of it" if training.is_whole else "the rest was not read: raise --max_mb, or shuffle the text first"
    lines = [
        f"{training.vocab_size:,} tokens from {training.text_bytes / 1e6:,.1f} MB of text ({extent}) "
        f"in {training.seconds:.1f} s",
        f"bytes per token on training text   {format_compression(training.on_training)}",
    ]
    if training.on_held_out is not None:
        lines.append(f"bytes per token on held-out text   {format_compression(training.on_held_out)}")
    lines += [
        f"vocabulary used in that text       {training.used_share:.1%}",
        f"longest tokens                     {' '.join(map(format_token, training.longest))}",
    ]
    return "\n".join(lines) + "\n"


def format_compression(compression: Compression) -> str:
    measured = f"{compression.text_bytes / 1e6:,.2f} MB"
    return f"{compression.bytes_per_token:.2f} (gpt2: {compression.gpt2_bytes_per_token:.2f}; on {measured})"


def show(name: str, text: str | None) -> int:
    from gptmill.data.tokenizers import build_tokenizer
    from gptmill.data.tokenizers.protocol import make_fingerprint

    if name == "char":
        raise UserError("the char tokenizer is built from a corpus; for a prepared one, use gptmill data info DATA")
    tokenizer = build_tokenizer(name, [])
    sys.stdout.write(f"tokenizer    {make_fingerprint(tokenizer)}\n")
    sys.stdout.write(f"vocab_size   {tokenizer.vocab_size:,}\n")
    sys.stdout.write(f"end of text  {tokenizer.end_of_text}\n")
    if text is not None:
        ids = tokenizer.encode(text).tolist()
        tokens = " ".join(format_token(tokenizer.decode_bytes([token])) for token in ids)
        sys.stdout.write(f"tokens       {tokens}\nids          {' '.join(map(str, ids))}\n")
    return 0


def format_token(token: bytes) -> str:
    """The text of a token in quotes, or its bytes if they are not valid UTF-8."""
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)

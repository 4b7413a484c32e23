"""gptmill prepare: tokenizes text into shards."""

from __future__ import annotations

import shlex
import sys

from gptmill.cli.flags import Command
from gptmill.config.requests import PrepareRequest
from gptmill.config.schema import build_config

SUMMARY = """\
Tokenizes text into shards. A SOURCE is
  a file, folder or glob   .txt .md .html .json .jsonl .csv .parquet .warc .wet, also .gz .xz .zst .bz2
  -                        standard input
  s3://... https://...     any URL that fsspec can read (needs the cloud extra)
  hf:OWNER/NAME            a Hugging Face dataset, streamed (needs the hf extra)
  a named corpus           tiny-shakespeare, enwik8, fineweb-edu-10B, openwebtext, python-stdlib
If it is killed, the same command resumes it."""


def run(arguments: list[str]) -> int:
    command = Command("prepare", "SOURCE [SOURCE ...]", SUMMARY, (PrepareRequest,), aliases={"from": "from_file"})
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, len(arguments))
    from gptmill.api.shards import run_preparation
    from gptmill.data.cleaning import CleaningReport
    from gptmill.data.sources import DefectReport

    folder, manifest = run_preparation(parsed.words, build_config(PrepareRequest, parsed.values))
    cleaning, defects = CleaningReport.from_json(manifest.cleaning), DefectReport.from_json(manifest.defects)
    for line in [*defects.describe(), *cleaning.describe()]:
        sys.stdout.write(line + "\n")
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        counts = f"{split.tokens:,} tokens of {split.documents:,} documents in {len(split.shards)} shard(s)"
        sys.stdout.write(f"{name:<6}{counts}\n")
    next_command = f"gptmill train RECIPE --data_dir {shlex.quote(str(folder))}"
    sys.stdout.write(f"{folder}/ is ready ({manifest.fingerprint}); train on it with: {next_command}\n")
    return 0

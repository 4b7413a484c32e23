"""gptmill prepare: text in, token shards out."""

from __future__ import annotations

import shlex
import sys

from gptmill.cli.flags import Command
from gptmill.config.requests import PrepareRequest
from gptmill.config.schema import build_config

SUMMARY = "Turns text into token shards. SOURCE is a UTF-8 text file, a folder of them, or python-stdlib."


def run(arguments: list[str]) -> int:
    command = Command("prepare", "SOURCE [SOURCE ...]", SUMMARY, (PrepareRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, len(arguments))
    from gptmill.cli.progress import show_preparing
    from gptmill.data.prepare import prepare_corpus

    with show_preparing() as report:
        folder, manifest = prepare_corpus(parsed.words, build_config(PrepareRequest, parsed.values), report)
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        counts = f"{split.tokens:,} tokens of {split.documents:,} documents in {len(split.shards)} shard(s)"
        sys.stdout.write(f"{name:<6}{counts}\n")
    next_command = f"gptmill train RECIPE --data_dir {shlex.quote(str(folder))}"
    sys.stdout.write(f"{folder}/ is ready ({manifest.fingerprint}); train on it with: {next_command}\n")
    return 0

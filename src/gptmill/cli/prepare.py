"""gptmill prepare: text in, token shards out."""

from __future__ import annotations

import sys

from gptmill.cli.flags import check_words, parse_flags
from gptmill.config.requests import PrepareRequest
from gptmill.config.schema import build_config

SUMMARY = "Turns text into token shards. SOURCE is a UTF-8 text file, a folder of them, or python-stdlib."


def run(arguments: list[str]) -> int:
    parsed = parse_flags("prepare", arguments, (PrepareRequest,), "SOURCE [SOURCE ...]", SUMMARY, {})
    check_words("prepare", parsed.words, "at least one source", 1, len(parsed.words))
    from gptmill.cli.progress import show_preparing
    from gptmill.data.prepare import prepare_corpus

    with show_preparing() as report:
        folder, manifest = prepare_corpus(parsed.words, build_config(PrepareRequest, parsed.values), report)
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        counts = f"{split.tokens:,} tokens of {split.documents:,} documents in {len(split.shards)} shard(s)"
        sys.stdout.write(f"{name:<6}{counts}\n")
    sys.stdout.write(
        f"{folder}/ is ready ({manifest.fingerprint}); train on it with: gptmill train --data_dir {folder}\n"
    )
    return 0

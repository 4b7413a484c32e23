"""gptmill data: inspects and verifies a prepared corpus, and scores its documents."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.requests import DataRequest
from gptmill.config.schema import build_config

FORMS = "info DATA | verify DATA | show DATA | show --run RUN --step N | score DATA"
SUMMARY = """\
info: counts, tokenizer, source and cleaning. verify: checks all checksums, and that all tokens are in the vocabulary.
show: decoded windows, or the documents that were in a step of a run.
score: scores each document by length or by a model's loss, for --order curriculum.
DATA is the folder or URL of shards, of gptmill or another project."""
PREVIEW_CHARS = 72
MAX_NUMBER = 2**62  # of windows or tokens


def run(arguments: list[str]) -> int:
    command = Command("data", FORMS, SUMMARY, (DataRequest,))
    parsed = command.parse(arguments)
    request = build_config(DataRequest, parsed.values)
    actions: dict[str, Callable[[str, DataRequest], int]] = {
        "info": print_info,
        "verify": verify,
        "show": print_windows,
        "score": score,
    }
    if parsed.words[:1] == ["show"] and (request.run is not None or request.step is not None):
        if len(parsed.words) > 1 or request.run is None or request.step is None:
            raise UserError("to show a step of a run, use gptmill data show --run RUN --step N, without DATA")
        return print_step(request.run, request.step, request)
    if len(parsed.words) != 2 or parsed.words[0] not in actions:
        raise UserError(f"gptmill data {' '.join(parsed.words)}: the usage is gptmill data {FORMS}")
    return actions[parsed.words[0]](parsed.words[1], request)


def print_info(location: str, request: DataRequest) -> int:
    from gptmill.api.shards import open_and_check
    from gptmill.data.sources import DefectReport

    shards = open_and_check(location, request.tokenizer)
    manifest = shards.manifest
    lines = [
        f"{shards.location}: {manifest.fingerprint}, vocabulary of {shards.tokenizer.vocab_size:,} as {manifest.dtype}"
    ]
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        documents = f" of {split.documents:,} documents" if split.documents else ""
        lines.append(f"{name:<6}{split.tokens:,} tokens{documents} in {len(split.shards):,} shard(s)")
    lines += ["source", *(f"  {line}" for line in describe_values(manifest.source))]
    lines += DefectReport.from_json(manifest.defects).describe()
    lines += describe_cleaning(manifest.cleaning, location)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def describe_values(values: dict[str, Any]) -> list[str]:
    """One line per value that is set, with the names of the objects around it: `reading.text_field: text`."""
    lines = []
    pending = list(reversed(values.items()))  # a stack, since a stranger's manifest may be nested deeply
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{name}.{key}", item) for key, item in reversed(value.items())]
        elif value is True:
            lines.append(name)
        elif value not in (None, False):
            lines.append(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
    return lines


def describe_cleaning(report: dict[str, Any], location: str) -> list[str]:
    from gptmill.data.cleaning import CleaningReport

    try:
        return CleaningReport.from_json(report).describe() if report else []
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"the cleaning report of {location} is damaged; prepare the corpus again") from None


def verify(location: str, request: DataRequest) -> int:
    from gptmill.api.progress import show_amount
    from gptmill.data.remote_fs import is_remote
    from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME
    from gptmill.data.shards.shard_manifest import ORIGINS_DIR, read_manifest
    from gptmill.data.shards.verification import verify_corpus

    if is_remote(location):
        raise UserError(
            f"{location} is remote; verify it where it is stored: training checks each shard as it is downloaded"
        )
    with show_amount("verifying") as report:
        problems = verify_corpus(Path(location), report, request.tokenizer)
    if problems:
        raise UserError("\n  ".join([f"{location} is not valid:", *problems]))
    is_own = (Path(location) / MANIFEST_NAME).exists()
    with_checksums = "all checksums, document starts and tokens are correct"
    if is_own and not read_manifest(Path(location)).has_origin_checksums:
        with_checksums += f"; {ORIGINS_DIR}/ is of an older version and has no checksums"
    without = "file sizes are correct and all tokens are in the vocabulary; these files have no checksums"
    sys.stdout.write(f"{location} is valid: {with_checksums if is_own else without}\n")
    return 0


def print_windows(location: str, request: DataRequest) -> int:
    from gptmill.api.shards import open_and_check
    from gptmill.data.shards.passages import read_windows

    for name, least in (("window", 0), ("count", 1), ("context_length", 1)):
        if (value := getattr(request, name)) < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
        if value > MAX_NUMBER:
            raise UserError(f"--{name} {value}: no corpus is that large; choose a smaller number")
    shards = open_and_check(location, request.tokenizer)
    windows = read_windows(shards, request.split, request.context_length, request.window, request.count)
    for number, extracts in enumerate(windows, start=request.window):
        sys.stdout.write(f"── {request.split} window {number:,} ".ljust(72, "─") + "\n")
        for extract in extracts:
            document = describe_document(extract.document, extract.origin)
            sys.stdout.write(f"[{document}]\n{extract.text}\n")
    return 0


def print_step(run_name: str, step: int, request: DataRequest) -> int:
    from gptmill.runs.directory import find_run
    from gptmill.training.data_replay import replay_step

    for number, row in enumerate(replay_step(find_run(run_name, request.logdir), step)):
        location = f"{row.corpus}/{row.shard}, tokens {row.start:,} to {row.start + row.length - 1:,}"
        sys.stdout.write(f"row {number:,}: {location}\n")
        for extract in row.extracts:
            text = extract.text
            if not request.full:
                text = " ".join(text.split())[:PREVIEW_CHARS]
            ellipsis = "" if extract.is_opening else "..."
            sys.stdout.write(f"  {describe_document(extract.document, extract.origin)}: {ellipsis}{text}\n")
    return 0


def score(location: str, request: DataRequest) -> int:
    from gptmill.api.progress import show_amount
    from gptmill.api.shards import open_and_check
    from gptmill.data.shards.scores import score_by_length, write_scores

    shards = open_and_check(location, request.tokenizer)
    name = request.name or request.by
    if request.by == "loss":
        if request.run is None:
            raise UserError("gptmill data score --by loss needs a model: add --run RUN")
        from gptmill.inference.loading import load_run_model
        from gptmill.inference.scoring import score_by_loss
        from gptmill.runs.directory import find_run
        from gptmill.runtime.device import choose_device

        run = find_run(request.run, request.logdir)
        loaded = load_run_model(run, "latest", choose_device(request.device))
        with show_amount("scoring", "tokens") as report:
            scores = score_by_loss(loaded, shards, report)
    else:
        scores = score_by_length(shards)
    path = write_scores(shards.folder, name, scores)
    sys.stdout.write(
        f"{path}: {len(scores):,} documents, from {scores.min():g} to {scores.max():g}; "
        f"train on it with: --order curriculum --score {name}\n"
    )
    return 0


def describe_document(number: int, origin: str | None) -> str:
    return f"document {number:,}" + (f" of {origin}" if origin else "")

"""gptmill data: what a prepared corpus holds, whether it is sound, and how its documents score."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.config.errors import UserError
from gptmill.config.requests import DataRequest
from gptmill.config.schema import build_config

if TYPE_CHECKING:
    from gptmill.data.shards.opening import TokenShards

FORMS = "info DATA | verify DATA | show DATA | show --run RUN --step N | score DATA"
SUMMARY = """\
info: counts, tokenizer, source, cleaning. verify: every checksum, and every token against the vocabulary.
show: decoded windows, or the documents that were in a step of a run. score: a number for each document, for
--order curriculum. DATA is a folder of shards, of gptmill or of another project, or its address."""
OPENING_CHARS = 72


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
            raise UserError("a step is shown by gptmill data show --run RUN --step N, without DATA")
        return print_step(request.run, request.step, request)
    if len(parsed.words) != 2 or parsed.words[0] not in actions:
        raise UserError(f"gptmill data {' '.join(parsed.words)}: its forms are {FORMS}")
    return actions[parsed.words[0]](parsed.words[1], request)


def print_info(place: str, request: DataRequest) -> int:
    from gptmill.data.cleaning import CleaningReport

    shards = open_corpus(place, request)
    manifest = shards.manifest
    lines = [f"{shards.address}: {manifest.fingerprint}, {shards.tokenizer.vocab_size:,} ids as {manifest.dtype}"]
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        documents = f" of {split.documents:,} documents" if split.documents else ""
        lines.append(f"{name:<6}{split.tokens:,} tokens{documents} in {len(split.shards):,} shard(s)")
    described = {key: value for key, value in manifest.source.items() if value is not None}
    lines += ["source", *(f"  {key}: {value}" for key, value in described.items())]
    lines += CleaningReport.from_json(manifest.cleaning).describe() if manifest.cleaning else []
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def verify(place: str, request: DataRequest) -> int:
    from gptmill.cli.progress import show_amount
    from gptmill.data.shards.remote_folder import is_remote
    from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME
    from gptmill.data.shards.verification import verify_corpus

    if is_remote(place):
        raise UserError(
            f"{place} is far away; verify it where it lies: reading from afar checks each shard as it comes"
        )
    with show_amount("verifying") as report:
        problems = verify_corpus(Path(place), report, request.tokenizer)
    if problems:
        raise UserError("\n  ".join([f"{place} is not sound:", *problems]))
    is_own = (Path(place) / MANIFEST_NAME).exists()
    found = "every checksum, document start and token is as it was prepared"
    unchecked = "sizes are right and every token is in the vocabulary; such files have no checksums"
    sys.stdout.write(f"{place} is sound: {found if is_own else unchecked}\n")
    return 0


def print_windows(place: str, request: DataRequest) -> int:
    from gptmill.data.shards.passages import read_windows

    for name in ("count", "context_length"):
        if getattr(request, name) < 1:
            raise UserError(f"--{name} {getattr(request, name)}: must be at least 1")
    shards = open_corpus(place, request)
    windows = read_windows(shards, request.split, request.context_length, request.window, request.count)
    for number, extracts in enumerate(windows, start=request.window):
        sys.stdout.write(f"── {request.split} window {number:,} ".ljust(72, "─") + "\n")
        for extract in extracts:
            sys.stdout.write(f"[{describe_document(extract.document, extract.origin)}]\n{show(extract.text)}\n")
    return 0


def print_step(run_name: str, step: int, request: DataRequest) -> int:
    from gptmill.runs.directory import find_run
    from gptmill.training.data_replay import replay_step

    for number, row in enumerate(replay_step(find_run(run_name, request.logdir), step)):
        place = f"{row.corpus}/{row.shard}, tokens {row.start:,} to {row.start + row.length - 1:,}"
        sys.stdout.write(f"row {number:,}: {place}\n")
        for extract in row.extracts:
            text = show(extract.text)
            if not request.full:
                text = " ".join(text.split())[:OPENING_CHARS]
            begins = "" if extract.is_opening else "..."
            sys.stdout.write(f"  {describe_document(extract.document, extract.origin)}: {begins}{text}\n")
    return 0


def score(place: str, request: DataRequest) -> int:
    from gptmill.cli.progress import show_amount
    from gptmill.data.shards.scores import score_by_length, write_scores

    shards = open_corpus(place, request)
    name = request.name or request.by
    if request.by == "loss":
        if request.run is None:
            raise UserError("gptmill data score --by loss needs the model that judges: add --run RUN")
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
        f"train by it with: --order curriculum --score {name}\n"
    )
    return 0


def open_corpus(place: str, request: DataRequest) -> TokenShards:
    """Shows how far it is where files have to be hashed first, as those of a copy."""
    from gptmill.cli.progress import show_amount
    from gptmill.data.shards.opening import open_shards

    with show_amount("checking") as report:
        return open_shards(place, request.tokenizer, report=report)


def describe_document(number: int, origin: str | None) -> str:
    return f"document {number:,}" + (f" of {origin}" if origin else "")


def show(text: str) -> str:
    from gptmill.runs.display import make_plain

    return make_plain(text, sys.stdout.encoding or "utf-8")

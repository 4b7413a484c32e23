"""The data folder of a run: which one it is, whether it must be prepared first, and preparing it."""

from __future__ import annotations

from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest, ReadingOptions
from gptmill.config.run import DataConfig
from gptmill.data.pipeline.prepare_progress import Report
from gptmill.data.prepare import default_data_dir, prepare_corpus
from gptmill.data.shards.opening import holds_shards
from gptmill.data.shards.shard_manifest import read_manifest
from gptmill.data.sources import PYTHON_STDLIB, resolve_source

DEFAULT_TOKENIZER = "gpt2"


def find_data_dir(config: DataConfig) -> str:
    """Returns the folder or URI that the run reads."""
    if config.data_dir is not None:
        return config.data_dir
    if config.corpus is None:
        raise UserError(
            "no corpus: give --corpus (any source that gptmill prepare takes) or --data_dir (a prepared folder)"
        )
    return str(default_data_dir([config.corpus], config.tokenizer or DEFAULT_TOKENIZER))


def needs_preparing(config: DataConfig) -> bool:
    """Whether the folder must be prepared first.

    Raises UserError if the config names no corpus to prepare, or the folder was prepared from another one.
    """
    folder = find_data_dir(config)
    if holds_shards(folder):
        if config.corpus is not None and not _is_prepared_from(Path(folder), config.corpus):
            raise UserError(
                f"{folder} was not prepared from the current {config.corpus}; choose another --data_dir or replace it: "
                f"gptmill prepare {config.corpus} --tokenizer {config.tokenizer or DEFAULT_TOKENIZER} "
                f"--val_fraction {config.val_fraction} --out {folder} --overwrite"
            )
        return False
    if config.corpus is None:
        tokenizer = f" --tokenizer {config.tokenizer}" if config.tokenizer else ""
        raise UserError(
            f"{folder} holds no prepared corpus; prepare one with: gptmill prepare TEXT --out {folder}{tokenizer}, "
            f"or add --corpus TEXT to do so now"
        )
    return True


def _is_prepared_from(folder: Path, corpus: str) -> bool:
    """Compares file names and sizes; True if the text no longer exists, because its shards remain valid."""
    if corpus != PYTHON_STDLIB and not Path(corpus).exists():
        return True
    source = resolve_source([corpus], ReadingOptions())
    return read_manifest(folder).source.get("listing_sha256") == source.listing_sha256


def prepare_for_run(config: DataConfig, report: Report) -> None:
    """Prepares the corpus of a run into its folder."""
    assert config.corpus is not None
    request = PrepareRequest(
        out=find_data_dir(config),
        tokenizer=config.tokenizer or DEFAULT_TOKENIZER,
        val_fraction=config.val_fraction,
        reading=ReadingOptions(reading_parts=config.reading_parts),
    )
    prepare_corpus([config.corpus], request, report)

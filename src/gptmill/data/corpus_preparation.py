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
from gptmill.data.sources import PYTHON_STDLIB, USUAL_FOLDERS, count_download_bytes, resolve_source

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
                f"{make_prepare_command(config)} --overwrite"
            )
        return False
    if config.corpus is None:
        size_bytes = count_download_bytes(_find_usual_source(folder))
        download = f" (downloads {size_bytes / 1e9:,.1f} GB)" if size_bytes > 1e9 else ""
        raise UserError(
            f"{folder} holds no prepared corpus; prepare one with: {make_prepare_command(config)}{download}, or add "
            f"--corpus TEXT to train on a text of yours"
        )
    return True


def make_prepare_command(config: DataConfig) -> str:
    """The command that fills the folder of a run: from its corpus, or from the one that the folder is named after."""
    folder = find_data_dir(config)
    split = "" if config.val_fraction == DataConfig().val_fraction else f" --val_fraction {config.val_fraction:g}"
    return (
        f"gptmill prepare {config.corpus or _find_usual_source(folder)} "
        f"--tokenizer {config.tokenizer or DEFAULT_TOKENIZER}{split} --out {folder}"
    )


def _find_usual_source(folder: str) -> str:
    return USUAL_FOLDERS.get(Path(folder).name, "TEXT")


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

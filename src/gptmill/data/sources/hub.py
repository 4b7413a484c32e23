"""Streams Hugging Face datasets: hf:OWNER/NAME[/CONFIG][@SPLIT] from the Hub, or hf:FOLDER from the local disk."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.requests import ReadingOptions
from gptmill.config.trust import check_address
from gptmill.data.sources.failures import Record, make_extra_error
from gptmill.data.sources.formats.json_records import find_text
from gptmill.data.sources.source import HUB_PREFIX, SourceFile

DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class HubDataset:
    """A dataset, its config and its split; `path` is a repository of the Hub or a local folder."""

    path: str
    config: str | None
    split: str

    @property
    def is_local(self) -> bool:
        return self.path.startswith(("/", ".", "~")) or (len(self.path) > 1 and self.path[1] == ":")

    @property
    def name(self) -> str:
        return Path(self.path).name + (f"-{self.config}" if self.config else "")


def parse_hub_uri(uri: str) -> HubDataset:
    rest, at, split = uri.removeprefix(HUB_PREFIX).rpartition("@")
    rest, split = (rest, split) if at else (split, "")
    dataset = HubDataset(rest, None, split or DEFAULT_SPLIT)
    if dataset.is_local:
        return dataset
    owner, _, name = rest.partition("/")
    name, _, config = name.partition("/")
    if not owner or not name:
        raise UserError(f"{uri} names no dataset; write hf:OWNER/NAME[/CONFIG][@SPLIT], or hf:./FOLDER")
    return HubDataset(f"{owner}/{name}", config or None, split or DEFAULT_SPLIT)


def resolve_hub(uri: str) -> SourceFile:
    """Represents a dataset as one file of unknown size; sends no request to the Hub."""
    dataset = parse_hub_uri(uri)
    name = uri.removeprefix(HUB_PREFIX)
    if not dataset.is_local:
        return SourceFile(uri, name, 0, 0)
    folder = Path(dataset.path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{uri} does not exist; write hf:OWNER/NAME for a dataset of the Hugging Face Hub")
    mtime_ns = max(path.stat().st_mtime_ns for path in (folder, *folder.rglob("*")))
    return SourceFile(f"{HUB_PREFIX}{folder}@{dataset.split}", f"{folder.name}@{dataset.split}", 0, mtime_ns)


def read_hub(uri: str, options: ReadingOptions) -> Generator[Record]:
    """Yields the text field of each record in the order of the dataset."""
    try:
        import datasets
    except ImportError:
        raise make_extra_error(f"reading {uri}", "hf") from None
    datasets.disable_progress_bars()
    try:
        records = _open(datasets, parse_hub_uri(uri), uri)
        if records.column_names and options.text_field in records.column_names:
            records = records.select_columns([options.text_field])
        for number, record in enumerate(records, start=1):
            yield find_text(record, options.text_field, lambda: f"record {number} of {uri}")  # noqa: B023
    except UserError:
        raise
    except Exception as error:  # the network, the Hub and the dataset builder each raise their own types
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
        raise UserError(
            f"cannot read {uri}: {reason}; check its name, its split (@SPLIT), the network and your access"
        ) from None


def _open(datasets: Any, dataset: HubDataset, uri: str) -> Any:
    check_address(uri)
    folder = Path(dataset.path)
    if not dataset.is_local or not any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_dataset(dataset.path, dataset.config, split=dataset.split, streaming=True)
    loaded = datasets.load_from_disk(dataset.path)
    if not isinstance(loaded, dict):
        return loaded
    if dataset.split not in loaded:
        splits = ", ".join(loaded)
        raise UserError(f"{uri} has no split {dataset.split}{suggest(dataset.split, loaded)}; it has {splits}")
    return loaded[dataset.split]

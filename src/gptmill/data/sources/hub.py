"""Hugging Face datasets, streamed: hf:OWNER/NAME[/CONFIG][@SPLIT], or hf:FOLDER of one on this machine."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.config.requests import ReadingOptions
from gptmill.data.sources.failures import make_extra_error
from gptmill.data.sources.formats.json_records import find_text
from gptmill.data.sources.source import HUB_PREFIX, SourceFile

DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class HubAddress:
    path: str
    config: str | None
    split: str

    @property
    def is_local(self) -> bool:
        return self.path.startswith(("/", ".", "~")) or (len(self.path) > 1 and self.path[1] == ":")

    @property
    def name(self) -> str:
        return Path(self.path).name + (f"-{self.config}" if self.config else "")


def parse_hub_address(place: str) -> HubAddress:
    rest, at, split = place.removeprefix(HUB_PREFIX).rpartition("@")
    rest, split = (rest, split) if at else (split, "")
    address = HubAddress(rest, None, split or DEFAULT_SPLIT)
    if address.is_local:
        return address
    owner, _, name = rest.partition("/")
    name, _, config = name.partition("/")
    if not owner or not name:
        raise UserError(f"{place} names no dataset; write hf:OWNER/NAME[/CONFIG][@SPLIT], or hf:./FOLDER")
    return HubAddress(f"{owner}/{name}", config or None, split or DEFAULT_SPLIT)


def find_hub(place: str) -> SourceFile:
    """A dataset stands for one file of unknown size; nothing is asked of the hub before it is read."""
    address = parse_hub_address(place)
    name = place.removeprefix(HUB_PREFIX)
    if not address.is_local:
        return SourceFile(place, name, 0, 0)
    folder = Path(address.path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{place} does not exist; write hf:OWNER/NAME for a dataset of the hub")
    changed = max(path.stat().st_mtime_ns for path in (folder, *folder.rglob("*")))
    return SourceFile(f"{HUB_PREFIX}{folder}@{address.split}", f"{folder.name}@{address.split}", 0, changed)


def read_hub(place: str, options: ReadingOptions) -> Generator[str]:
    """The text field of each record, in the dataset's order."""
    try:
        import datasets
    except ImportError:
        raise make_extra_error(f"reading {place}", "hf") from None
    datasets.disable_progress_bars()
    try:
        dataset = _open(datasets, parse_hub_address(place), place)
        if dataset.column_names and options.text_field in dataset.column_names:
            dataset = dataset.select_columns([options.text_field])
        for number, record in enumerate(dataset, start=1):
            text = find_text(record, options.text_field, lambda: f"record {number} of {place}")  # noqa: B023
            if text is not None:
                yield text
    except UserError:
        raise
    except Exception as error:  # of the network, the hub, the builder: each has its own kinds
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"cannot read {place}: {reason}; check its name, its split (@SPLIT), the network and your access"
        ) from None


def _open(datasets: Any, address: HubAddress, place: str) -> Any:
    folder = Path(address.path)
    if not address.is_local or not any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_dataset(address.path, address.config, split=address.split, streaming=True)
    dataset = datasets.load_from_disk(address.path)
    if not isinstance(dataset, dict):
        return dataset
    if address.split not in dataset:
        splits = ", ".join(dataset)
        raise UserError(f"{place} has no split {address.split}{suggest(address.split, dataset)}; it has {splits}")
    return dataset[address.split]

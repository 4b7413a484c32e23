"""A run's checkpoints under an fsspec address: `step_*` folders, the manifest last, and tiers as tiny text objects.

A folder there is complete when it has its manifest, and never changes from then on. Knows no threads and no patience.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError
from gptmill.data.shards.remote_folder import make_address
from gptmill.data.sources.failures import make_extra_error
from gptmill.runs.checkpoints.manifest import MANIFEST, MAX_BYTES
from gptmill.runs.checkpoints.storage import STEP_FOLDER
from gptmill.runs.checkpoints.tiers import MAX_POINTER_BYTES, TIER

PROBE = ".probe"
# Where folders need not be made, and making one could make a bucket out of a misspelt name.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}


class RemoteRun:
    """The folder of one run, far away. What its file system raises passes through as it is."""

    def __init__(self, address: str) -> None:
        self.address = make_address(address)
        self._files, self._root = _open_file_system(self.address)

    def check_writable(self) -> None:
        """Raises UserError unless a tiny object can be written and removed."""
        try:
            self._make_folder(self._root)
            self._files.pipe_file(self._join(PROBE), b"gptmill\n")
            self._files.rm_file(self._join(PROBE))
        except Exception as error:  # every file system has its own kinds
            raise UserError(
                f"cannot write to {self.address}: {describe_failure(error)}; check the address, the network and your "
                f"rights, or leave out --mirror_to"
            ) from None

    def list_names(self) -> list[str]:
        """What lies there: tiers and folders, whole or not."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read_pointer(self, tier: str) -> str:
        """The name of the folder that a tier points to; empty if there is no such tier."""
        try:
            text: bytes = self._files.cat_file(self._join(tier), start=0, end=MAX_POINTER_BYTES)
        except (FileNotFoundError, IsADirectoryError):
            return ""
        name = text.decode(errors="replace").strip()
        return name if STEP_FOLDER.fullmatch(name) else ""

    def read_pointers(self) -> dict[str, str]:
        found = {tier: self.read_pointer(tier) for tier in self.list_names() if TIER.fullmatch(tier)}
        return {tier: name for tier, name in found.items() if name}

    def point(self, tier: str, name: str) -> None:
        self._files.pipe_file(self._join(tier), f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Removes a tier or a folder; of a folder the manifest first, so that no rest of it looks whole."""
        if TIER.fullmatch(name):
            self._files.rm_file(self._join(name))
            return
        with suppress(FileNotFoundError):
            self._files.rm_file(self._join(name, MANIFEST))
        self._files.rm(self._join(name), recursive=True)

    def read_manifest(self, name: str) -> bytes | None:
        """The bytes of a folder's manifest; None where it has none, or one that no gptmill wrote."""
        self._files.invalidate_cache()
        path = self._join(name, MANIFEST)
        try:
            size = self._files.info(path)["size"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        return bytes(self._files.cat_file(path)) if size <= MAX_BYTES else None

    def upload(self, folder: Path, name: str) -> None:
        """Copies a checkpoint's files, each looked at again for its size, and the manifest after all others."""
        self._make_folder(self._join(name))
        paths = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
        for path in paths:
            there, size = self._join(name, path.name), path.stat().st_size
            self._files.put_file(str(path), there)
            self._files.invalidate_cache()
            arrived = self._files.info(there)["size"]
            if arrived != size:
                raise OSError(f"{arrived:,} of the {size:,} bytes of {path.name} arrived")

    def download(self, name: str, file: str, path: Path) -> None:
        self._files.get_file(self._join(name, file), str(path))

    def _make_folder(self, path: str) -> None:
        protocols = self._files.protocol
        if not OBJECT_STORES & set([protocols] if isinstance(protocols, str) else protocols):
            self._files.makedirs(path, exist_ok=True)

    def _join(self, *names: str) -> str:
        return "/".join([self._root, *names])


def describe_failure(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _open_file_system(address: str) -> tuple[Any, str]:
    try:
        import fsspec

        # Others write there too, and s3fs would remember an answer of long ago.
        files, root = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
    except ImportError:
        raise make_extra_error(f"copying checkpoints to or from {address}", "cloud") from None
    except ValueError as error:
        raise UserError(f"{address} is no address that fsspec knows ({error}); check its spelling") from None
    return files, str(root).rstrip("/")

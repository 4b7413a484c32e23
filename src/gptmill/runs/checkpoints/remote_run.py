"""A run's checkpoints in remote storage: `step_*` folders, and tiers as text objects that name one of them.

The manifest is uploaded last: a folder that has one is complete and immutable. No threads and no retries here.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gptmill.config.errors import UserError
from gptmill.data.remote_fs import describe_error, normalize_uri, open_file_system
from gptmill.runs.checkpoints.manifest import MANIFEST, MAX_BYTES
from gptmill.runs.checkpoints.storage import STEP_FOLDER
from gptmill.runs.checkpoints.tiers import MAX_POINTER_BYTES, TIER

PROBE = ".probe"
# These need no folders, and creating one could create a bucket from a misspelt name.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}


class RemoteRun:
    """The remote folder of one run. Errors of its file system pass through unchanged."""

    def __init__(self, uri: str) -> None:
        self.uri = normalize_uri(uri)
        # Other processes write there too, and s3fs would return stale listings from its cache.
        self._files, root = open_file_system(self.uri, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")

    def check_writable(self) -> None:
        """Raises UserError unless a small object can be written and removed."""
        try:
            self._make_folder(self._root)
            self._files.pipe_file(self._join(PROBE), b"gptmill\n")
            self._files.rm_file(self._join(PROBE))
        except Exception as error:  # each fsspec backend raises its own types
            raise UserError(
                f"cannot write to {self.uri}: {describe_error(error)}; check the URI, the network and your access, or "
                f"leave out --mirror_to"
            ) from None

    def list_names(self) -> list[str]:
        """Returns the names of tiers and folders, complete or not."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read_pointer(self, tier: str) -> str:
        """Returns the name of the folder that a tier points to; empty if there is no such tier."""
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
        """Removes a tier or a folder; a folder's manifest first, so that what is left never looks complete."""
        if TIER.fullmatch(name):
            self._files.rm_file(self._join(name))
            return
        with suppress(FileNotFoundError):
            self._files.rm_file(self._join(name, MANIFEST))
        self._files.rm(self._join(name), recursive=True)

    def read_manifest(self, name: str) -> bytes | None:
        """Returns a folder's manifest; None if it has none, or one too large to be gptmill's."""
        self._files.invalidate_cache()
        path = self._join(name, MANIFEST)
        try:
            size = self._files.info(path)["size"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        return bytes(self._files.cat_file(path)) if size <= MAX_BYTES else None

    def upload(self, folder: Path, name: str) -> None:
        """Uploads a checkpoint's files, the manifest last; raises OSError if one arrives with another size."""
        self._make_folder(self._join(name))
        paths = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
        for path in paths:
            uploaded, size = self._join(name, path.name), path.stat().st_size
            self._files.put_file(str(path), uploaded)
            self._files.invalidate_cache()
            arrived = self._files.info(uploaded)["size"]
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

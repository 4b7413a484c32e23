"""A save by several ranks: each writes its shards to one temporary folder, which rank 0 completes and renames.

Rank 0 makes the folder. The others wait for it, write their files and then a receipt with the checksums. When all
receipts are there, rank 0 checks the files, writes the manifest and renames. Every message is a file in the run's
folder, which the ranks share, so that nothing here needs the process group or the training thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gptmill.config.errors import UserError
from gptmill.config.json_text import read_json
from gptmill.data.files import remove_tree
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo, Held
from gptmill.runs.checkpoints.manifest import FILE_NAME, list_group_files, make_digests, read_digests
from gptmill.runs.checkpoints.saved_tensors import open_tensors
from gptmill.runs.checkpoints.storage import (
    make_checkpoint_name,
    make_folder,
    publish,
    remove_leftovers,
    write_files,
)
from gptmill.runs.checkpoints.tensor_files import FileDigest, check_file

JOIN_SECONDS = 600.0  # how long a rank waits for the others, whose disks may be slower
POLL_SECONDS = (0.05, 1.0)  # at first, and in the end
MAX_NAMED = 3  # of the ranks that are missing


class AbandonedError(Exception):
    """The save cannot be completed, whatever this rank does. Its text is the reason."""


@dataclass(frozen=True)
class Writers:
    """The ranks that save together."""

    rank: int
    size: int
    token: str
    """Of this start of the run: what earlier ones have left behind is not theirs."""
    total_bytes: int
    """The disk space that the files of all ranks take."""


class JointSave:
    """One checkpoint, from the point of view of one rank. Failed attempts can be repeated."""

    def __init__(self, folder: Path, writers: Writers, checkpoint: Checkpoint[Held], number: int) -> None:
        """All ranks number their saves alike."""
        name = f".{make_checkpoint_name(checkpoint.step)}.{writers.token}-{number}"
        self._folder, self._writers, self._checkpoint = folder, writers, checkpoint
        self._partial, self._abandoned = folder / f"{name}.partial", folder / f"{name}.abandoned.partial"
        self.is_open = False
        """Whether the ranks have begun to write."""
        self._own: dict[str, FileDigest] | None = None
        self._others: dict[str, FileDigest] | None = None  # of the other ranks, on rank 0
        self._is_abandoned = False
        self._patience_ends = float("inf")

    def hurry(self, seconds: float) -> None:
        """Lets the other ranks have no more than this time from now on."""
        self._patience_ends = time.monotonic() + seconds

    def complete(self) -> CheckpointInfo:
        """On rank 0: writes its own files and, once the others have written theirs, makes the checkpoint appear.

        Raises OSError if this rank cannot write, and AbandonedError if another could not.
        """
        if not self.is_open:
            make_folder(self._folder)
            remove_leftovers(self._folder, but=self._writers.token)
            self._partial.mkdir(exist_ok=True)
            self.is_open = True
        files = self._write_own()
        if self._others is None:
            self._others = self._collect_receipts()
        files |= self._others
        self._check(files)
        for rank in range(1, self._writers.size):
            self._find_receipt(rank).unlink(missing_ok=True)
        return publish(self._partial, self._checkpoint, files)

    def abandon(self) -> None:
        """On rank 0: gives up, deletes what was written, and lets the others know."""
        with suppress(OSError):  # the others give up by themselves, later
            self._abandoned.mkdir(parents=True, exist_ok=True)
        remove_tree(self._partial)

    def contribute(self) -> None:
        """On the other ranks: writes the files and the receipt; raises OSError or AbandonedError."""
        self._wait_for_folder()
        try:
            self._send({"files": make_digests(self._write_own())})
        except FileNotFoundError:
            self._stop("rank 0 gave it up")

    def report_failure(self, reason: str) -> None:
        """On the other ranks: lets rank 0 know that this rank gives up, unless rank 0 has."""
        if not self._is_abandoned:
            with suppress(OSError, AbandonedError):  # rank 0 gives up by itself, later
                self._wait_for_folder()
                self._send({"error": reason})

    def _write_own(self) -> dict[str, FileDigest]:
        if self._own is None:
            self._own = write_files(self._partial, self._checkpoint, self._writers.rank)
        return dict(self._own)

    def _stop(self, reason: str) -> NoReturn:
        self._is_abandoned = True
        raise AbandonedError(reason)

    def _send(self, receipt: dict[str, Any]) -> None:
        """The rename comes last: once rank 0 sees the receipt, it may rename the folder at any moment."""
        path = self._find_receipt(self._writers.rank)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(receipt), encoding="utf-8")
        partial.replace(path)

    def _find_receipt(self, rank: int) -> Path:
        return self._partial / f"{rank:05d}.json"

    def _wait_for_folder(self) -> None:
        for _ in self._poll():
            if self._abandoned.exists():
                self._stop("rank 0 gave it up")
            if self._partial.is_dir():
                return
        self._stop(f"rank 0 did not start to save it within {JOIN_SECONDS:.0f} s")

    def _collect_receipts(self) -> dict[str, FileDigest]:
        files: dict[str, FileDigest] = {}
        missing = list(range(1, self._writers.size))
        for _ in self._poll():
            for rank in list(missing):
                if (path := self._find_receipt(rank)).exists():
                    files |= _read_receipt(path, rank)
                    missing.remove(rank)
            if not missing:
                return files
        raise AbandonedError(
            f"no shards of {_name_ranks(missing)} came in time; check these machines and their access to {self._folder}"
        )

    def _check(self, files: dict[str, FileDigest]) -> None:
        """Raises AbandonedError unless the files are here and their shards make up whole tensors."""
        try:
            for name, digest in files.items():
                check_file(self._partial / name, digest, thorough=False)
            for group in self._checkpoint.tensors:
                open_tensors(self._partial / name for name in list_group_files(files, group))
        except UserError as error:
            raise AbandonedError(str(error)) from None

    def _poll(self) -> Iterable[None]:
        """Yields at intervals that grow, until the time for the other ranks is over."""
        ends, pause = time.monotonic() + JOIN_SECONDS, POLL_SECONDS[0]
        while True:
            yield
            if time.monotonic() > min(ends, self._patience_ends):
                return
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])


def _read_receipt(path: Path, rank: int) -> dict[str, FileDigest]:
    """Raises AbandonedError for the receipt of a rank that has given up, or for an invalid one."""
    try:
        receipt = read_json(path)
        if "error" in receipt:
            raise AbandonedError(f"rank {rank}: {receipt['error']}")
        files = read_digests(receipt["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise AbandonedError(f"rank {rank} left an invalid receipt: {error}") from None
    if any((match := FILE_NAME.fullmatch(name)) is None or match[2] != f"{rank:05d}" for name in files):
        raise AbandonedError(f"rank {rank} left the receipt of another rank")
    return files


def _name_ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED:,} more" if len(ranks) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"

"""Mirrors a run's checkpoints to remote storage in the background, and fetches them from there."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import TypeVar

from gptmill.config.errors import UserError, suggest
from gptmill.config.regular_files import read_regular
from gptmill.data.files import flush_to_disk, write_durably
from gptmill.data.remote_fs import describe_error, is_permanent_error, normalize_uri, retry
from gptmill.runs.checkpoints.manifest import MANIFEST, read_manifest
from gptmill.runs.checkpoints.remote_run import RemoteRun
from gptmill.runs.checkpoints.storage import STEP_FOLDER, find_damage, make_checkpoint_name, read_step
from gptmill.runs.checkpoints.tiers import BEST, LATEST, ROLLING, read_tiers
from gptmill.runs.events import Event, Warned

NUMBERED_KINDS = ("epoch", "rolling", "milestone")
KINDS = (LATEST, BEST, *NUMBERED_KINDS)
PAUSES_SECONDS = (1.0, 5.0, 20.0, 60.0)  # between attempts to upload; the last one repeats
BEAT_SECONDS = 1.0
CLOSING_SECONDS = 2.0
FETCH_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")


class Mirror:
    """Keeps a remote folder in sync with the run's tiers from a background thread, the newest checkpoint first.

    Each pass compares against the tiers on disk, so what a failure or a kill left out is uploaded later. Epochs,
    milestones and the best model stay in the mirror when they are deleted locally. So does what the run has not
    uploaded itself: a run of the same name on another machine may have.
    """

    def __init__(self, uri: str, tiers: str, run_name: str, record: Path) -> None:
        """`record` lists what the run has uploaded, in this process and in earlier ones.

        Raises UserError for unknown tiers and where nothing can be written.
        """
        self._kinds = parse_kinds(tiers)
        self._remote = RemoteRun(f"{normalize_uri(uri)}/{run_name}")
        self._remote.check_writable()
        self._pointers: dict[str, str] | None = None  # remote ones; None until read
        self._names: dict[str, str] = {}  # of complete remote folders, by the digest of their manifest
        self._record, self._own = record, _read_lines(record)
        self._has_strangers = False
        self._folder = Path()
        self._step = self._offers = self._offers_done = self._failures = 0
        self._uploading: Path | None = None
        self._events: list[Event] = []
        self._is_hurried = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None:
        """Announces a checkpoint that is durable and linked; returns at once."""
        is_first = self._pointers is None  # an earlier process may have left checkpoints to upload
        if is_first or any(_find_kind(tier) in self._kinds for tier in (LATEST, *tiers)):
            with self._changed:
                self._folder, self._step = path.parent, step
                self._offers += 1
                self._changed.notify_all()

    def is_using(self, path: Path) -> bool:
        """Whether the folder is being uploaded now and must not be deleted."""
        return self._uploading == path

    def finish(self, timeout: float, beat: Callable[[], None] = lambda: None) -> None:
        """Waits up to `timeout` seconds until everything is uploaded; warns of what is not."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            while (left := deadline - time.monotonic()) > 0:
                if self._changed.wait_for(lambda: self._offers_done == self._offers, min(left, BEAT_SECONDS)):
                    return
                beat()
        missing = [f"{path.name} ({tier})" for tier, path in self._list_missing().items()]
        if missing:
            self._warn(f"not copied to {self._remote.uri}: {', '.join(missing)}; copy them from {self._folder}")

    def collect(self) -> list[Event]:
        """Returns the events since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Stops the thread without waiting for an upload in progress."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)

    def _work(self) -> None:
        while self._wait_for_offer():
            with suppress(Exception):  # closed before an attempt succeeded
                retry(self._sync, chain(PAUSES_SECONDS, repeat(PAUSES_SECONDS[-1])), wait=self._pause)

    def _wait_for_offer(self) -> bool:
        """Returns whether there is something to upload; False once the mirror is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._offers_done < self._offers)
            return not self._is_closed

    def _pause(self, seconds: float) -> bool:
        """Waits before the next attempt, unless `finish` is waiting; returns whether the mirror was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_hurried, seconds)
            self._is_hurried = False
            return self._is_closed

    def _sync(self) -> None:
        """Handles all offers made so far; reports the first failure in a row, and the recovery from it."""
        offers = self._offers
        try:
            self._copy_all()
        except Exception as error:  # a failing mirror must not end the run
            self._failures += 1
            if self._failures == 1:
                reason = describe_error(error)
                self._warn(f"cannot copy checkpoints to {self._remote.uri}: {reason}; retrying in the background")
            raise
        if self._failures:
            self._warn(f"checkpoints are copied to {self._remote.uri} again")
        self._failures = 0
        with self._changed:
            self._offers_done = offers
            self._changed.notify_all()

    def _copy_all(self) -> None:
        """Uploads missing checkpoints, then removes folders of this run that no remote tier points to."""
        if self._pointers is None:
            self._pointers = self._remote.read_pointers()
        while (missing := self._list_missing()) and not self._is_closed:
            path = max(missing.values(), key=read_step)
            try:
                name = self._upload(path)
            except FileNotFoundError:
                if path.is_dir():
                    raise
                continue  # deleted locally meanwhile
            for tier in [tier for tier, wanted in missing.items() if wanted == path]:
                self._remote.point(tier, name)
                self._pointers[tier] = name
        if self._is_closed:
            return
        gone = {tier for tier in self._pointers if tier.startswith(ROLLING)} - self._list_wanted().keys()
        for tier in gone:
            if self._is_own(self._remote.read_pointer(tier)):
                self._remote.remove(tier)
            del self._pointers[tier]
        folders = [name for name in self._remote.list_names() if STEP_FOLDER.fullmatch(name)]
        self._warn_of_strangers([name for name in folders if not self._is_own(name)])
        for name in filter(self._is_own, folders):
            if name not in self._pointers.values():
                self._names = {digest: known for digest, known in self._names.items() if known != name}
                self._remote.remove(name)
                self._note_own(name, is_there=False)

    def _upload(self, path: Path) -> str:
        """Uploads a folder unless it is there; returns its remote name, which differs if another checkpoint has it."""
        self._uploading = path
        try:
            manifest = (path / MANIFEST).read_bytes()
            digest = hashlib.sha256(manifest).hexdigest()
            plain = make_checkpoint_name(read_step(path))
            names = chain([path.name], (f"{plain}_{number}" for number in count(2)))
            for name in [self._names[digest]] if digest in self._names else names:
                uploaded = self._remote.read_manifest(name)
                if uploaded is None and not self._is_own(name) and name in self._remote.list_names():
                    continue  # another run may be uploading it
                if uploaded in (None, manifest):
                    self._note_own(name)  # first, so that a later process removes what a kill leaves
                    if uploaded is None:
                        self._remote.upload(path, name)
                    self._names[digest] = name
                    return name
            raise OSError(f"{path.name} has changed in the mirror")
        finally:
            self._uploading = None

    def _is_own(self, name: str) -> bool:
        return f"{self._remote.uri}/{name}" in self._own

    def _note_own(self, name: str, *, is_there: bool = True) -> None:
        if self._is_own(name) != is_there:
            self._own ^= {f"{self._remote.uri}/{name}"}
            with suppress(OSError):  # what is not on record is never removed
                write_durably(self._record, "\n".join(sorted(self._own)) + "\n")

    def _warn_of_strangers(self, names: list[str]) -> None:
        """Once: the other run moves the same tiers, so that they may lead to its checkpoints."""
        if names and not self._has_strangers:
            self._has_strangers = True
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._warn(
                f"{self._remote.uri} holds {names[0]}{more}, which this run did not upload and leaves there; if a run "
                f"of the same name uploads there too, rename one of them, since both move the same tiers"
            )

    def _list_wanted(self) -> dict[str, Path]:
        return {tier: path for tier, path in read_tiers(self._folder).items() if _find_kind(tier) in self._kinds}

    def _list_missing(self) -> dict[str, Path]:
        """Returns the local tiers whose remote pointers are missing or different."""
        pointers = self._pointers or {}
        missing = {}
        for tier, path in self._list_wanted().items():
            with suppress(FileNotFoundError):  # deleted locally meanwhile
                digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
                if digest not in self._names or pointers.get(tier) != self._names[digest]:
                    missing[tier] = path
        return missing

    def _warn(self, message: str) -> None:
        with self._changed:
            self._events.append(Warned(self._step, "copy", message))


def parse_kinds(tiers: str) -> frozenset[str]:
    """Parses a list of tiers such as best_model,epoch; raises UserError for unknown ones."""
    kinds = [kind.strip() for kind in tiers.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(
                f"mirror_tiers: there is no tier {kind!r}{suggest(kind, KINDS)}; name some of {', '.join(KINDS)}"
            )
    if not kinds:
        raise UserError(f"mirror_tiers is empty; name some of {', '.join(KINDS)}, or leave out --mirror_to")
    return frozenset(kinds)


def fetch_checkpoint(uri: str, into: Path) -> Path:
    """Downloads the checkpoint that a remote tier or folder names; returns its folder inside `into`.

    The folder appears by one rename. Checksums of tensors are verified on loading.
    """
    parent, _, name = normalize_uri(uri).rpartition("/")
    remote = RemoteRun(parent)
    manifest = _fetch(lambda: remote.read_manifest(name), uri)
    if manifest is None:
        name = _fetch(lambda: remote.read_pointer(name), uri)
        manifest = _fetch(lambda: remote.read_manifest(name), uri) if name else None
    if manifest is None:
        names = ", ".join(_fetch(remote.list_names, uri)) or "nothing"
        raise UserError(f"{uri} is not a gptmill checkpoint; {parent} holds {names}")
    folder = into / f".{name}.fetched.partial"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(manifest)
        content = read_manifest(folder)
        final = _find_folder(into, make_checkpoint_name(content.step), manifest)
        if final.exists():
            return final
        for file in content.files:
            _fetch(partial(remote.download, name, file, folder / file), f"{uri} ({file})")
            flush_to_disk(folder / file)
        flush_to_disk(folder / MANIFEST)
        flush_to_disk(folder)
        folder.rename(final)
        flush_to_disk(into)
    except OSError as error:
        raise UserError(f"cannot write {uri} to {into}: {error.strerror or error}; free disk space") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def _find_folder(parent: Path, plain: str, manifest: bytes) -> Path:
    """Returns a free path, or the folder that holds this very checkpoint undamaged."""
    for number in count(1):
        path = parent / (plain if number == 1 else f"{plain}_{number}")
        if not path.exists():
            return path
        if not find_damage(path, thorough=True) and (path / MANIFEST).read_bytes() == manifest:
            return path
    raise AssertionError("unreachable: count() is infinite")


def _fetch(action: Callable[[], T], what: str) -> T:
    """Retries `action`; raises UserError when it fails for good."""
    try:
        return retry(action, FETCH_PAUSES_SECONDS, is_final=is_permanent_error)
    except Exception as error:
        raise UserError(
            f"cannot fetch {what}: {describe_error(error)}; check the URI, the network and your access"
        ) from None


def _read_lines(path: Path) -> set[str]:
    with suppress(OSError):
        return {line for line in read_regular(path).decode(errors="replace").split("\n") if line}
    return set()


def _find_kind(tier: str) -> str:
    return tier if tier in KINDS else next((kind for kind in NUMBERED_KINDS if tier.startswith(f"{kind}_")), "")

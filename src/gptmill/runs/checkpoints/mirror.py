"""Copies of a run's checkpoints far away, made beside training, and their way back."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

from gptmill.config.errors import UserError, suggest
from gptmill.data.files import flush_to_disk
from gptmill.data.shards.remote_folder import LOCAL_ERRORS, make_address
from gptmill.runs.checkpoints.manifest import MANIFEST, read_manifest
from gptmill.runs.checkpoints.remote_run import RemoteRun, describe_failure
from gptmill.runs.checkpoints.storage import STEP_FOLDER, find_damage, make_checkpoint_name, read_step
from gptmill.runs.checkpoints.tiers import BEST, LATEST, ROLLING, read_tiers
from gptmill.runs.events import Event, Warned

NUMBERED_KINDS = ("epoch", "rolling", "milestone")
KINDS = (LATEST, BEST, *NUMBERED_KINDS)
PAUSES_SECONDS = (1.0, 5.0, 20.0, 60.0)  # after a failure; the last one for all that follow
BEAT_SECONDS = 1.0
CLOSING_SECONDS = 2.0
FETCH_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")


class Mirror:
    """Keeps an address in line with the run's own tiers, in a thread of its own, the newest checkpoint first.

    It looks at the tiers themselves each time: what a failure or a kill kept from being copied follows later. Epochs,
    milestones and the best model stay there when they are deleted here.
    """

    def __init__(self, address: str, tiers: str, run_name: str) -> None:
        """Raises UserError for what would keep it from ever copying anything."""
        self._kinds = parse_kinds(tiers)
        self._far = RemoteRun(f"{make_address(address)}/{run_name}")
        self._far.check_writable()
        self._pointers: dict[str, str] | None = None  # over there; None until they were read
        self._names: dict[str, str] = {}  # of whole folders over there, by the digest of their manifest
        self._folder = Path()
        self._step = self._offers = self._offers_done = self._failures = 0
        self._uploading: Path | None = None
        self._events: list[Event] = []
        self._is_hurried = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="copier", daemon=True)
        self._thread.start()

    def offer(self, path: Path, tiers: Sequence[str], step: int) -> None:
        """Says that a checkpoint is durable and linked; returns at once."""
        is_first = self._pointers is None  # then the process before may have left something to do
        if is_first or any(_find_kind(tier) in self._kinds for tier in (LATEST, *tiers)):
            with self._changed:
                self._folder, self._step = path.parent, step
                self._offers += 1
                self._changed.notify_all()

    def is_using(self, path: Path) -> bool:
        """Whether the folder is being read at this moment, and should not be deleted."""
        return self._uploading == path

    def finish(self, timeout: float, beat: Callable[[], None] = lambda: None) -> None:
        """Waits until all is copied, but no longer than `timeout` seconds; says what is not."""
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
            self._warn(f"not copied to {self._far.address}: {', '.join(missing)}; copy them from {self._folder}")

    def collect(self) -> list[Event]:
        """What there is to say since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Lets go; a file that is on its way is not waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)

    def _work(self) -> None:
        while (number := self._wait()) is not None:
            try:
                self._copy_all()
            except Exception as error:  # nothing that happens far away may end a run
                self._failures += 1
                if self._failures == 1:
                    reason = describe_failure(error)
                    self._warn(f"cannot copy checkpoints to {self._far.address}: {reason}; trying again and again")
                continue
            if self._failures:
                self._warn(f"checkpoints are copied to {self._far.address} again")
            self._failures = 0
            with self._changed:
                self._offers_done = number
                self._changed.notify_all()

    def _wait(self) -> int | None:
        """Returns how many offers there are once there is something to do; None when it is over."""
        with self._changed:
            if self._failures:
                pause = PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS)) - 1]
                self._changed.wait_for(lambda: self._is_closed or self._is_hurried, pause)
                self._is_hurried = False
            self._changed.wait_for(lambda: self._is_closed or self._offers_done < self._offers)
            return None if self._is_closed else self._offers

    def _copy_all(self) -> None:
        """Uploads what is missing and removes what then no tier over there points to."""
        if self._pointers is None:
            self._pointers = self._far.read_pointers()
        while (missing := self._list_missing()) and not self._is_closed:
            path = max(missing.values(), key=read_step)
            try:
                name = self._upload(path)
            except FileNotFoundError:
                if path.is_dir():
                    raise
                continue  # deleted here meanwhile
            for tier in [tier for tier, wanted in missing.items() if wanted == path]:
                self._far.point(tier, name)
                self._pointers[tier] = name
        if self._is_closed:
            return
        gone = {tier for tier in self._pointers if tier.startswith(ROLLING)} - self._list_wanted().keys()
        for tier in gone:
            self._far.remove(tier)
            del self._pointers[tier]
        for name in self._far.list_names():
            if STEP_FOLDER.fullmatch(name) and name not in self._pointers.values():
                self._names = {digest: known for digest, known in self._names.items() if known != name}
                self._far.remove(name)

    def _upload(self, path: Path) -> str:
        """Copies a folder unless it is there; returns its name there, which may be taken by another checkpoint."""
        self._uploading = path
        try:
            manifest = (path / MANIFEST).read_bytes()
            digest = hashlib.sha256(manifest).hexdigest()
            plain = make_checkpoint_name(read_step(path))
            names = chain([path.name], (f"{plain}_{number}" for number in count(2)))
            for name in [self._names[digest]] if digest in self._names else names:
                there = self._far.read_manifest(name)
                if there is None:
                    self._far.upload(path, name)
                if there in (None, manifest):
                    self._names[digest] = name
                    return name
            raise OSError(f"{path.name} has changed over there")
        finally:
            self._uploading = None

    def _list_wanted(self) -> dict[str, Path]:
        return {tier: path for tier, path in read_tiers(self._folder).items() if _find_kind(tier) in self._kinds}

    def _list_missing(self) -> dict[str, Path]:
        """The tiers here that are not the same over there."""
        pointers = self._pointers or {}
        missing = {}
        for tier, path in self._list_wanted().items():
            with suppress(FileNotFoundError):  # deleted here meanwhile
                digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
                if digest not in self._names or pointers.get(tier) != self._names[digest]:
                    missing[tier] = path
        return missing

    def _warn(self, message: str) -> None:
        with self._changed:
            self._events.append(Warned(self._step, "copy", message))


def parse_kinds(tiers: str) -> frozenset[str]:
    """The kinds of tiers in a list such as best_model,epoch; raises UserError for others."""
    kinds = [kind.strip() for kind in tiers.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(
                f"mirror_tiers: there is no tier {kind!r}{suggest(kind, KINDS)}; name some of {', '.join(KINDS)}"
            )
    if not kinds:
        raise UserError(f"mirror_tiers is empty; name some of {', '.join(KINDS)}, or leave out --mirror_to")
    return frozenset(kinds)


def fetch_checkpoint(address: str, into: Path) -> Path:
    """Downloads the checkpoint of a tier or folder far away; returns its folder inside `into`.

    It appears there by one rename. The bytes of its tensors are checked by those who load it.
    """
    place, _, name = make_address(address).rpartition("/")
    far = RemoteRun(place)
    manifest = _retry(lambda: far.read_manifest(name), address)
    if manifest is None:
        name = _retry(lambda: far.read_pointer(name), address)
        manifest = _retry(lambda: far.read_manifest(name), address) if name else None
    if manifest is None:
        names = ", ".join(_retry(far.list_names, address)) or "nothing"
        raise UserError(f"{address} is no checkpoint of gptmill; {place} holds {names}")
    folder = into / f".{name}.fetched.partial"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_bytes(manifest)
        content = read_manifest(folder)
        final = _find_place(into, make_checkpoint_name(content.step), manifest)
        if final.exists():
            return final
        for file in content.files:
            _retry(partial(far.download, name, file, folder / file), f"{address} ({file})")
            flush_to_disk(folder / file)
        flush_to_disk(folder / MANIFEST)
        flush_to_disk(folder)
        folder.rename(final)
        flush_to_disk(into)
    except OSError as error:
        raise UserError(f"cannot keep {address} in {into}: {error.strerror or error}; make room there") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def _find_place(folder: Path, plain: str, manifest: bytes) -> Path:
    """A name that is free, or the folder that holds this very checkpoint, sound."""
    for number in count(1):
        path = folder / (plain if number == 1 else f"{plain}_{number}")
        if not path.exists():
            return path
        if not find_damage(path, thorough=True) and (path / MANIFEST).read_bytes() == manifest:
            return path
    raise AssertionError("numbers do not end")


def _retry(action: Callable[[], T], address: str) -> T:
    """Does it again, with longer and longer pauses; raises UserError in the end."""
    for pause in (*FETCH_PAUSES_SECONDS, None):
        try:
            return action()
        except Exception as error:  # every file system has its own kinds
            if pause is None or isinstance(error, FileNotFoundError | PermissionError) or _is_local(error):
                raise UserError(
                    f"cannot fetch {address}: {describe_failure(error)}; check the address, the network and your rights"
                ) from None
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _is_local(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in LOCAL_ERRORS


def _find_kind(tier: str) -> str:
    return tier if tier in KINDS else next((kind for kind in NUMBERED_KINDS if tier.startswith(f"{kind}_")), "")

"""Remote shards: the same tokens as local ones, in a bounded cache, whatever fails in transit."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from reading import read_windows

from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards import remote_folder
from gptmill.data.shards.opening import TokenShards, holds_shards, open_shards
from gptmill.data.shards.shard_cache import SPACE_LOCK, hold_transient_lock

URI = "memory://bucket/corpus"
SHARD_TOKENS = 3000
SHARD_BYTES = 128 + 2 * SHARD_TOKENS
WAIT_SECONDS = 60


@pytest.fixture
def folder(text_file: Path, tmp_path: Path) -> Path:
    """A corpus of about ten shards."""
    return prepare(text_file, tmp_path / "here")


def prepare(text_file: Path, out: Path) -> Path:
    request = PrepareRequest(out=str(out), tokenizer="byte", shard_tokens=SHARD_TOKENS)
    return prepare_corpus([str(text_file)], request, lambda _: None)[0]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote_folder, "PAUSES_SECONDS", (0.0,) * len(remote_folder.PAUSES_SECONDS))
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "cache"))


Fetch = Callable[[str, str], None]


class Store:
    """The remote storage; `fetched` records every download when it starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched: queue.Queue[str] = queue.Queue()
        self.on_fetch: Callable[[str, str], object] = lambda _name, _path: None
        self.files = fsspec.filesystem("memory")
        fetch: Fetch = self.files.get_file

        def record(source: str, path: str) -> None:
            self.fetched.put(source.removeprefix("/bucket/corpus/"))
            fetch(source, path)
            self.on_fetch(source, path)

        monkeypatch.setattr(self.files, "get_file", record, raising=False)

    def upload(self, folder: Path) -> None:
        if self.files.exists("/bucket/corpus"):
            self.files.rm("/bucket/corpus", recursive=True)
        for path in folder.rglob("*"):
            if path.is_file():
                self.files.pipe_file(f"/bucket/corpus/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def list_fetched(self) -> list[str]:
        return [self.fetched.get() for _ in range(self.fetched.qsize())]


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store(monkeypatch)
    store.upload(folder)
    yield store
    join_prefetch()
    store.files.rm("/bucket", recursive=True)


def join_prefetch() -> None:
    """Waits until the background prefetch is idle."""
    for thread in threading.enumerate():
        if thread.name == "gptmill-prefetch":
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def list_all(shards: TokenShards) -> list[list[int]]:
    everything = (shards.train, shards.train_starts, shards.val, shards.val_starts)
    return [array.tolist() for arrays in everything for array in arrays]


def measure_cache(shards: TokenShards) -> int:
    with hold_transient_lock(shards.folder / SPACE_LOCK):
        return sum(path.stat().st_size for path in shards.folder.iterdir() if path.suffix in (".npy", ".partial"))


# Same content as local shards


def test_a_remote_corpus_is_the_one_that_was_prepared(folder: Path, store: Store) -> None:
    here, there = open_shards(folder), open_shards(URI, "byte")
    assert there.manifest == here.manifest
    assert there.location == URI
    assert list_all(there) == list_all(here)
    store.list_fetched()
    assert list_all(open_shards(URI)) == list_all(here)
    assert store.list_fetched() == []


def test_nothing_is_fetched_before_it_is_read(folder: Path, store: Store) -> None:
    here, there = open_shards(folder), open_shards(URI)
    windows, expected = there.cut(there.train, 16), here.cut(here.train, 16)
    assert windows.num_windows == expected.num_windows
    assert store.list_fetched() == []
    numbers = np.array([windows.num_windows - 1, 0, 1])
    assert np.array_equal(read_windows(windows, numbers), read_windows(expected, numbers))
    assert sorted(store.list_fetched()) == ["train_000000.npy", here.manifest.train.shards[-1].file]


def test_windows_in_random_order_match_the_local_ones(folder: Path, store: Store) -> None:
    here, there = open_shards(folder), open_shards(URI, cache_bytes=3 * SHARD_BYTES)
    windows, expected = there.cut(there.train, 16), here.cut(here.train, 16)
    for seed in range(3):
        numbers = np.random.default_rng(seed).integers(0, windows.num_windows, 50)
        assert np.array_equal(read_windows(windows, numbers), read_windows(expected, numbers))
    assert len(store.list_fetched()) > len(here.train)


def test_a_uri_that_went_through_path_is_still_recognised(store: Store) -> None:
    assert open_shards(Path(URI)).location == URI
    assert open_shards(URI + "/").location == URI
    assert holds_shards(Path(URI))
    assert store.list_fetched() == []


def test_a_corpus_that_was_replaced_is_not_mixed_with_the_former_one(
    folder: Path, text_file: Path, store: Store, tmp_path: Path
) -> None:
    list_all(open_shards(URI))
    text_file.write_text(text_file.read_text()[::-1])
    other = prepare(text_file, tmp_path / "other")
    store.upload(other)
    assert list_all(open_shards(URI)) == list_all(open_shards(other))
    store.upload(folder)
    assert list_all(open_shards(URI)) == list_all(open_shards(folder))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GPTMILL_CACHE": "mine", "XDG_CACHE_HOME": "desktop"}, "mine/shards"),
        ({"XDG_CACHE_HOME": "desktop"}, "desktop/gptmill/shards"),
        ({"HOME": "home"}, "home/.cache/gptmill/shards"),
    ],
)
@pytest.mark.usefixtures("store")
def test_the_cache_is_where_it_is_asked_for(
    environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPTMILL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert open_shards(URI).folder.parent == tmp_path / expected
    assert open_shards(URI, cache_dir=tmp_path / "named").folder.parent == tmp_path / "named" / "shards"


# Cache size


def test_the_cache_never_exceeds_its_limit(folder: Path, store: Store) -> None:
    bound = 5 * SHARD_BYTES // 2
    here, there = open_shards(folder), open_shards(URI, cache_bytes=bound)
    assert not there.train.fits_in_cache  # type: ignore[attr-defined]
    sizes: list[int] = []
    store.on_fetch = lambda _name, _path: sizes.append(measure_cache(there))
    for _ in range(2):
        there.train.prefetch(range(len(there.train)))  # type: ignore[attr-defined]
        for number, array in enumerate(here.train):
            assert there.train[number].tolist() == array.tolist()
            assert there.train_starts[number].tolist() == here.train_starts[number].tolist()
            sizes.append(measure_cache(there))
    join_prefetch()
    assert len(store.list_fetched()) >= 4 * len(here.train) - 4
    assert max(sizes) <= bound
    assert max(sizes) > 2 * SHARD_BYTES


def test_a_cache_large_enough_for_all_shards_keeps_them(store: Store) -> None:
    shards = open_shards(URI)
    assert shards.train.fits_in_cache  # type: ignore[attr-defined]
    for _ in range(2):
        list_all(shards)
    assert set(Counter(store.list_fetched()).values()) == {1}


@pytest.mark.usefixtures("store")
def test_a_lowered_limit_applies_from_the_start() -> None:
    list_all(open_shards(URI))
    assert measure_cache(open_shards(URI, cache_bytes=2 * SHARD_BYTES)) <= 2 * SHARD_BYTES


def test_the_least_recently_used_shard_goes_first(store: Store) -> None:
    shards = open_shards(URI, cache_bytes=3 * SHARD_BYTES)
    for number, seconds in ((0, 300), (1, 200), (2, 100)):
        shards.train[number]
        (path,) = shards.folder.glob(f"train_{number:06d}*.npy")
        os.utime(path, (seconds, seconds))
    shards.train[3]
    assert sorted(path.name[:12] for path in shards.folder.glob("*.npy")) == [
        "train_000000",
        "train_000001",
        "train_000003",
    ]
    assert store.list_fetched()[-1] == "train_000003.npy"


def test_an_array_outlives_the_eviction_of_its_file(folder: Path, store: Store) -> None:
    shards = open_shards(URI, cache_bytes=2 * SHARD_BYTES)
    first = shards.train[0]
    for number in range(1, 6):
        shards.train[number]
    assert not list(shards.folder.glob("train_000000*"))
    assert first.tolist() == open_shards(folder).train[0].tolist()
    assert store.list_fetched().count("train_000000.npy") == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of maps")
@pytest.mark.usefixtures("store")
def test_a_shard_evicted_by_another_process_is_unmapped() -> None:
    ours, theirs = (open_shards(URI, cache_bytes=2 * SHARD_BYTES) for _ in range(2))
    ours.train[0]
    for number in range(1, 6):
        theirs.train[number]
    removed = f"{ours.folder}/train_000000"
    assert removed in Path("/proc/self/maps").read_text()
    ours.train[5]
    assert removed not in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("store")
def test_a_cache_too_small_for_two_shards_is_refused() -> None:
    with pytest.raises(UserError, match=rf"{URI}.*{2 * SHARD_BYTES:,}"):
        open_shards(URI, cache_bytes=2 * SHARD_BYTES - 1)
    assert len(open_shards(URI, cache_bytes=2 * SHARD_BYTES).train[5]) == SHARD_TOKENS


# Prefetch


def test_shards_are_fetched_before_they_are_asked_for(store: Store) -> None:
    shards = open_shards(URI)
    shards.train.prefetch([3, 1, 2])  # type: ignore[attr-defined]
    names = [store.fetched.get(timeout=WAIT_SECONDS) for _ in range(3)]
    assert names == ["train_000003.npy", "train_000001.npy", "train_000002.npy"]
    for number in (1, 2, 3):
        assert len(shards.train[number]) == SHARD_TOKENS
    assert store.list_fetched() == []


def test_prefetch_continues_while_a_shard_is_in_use(store: Store) -> None:
    shards = open_shards(URI, cache_bytes=2 * SHARD_BYTES)
    shards.train.prefetch(range(6))  # type: ignore[attr-defined]
    for number in range(6):
        join_prefetch()  # what can be fetched has been, with no one asking for it
        soonest = [f"train_{here:06d}" for here in range(max(0, number - 1), min(6, max(2, number + 1)))]
        assert sorted(path.name[:12] for path in shards.folder.glob("*.npy")) == soonest
        shards.train[number]
    assert store.list_fetched() == [f"train_{number:06d}.npy" for number in range(6)]


def test_a_shard_being_prefetched_is_not_fetched_twice(store: Store) -> None:
    shards = open_shards(URI)
    may_end = threading.Event()
    store.on_fetch = lambda _name, _path: may_end.wait(WAIT_SECONDS)
    shards.train.prefetch([4])  # type: ignore[attr-defined]
    assert store.fetched.get(timeout=WAIT_SECONDS) == "train_000004.npy"
    opened: list[int] = []
    reader = threading.Thread(target=lambda: opened.append(len(shards.train[4])))
    reader.start()
    assert opened == []
    may_end.set()
    reader.join(WAIT_SECONDS)
    assert opened == [SHARD_TOKENS]
    assert store.list_fetched() == []


def test_a_prefetch_error_is_raised_when_the_shard_is_opened(store: Store) -> None:
    shards = open_shards(URI)
    store.files.rm("/bucket/corpus/train_000002.npy")
    shards.train.prefetch([1, 2, 3])  # type: ignore[attr-defined]
    join_prefetch()
    assert len(shards.train[1]) == SHARD_TOKENS
    with pytest.raises(UserError, match=rf"{URI}/train_000002\.npy"):
        shards.train[2]
    assert len(shards.train[3]) == SHARD_TOKENS


# Failures


def damage(path: str | Path) -> None:
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)


def test_a_damaged_shard_is_never_used(store: Store) -> None:
    shards = open_shards(URI)
    path = "/bucket/corpus/train_000001.npy"
    intact = store.files.cat_file(path)
    store.files.pipe_file(path, intact[:-1] + bytes([intact[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{URI}/train_000001\.npy.*SHA-256"):
            shards.train[1]
        assert list(shards.folder.glob("train*")) == []
    store.files.pipe_file(path, intact)
    assert len(shards.train[1]) == SHARD_TOKENS


def test_corruption_in_transit_is_fixed_by_another_download(folder: Path, store: Store) -> None:
    damages = iter([damage])
    store.on_fetch = lambda _name, path: next(damages, lambda _: None)(path)
    assert open_shards(URI).train[1].tolist() == open_shards(folder).train[1].tolist()
    assert store.list_fetched() == ["train_000001.npy"] * 2


def test_a_file_that_was_torn_in_the_cache_is_fetched_again(folder: Path, store: Store) -> None:
    open_shards(URI).train[1]
    shards = open_shards(URI)
    (path,) = shards.folder.glob("train_000001*")
    os.truncate(path, 1000)
    assert shards.train[1].tolist() == open_shards(folder).train[1].tolist()
    assert store.list_fetched() == ["train_000001.npy"] * 2


@pytest.mark.parametrize("content", [b"no array at all", None], ids=["foreign", "type"])
def test_a_shard_that_contradicts_its_manifest_is_refused(store: Store, content: bytes | None, tmp_path: Path) -> None:
    if content is None:
        np.save(tmp_path / "wide.npy", np.zeros(SHARD_TOKENS, dtype=np.uint32))
        content = (tmp_path / "wide.npy").read_bytes()
    manifest = json.loads(store.files.cat_file("/bucket/corpus/manifest.json"))
    manifest["train"]["shards"][1]["sha256"] = hashlib.sha256(content).hexdigest()
    store.files.pipe_file("/bucket/corpus/manifest.json", json.dumps(manifest).encode())
    store.files.pipe_file("/bucket/corpus/train_000001.npy", content)
    with pytest.raises(UserError, match=rf"{URI}/train_000001\.npy.*uint16 \({SHARD_TOKENS},\)"):
        open_shards(URI).train[1]


def test_transient_network_errors_are_retried(folder: Path, store: Store) -> None:
    failures = iter([ConnectionResetError("reset"), TimeoutError(), RuntimeError("of some library"), OSError("gone")])

    def fail(_name: str, _path: str) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    store.on_fetch = fail
    assert open_shards(URI).train[1].tolist() == open_shards(folder).train[1].tolist()
    assert len(store.list_fetched()) == 5


def test_a_permanent_network_failure_is_reported(store: Store) -> None:
    def fail(_name: str, _path: str) -> None:
        raise ConnectionResetError("the peer hung up")

    store.on_fetch = fail
    shards = open_shards(URI)
    with pytest.raises(UserError, match=rf"{URI}/train_000001\.npy.*5 attempts \(the peer hung up\)"):
        shards.train[1]
    assert list(shards.folder.glob("train*")) == []


def test_a_full_disk_is_reported_without_retrying(store: Store) -> None:
    def fail(_name: str, _path: str) -> None:
        raise OSError(28, "No space left on device")

    store.on_fetch = fail
    with pytest.raises(UserError, match=r"No space left.*GPTMILL_CACHE"):
        open_shards(URI).train[1]
    assert len(store.list_fetched()) == 1


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("memory://nowhere/at/all", r"memory://nowhere/at/all/manifest\.json"),
        ("klingon://qo-nos/corpus", "klingon"),
    ],
)
def test_a_uri_without_a_corpus_is_named_in_the_error(uri: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        open_shards(uri)


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[cloud\]'"):
        open_shards(URI)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=99),
        lambda content: content.pop("train"),
        lambda content: content["train"]["shards"][0].update(sha256="../../../../home"),
    ],
)
def test_an_unusable_manifest_is_named_by_its_uri(store: Store, change: Callable[[dict[str, Any]], object]) -> None:
    path = "/bucket/corpus/manifest.json"
    content = json.loads(store.files.cat_file(path))
    change(content)
    store.files.pipe_file(path, json.dumps(content).encode())
    with pytest.raises(UserError, match=rf"{URI}/manifest\.json"):
        open_shards(URI)


@pytest.mark.usefixtures("store")
def test_another_tokenizer_than_asked_for_is_named() -> None:
    with pytest.raises(UserError, match=rf"gpt2.*{URI}.*byte"):
        open_shards(URI, "gpt2")


# Over HTTP, with processes


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; stops in the middle of what `Server.stuck` names until `Server.released` is set."""

    server: Server

    def do_GET(self) -> None:
        name = Path(self.path).name
        with self.server.lock:
            self.server.served[self.path] += 1
        if name != self.server.stuck:
            super().do_GET()
            return
        content = (Path(self.directory) / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.server.is_stuck.set()
        self.server.released.wait(WAIT_SECONDS)

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.uri = f"http://127.0.0.1:{self.server_port}"
        self.served: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.stuck = ""
        self.is_stuck, self.released = threading.Event(), threading.Event()


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


READ_ALL = """
import hashlib, sys
from gptmill.data.shards.opening import open_shards
shards = open_shards(sys.argv[1], cache_bytes=int(sys.argv[2]))
shards.train.prefetch(range(len(shards.train)))
print(hashlib.sha256(b"".join(array.tobytes() for array in shards.train)).hexdigest())
"""


def start_reader(server: Server, cache_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READ_ALL, server.uri, str(cache_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_shards_are_read_over_http(folder: Path, server: Server) -> None:
    assert list_all(open_shards(server.uri)) == list_all(open_shards(folder))


def test_a_shard_that_the_web_server_lacks_is_named(folder: Path, server: Server) -> None:
    (folder / "train_000002.npy").unlink()
    shards = open_shards(server.uri)
    assert len(shards.train[1]) == SHARD_TOKENS
    with pytest.raises(UserError, match=rf"{server.uri}/train_000002\.npy"):
        shards.train[2]


@pytest.mark.parametrize("shards_kept", [2, 100])
def test_processes_share_a_cache(folder: Path, server: Server, shards_kept: int) -> None:
    tokens = b"".join(array.tobytes() for array in open_shards(folder).train)
    readers = [start_reader(server, shards_kept * SHARD_BYTES) for _ in range(2)]
    outputs = [reader.communicate(timeout=WAIT_SECONDS)[0].strip() for reader in readers]
    assert outputs == [hashlib.sha256(tokens).hexdigest()] * 2
    counts = [server.served[f"/{path.name}"] for path in folder.glob("train*.npy")]
    assert min(counts) >= 1
    assert shards_kept == 2 or max(counts) == 1


def test_what_a_killed_process_left_is_cleaned_up(folder: Path, server: Server, tmp_path: Path) -> None:
    server.stuck = "train_000001.npy"
    reader = start_reader(server, 100 * SHARD_BYTES)
    assert server.is_stuck.wait(WAIT_SECONDS)
    (partial_file,) = (tmp_path / "cache").rglob("train_000001*.partial")
    reader.send_signal(signal.SIGKILL)
    reader.communicate(timeout=WAIT_SECONDS)
    server.stuck = ""
    assert partial_file.exists()
    shards = open_shards(server.uri)
    assert not partial_file.exists()
    assert list_all(shards) == list_all(open_shards(folder))
    assert {path.suffix for path in shards.folder.iterdir()} == {".npy", ".json"}

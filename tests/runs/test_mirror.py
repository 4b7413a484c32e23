"""The mirror has the same tiers as the run, each complete or absent, whatever happens to the server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints import mirror as mirror_module
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.mirror import Mirror, fetch_checkpoint
from gptmill.runs.checkpoints.remote_run import RemoteRun
from gptmill.runs.checkpoints.storage import delete_checkpoint, load_checkpoint, save_checkpoint
from gptmill.runs.checkpoints.tiers import link_tiers

WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def _quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "PAUSES_SECONDS", (0.05,))
    monkeypatch.setattr(mirror_module, "FETCH_PAUSES_SECONDS", (0.05,))


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


class Run:
    """Saves, links and offers checkpoints, as the background writer does."""

    def __init__(self, folder: Path, mirror: Mirror, keep: int = 10) -> None:
        self.folder = folder
        self.mirror = mirror
        self.keep = keep

    def save(self, step: int, *tiers: str, seed: int = 0) -> Path:
        weights = torch.rand(50, generator=torch.Generator().manual_seed(step + seed))
        tensors = {"model": {"weight": weights}, "optimizer": {"moment": weights + 1}}
        path = save_checkpoint(self.folder, Checkpoint(step, tensors, {"val_loss": 3.0})).path
        names = [f"rolling_step_{step:06d}", *tiers]
        link_tiers(self.folder, path, names, self.keep, self.mirror.is_using)
        self.mirror.offer(path, names, step)
        return path


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    mirrors = []

    def open_one(uri: str, tiers: str, machine: str = "machine", **options: Any) -> Run:
        folder = tmp_path / machine
        mirrors.append(Mirror(uri, tiers, "run", folder / "mirrored.txt"))
        return Run(folder / "checkpoints", mirrors[-1], **options)

    yield open_one
    for mirror in mirrors:
        mirror.close()


def list_remote(uri: str) -> dict[str, str]:
    """Each remote tier with the folder that it names, and each remote folder with its files."""
    files, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, skip_instance_cache=True)
    found: dict[str, str] = {}
    for path in files.find(root):
        name, _, file = path.removeprefix(root).lstrip("/").partition("/")
        found[name] = found.get(name, "") + (f" {file}" if file else files.cat_file(path).decode().strip())
    return found


COMPLETE = " checkpoint.json model.safetensors optimizer.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts an S3 server unless it runs already; its content is lost when it ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        if processes and processes[-1].poll() is None:
            return processes[-1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        return processes[-1]

    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield start
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    for process in processes:
        process.kill()
        process.wait()


def test_chosen_tiers_are_mirrored_to_s3_and_fetched_bit_for_bit(
    tmp_path: Path, open_run: Callable[..., Run], server: Callable[[], subprocess.Popen[bytes]]
) -> None:
    server()
    run = open_run("s3://bucket/runs", "best_model,epoch", keep=2)
    run.save(10, "best_model")
    run.mirror.finish(WAIT_SECONDS)
    run.save(20, "epoch_00001")
    best = run.save(30, "best_model")
    run.mirror.finish(WAIT_SECONDS)
    assert run.mirror.collect() == []
    assert list_remote("s3://bucket/runs/run") == {
        "best_model": "step_000030",
        "epoch_00001": "step_000020",
        "step_000020": COMPLETE,
        "step_000030": COMPLETE,
    }
    fetched = fetch_checkpoint("s3://bucket/runs/run/best_model", tmp_path / "elsewhere")
    assert fetched == tmp_path / "elsewhere/step_000030"
    for file in best.iterdir():
        assert (fetched / file.name).read_bytes() == file.read_bytes()
    assert load_checkpoint(fetched, ("model", "optimizer")).step == 30


def test_a_server_that_was_down_gets_everything_once_it_is_back(
    open_run: Callable[..., Run], server: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = server()
    run = open_run("s3://bucket/runs", "latest,milestone")
    process.kill()
    process.wait()
    run.save(10, "milestone_step_000010")
    wait_for(lambda: run.mirror._failures > 0)
    run.save(20)
    run.save(30)
    server()
    run.mirror.finish(WAIT_SECONDS)
    assert list_remote("s3://bucket/runs/run") == {
        "latest": "step_000030",
        "milestone_step_000010": "step_000010",
        "step_000010": COMPLETE,
        "step_000030": COMPLETE,
    }
    first, *_, last = run.mirror.collect()
    assert "cannot copy checkpoints to s3://bucket/runs/run" in first.message
    assert "again" in last.message


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.usefixtures("memory")
def test_the_mirror_keeps_the_same_rolling_checkpoints(open_run: Callable[..., Run]) -> None:
    run = open_run("memory://bucket/runs/", "rolling", keep=2)
    for step in (10, 20, 30, 40):
        run.save(step)
        run.mirror.finish(WAIT_SECONDS)
    assert list_remote("memory://bucket/runs/run") == {
        "rolling_step_000030": "step_000030",
        "rolling_step_000040": "step_000040",
        "step_000030": COMPLETE,
        "step_000040": COMPLETE,
    }


@pytest.mark.usefixtures("memory")
def test_the_backup_tier_is_not_mirrored(open_run: Callable[..., Run]) -> None:
    run = open_run("memory://bucket/runs", "latest")
    for step in (10, 20):
        run.save(step)
        run.mirror.finish(WAIT_SECONDS)
    assert list_remote("memory://bucket/runs/run") == {"latest": "step_000020", "step_000020": COMPLETE}


def test_a_local_folder_can_be_the_mirror(tmp_path: Path, open_run: Callable[..., Run]) -> None:
    run = open_run(str(tmp_path / "not yet/there"), "best_model")
    saved = run.save(10, "best_model")
    run.mirror.finish(WAIT_SECONDS)
    copy = tmp_path / "not yet/there/run"
    assert (copy / "best_model").read_text(encoding="utf-8") == "step_000010\n"
    assert (copy / "step_000010/checkpoint.json").read_bytes() == (saved / "checkpoint.json").read_bytes()


@pytest.mark.usefixtures("memory")
def test_a_retrained_step_does_not_touch_the_earlier_copy(open_run: Callable[..., Run]) -> None:
    run = open_run("memory://bucket/runs", "epoch,milestone")
    first = run.save(10, "milestone_step_000010")
    run.mirror.finish(WAIT_SECONDS)
    (run.folder / "milestone_step_000010").unlink()
    delete_checkpoint(first)
    run.save(10, "epoch_00001", seed=1)
    run.mirror.finish(WAIT_SECONDS)
    assert list_remote("memory://bucket/runs/run") == {
        "milestone_step_000010": "step_000010",
        "epoch_00001": "step_000010_2",
        "step_000010": COMPLETE,
        "step_000010_2": COMPLETE,
    }


@pytest.mark.usefixtures("memory")
def test_a_resumed_process_uploads_what_the_one_before_could_not(
    tmp_path: Path, open_run: Callable[..., Run], memory: Any
) -> None:
    run = open_run("memory://bucket/runs", "epoch")
    run.save(10, "epoch_00001")
    run.mirror.finish(WAIT_SECONDS)
    run.mirror.close()
    kept = memory.created("/bucket/runs/run/step_000010/model.safetensors")
    run.save(20, "epoch_00002")  # offered after the mirror was closed
    for name in ("step_000005", "step_000020"):  # as a kill in the middle of an upload leaves them
        run.mirror._note_own(name)
        memory.pipe_file(f"/bucket/runs/run/{name}/model.safetensors", b"torn")
    run = open_run("memory://bucket/runs", "epoch")
    run.save(30)
    run.mirror.finish(WAIT_SECONDS)
    assert list_remote("memory://bucket/runs/run") == {
        "epoch_00001": "step_000010",
        "epoch_00002": "step_000020",
        "step_000010": COMPLETE,
        "step_000020": COMPLETE,
    }
    assert memory.created("/bucket/runs/run/step_000010/model.safetensors") == kept
    assert load_checkpoint(fetch_checkpoint("memory://bucket/runs/run/epoch_00002", tmp_path), ("model",)).step == 20


@pytest.mark.usefixtures("memory")
def test_runs_of_one_name_delete_nothing_of_each_other(
    open_run: Callable[..., Run], memory: Any, tmp_path: Path
) -> None:
    """Two machines with the same mirror; what one has uploaded, a later process of it still cleans up."""
    here, there = (open_run("memory://bucket/runs", "best_model,rolling", machine, keep=1) for machine in "ab")
    memory.pipe_file("/bucket/runs/run/step_000020/model.safetensors", b"half of what a third one uploads")
    for run, seed in ((here, 1), (there, 2)):
        run.save(10, "best_model", seed=seed)
        run.mirror.finish(WAIT_SECONDS)
    here.mirror.close()
    here = open_run("memory://bucket/runs", "best_model,rolling", "a", keep=1)
    for run, seed in ((here, 3), (there, 4)):
        for step in (20, 30):
            run.save(step, seed=seed)
            run.mirror.finish(WAIT_SECONDS)
    found = list_remote("memory://bucket/runs/run")
    folders = {name: files for name, files in found.items() if name.startswith("step_")}
    assert folders == {
        "step_000010": COMPLETE,
        "step_000010_2": COMPLETE,
        "step_000020": " model.safetensors",
        "step_000030": COMPLETE,
        "step_000030_2": COMPLETE,
    }
    for run, name, step in ((here, "step_000010", 10), (there, "step_000010_2", 10), (here, "step_000030", 30)):
        fetched = fetch_checkpoint(f"memory://bucket/runs/run/{name}", tmp_path / name)
        assert (
            fetched.joinpath("checkpoint.json").read_bytes()
            == (run.folder / f"step_{step:06d}/checkpoint.json").read_bytes()
        )
        assert load_checkpoint(fetched, ("model",)).step == step
    for run in (here, there):
        (event,) = run.mirror.collect()
        assert "which this run did not upload and leaves there" in event.message


class Slow:
    """Blocks every upload until `go` is set, then raises `failure` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self.failure: Exception | None = None
        upload = RemoteRun.upload

        def upload_slowly(remote: RemoteRun, folder: Path, name: str) -> None:
            self.begun.append(name)
            assert self.go.wait(WAIT_SECONDS)
            if self.failure is not None:
                raise self.failure
            upload(remote, folder, name)

        monkeypatch.setattr(RemoteRun, "upload", upload_slowly)


@pytest.mark.usefixtures("memory")
def test_training_never_waits_and_the_newest_checkpoint_wins(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    run = open_run("memory://bucket/runs", "latest", keep=1)
    first = run.save(10)
    wait_for(lambda: run.mirror.is_using(first))
    for step in (20, 30, 40):
        run.save(step)
    assert first.is_dir(), "a folder that is being uploaded was deleted"
    slow.go.set()
    run.mirror.finish(WAIT_SECONDS)
    assert slow.begun == ["step_000010", "step_000040"]
    assert list_remote("memory://bucket/runs/run") == {"latest": "step_000040", "step_000040": COMPLETE}
    assert not run.mirror.is_using(first)


@pytest.mark.usefixtures("memory")
def test_what_is_not_copied_in_time_is_named(open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    slow.failure = TimeoutError("no answer")
    slow.go.set()
    run = open_run("memory://bucket/runs", "best_model,epoch")
    run.save(10, "best_model")
    run.save(20, "epoch_00001")
    run.mirror.finish(0.3)
    events = run.mirror.collect()
    assert [(event.step, event.about) for event in events[-1:]] == [(20, "copy")]
    assert [event.message.count("no answer") for event in events] == [1, 0]
    for part in ("not copied to memory://bucket/runs/run", "step_000010 (best_model)", "step_000020 (epoch_00001)"):
        assert part in events[-1].message


@pytest.mark.usefixtures("memory")
def test_a_truncated_upload_is_detected_and_retried(open_run: Callable[..., Run], memory: Any) -> None:
    put_really = memory.put_file
    failed = []

    def put_half(here: str, there: str, **options: Any) -> None:
        put_really(here, there, **options)
        if there.endswith("model.safetensors") and not failed:
            failed.append(there)
            memory.pipe_file(there, memory.cat_file(there)[:-1])

    run = open_run("memory://bucket/runs", "latest")
    run.mirror._remote._files.put_file = put_half
    run.save(10)
    run.mirror.finish(WAIT_SECONDS)
    assert "arrived" in run.mirror.collect()[0].message
    assert memory.size("/bucket/runs/run/step_000010/model.safetensors") > 200


@pytest.mark.parametrize(
    ("uri", "tiers", "complaint"),
    [
        ("memory://bucket/runs", "best_model,epochs", "no tier 'epochs' (did you mean epoch?)"),
        ("memory://bucket/runs", "latest_backup", "no tier 'latest_backup'"),
        ("memory://bucket/runs", " , ", "mirror_tiers is empty"),
        ("nowhere://bucket/runs", "latest", "nowhere"),
        ("file:///proc/nothing/here", "latest", "cannot write to file:///proc/nothing/here/run"),
    ],
)
def test_what_can_never_work_is_refused_before_training(uri: str, tiers: str, complaint: str) -> None:
    with pytest.raises(UserError) as refusal:
        Mirror(uri, tiers, "run", Path("never"))
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_a_missing_package_names_the_line_that_installs_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[cloud\]'"):
        Mirror("s3://bucket/runs", "latest", "run", Path("never"))


def test_a_bucket_that_does_not_exist_is_refused_and_not_made(server: Callable[[], subprocess.Popen[bytes]]) -> None:
    server()
    with pytest.raises(UserError, match="bucket does not exist"):
        Mirror("s3://bukcet/runs", "latest", "run", Path("never"))
    assert not fsspec.filesystem("s3", skip_instance_cache=True).exists("bukcet")


@pytest.fixture
def remote(memory: Any, tmp_path: Path) -> Any:
    """memory://bucket/run with a best model of step 10."""
    tensors = {"model": {"weight": torch.arange(5.0)}}
    path = save_checkpoint(tmp_path / "saved", Checkpoint(10, tensors, {})).path
    for file in path.iterdir():
        memory.put_file(str(file), f"/bucket/run/step_000010/{file.name}")
    memory.pipe_file("/bucket/run/best_model", b"step_000010\n")
    return memory


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("name", ["best_model", "step_000010", "step_000010/"])
def test_a_tier_or_a_folder_can_be_fetched(tmp_path: Path, name: str) -> None:
    into = tmp_path / "runs/new/checkpoints"
    path = fetch_checkpoint(f"memory://bucket/run/{name}", into)
    assert path == into / "step_000010"
    assert torch.equal(load_checkpoint(path, ("model",)).tensors["model"]["weight"], torch.arange(5.0))
    assert [file.name for file in into.iterdir()] == ["step_000010"]


@pytest.mark.usefixtures("remote")
def test_fetching_twice_makes_one_folder_and_leaves_others_alone(tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "into", Checkpoint(10, {"model": {"weight": torch.ones(3)}}, {})).path
    before = (other / "checkpoint.json").read_bytes()
    for _ in range(2):
        assert fetch_checkpoint("memory://bucket/run/best_model", tmp_path / "into").name == "step_000010_2"
    assert (other / "checkpoint.json").read_bytes() == before
    (tmp_path / "into/step_000010_2/model.safetensors").write_bytes(b"damaged")
    assert fetch_checkpoint("memory://bucket/run/best_model", tmp_path / "into").name == "step_000010_3"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("best_modle", None, "best_model, step_000010"),
        ("best_model", b"../../secret", "is not a gptmill checkpoint"),
        ("best_model", b"step_000099", "is not a gptmill checkpoint"),
        ("step_000010/checkpoint.json", b"{}", "damaged"),
        ("step_000010/model.safetensors", None, "cannot fetch"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, remote: Any, name: str, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        remote.pipe_file(f"/bucket/run/{name}", content)
    elif remote.exists(f"/bucket/run/{name}"):
        remote.rm_file(f"/bucket/run/{name}")
    wanted = "step_000010" if name.startswith("step") else name
    with pytest.raises(UserError) as refusal:
        fetch_checkpoint(f"memory://bucket/run/{wanted}", tmp_path / "into")
    assert complaint in str(refusal.value)
    assert not (tmp_path / "into").exists() or not list((tmp_path / "into").iterdir())

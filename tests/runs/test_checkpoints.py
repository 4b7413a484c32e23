"""Checkpoints come back bit for bit, cannot be torn by a kill, and a damaged one is noticed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.storage import (
    Checkpoint,
    find_latest_checkpoint,
    list_checkpoints,
    list_step_folders,
    load_checkpoint,
    prune_checkpoints,
    read_step,
    save_checkpoint,
)

GROUPS = ("model", "optimizer")


def make_checkpoint(step: int, values: dict[str, Any] | None = None) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(5, 7, generator=generator),
        "strided": torch.randn(4, 6, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "special": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]),
    }
    optimizer = {"weight/exp_avg": torch.randn(5, 7, generator=generator), "weight/step": torch.tensor(3.0)}
    return Checkpoint(step, {"model": model, "optimizer": optimizer}, values or {"val_loss": 2.5, "windows_read": 48})


def are_bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = {"val_loss": 0.1 + 0.2, "windows_read": 2**60, "nested": {"list": [1, None, True], "text": "é\u2028"}}
    saved = make_checkpoint(250, values)
    info = save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(info.path, GROUPS)
    assert (loaded.step, loaded.values) == (250, values)
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(are_bit_equal(loaded.tensors[group], saved.tensors[group]) for group in GROUPS)


def test_only_the_groups_asked_for_are_loaded(tmp_path: Path) -> None:
    info = save_checkpoint(tmp_path, make_checkpoint(1))
    (info.path / "optimizer.safetensors").unlink()
    assert load_checkpoint(info.path, ("model",)).tensors.keys() == {"model"}
    with pytest.raises(UserError, match=r"no optimizer\.safetensors"):
        load_checkpoint(info.path, GROUPS)


def test_an_optimizer_without_state_can_be_saved(tmp_path: Path) -> None:
    info = save_checkpoint(tmp_path, Checkpoint(0, {"optimizer": {}}, {}))
    assert load_checkpoint(info.path, ("optimizer",)).tensors == {"optimizer": {}}


def test_a_checkpoint_tells_of_itself_without_being_loaded(tmp_path: Path) -> None:
    before = time.time()
    info = save_checkpoint(tmp_path, make_checkpoint(250))
    assert list_checkpoints(tmp_path) == [info]
    assert (info.path, info.step, info.val_loss) == (tmp_path / "step_000250", 250, 2.5)
    assert info.size_bytes == sum(path.stat().st_size for path in info.path.glob("*.safetensors"))
    assert before <= info.saved_at <= time.time()


def test_a_checkpoint_is_safetensors_and_json_that_others_may_read(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        info = save_checkpoint(tmp_path, make_checkpoint(1))
    finally:
        os.umask(previous)
    files = sorted(info.path.iterdir())
    assert [path.name for path in files] == ["checkpoint.json", "model.safetensors", "optimizer.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_checkpoint_json_is_json_for_every_reader_even_when_the_loss_is_nan(tmp_path: Path) -> None:
    info = save_checkpoint(tmp_path, make_checkpoint(1, {"val_loss": float("nan")}))

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    json.loads((info.path / "checkpoint.json").read_text(encoding="utf-8"), parse_constant=refuse)


def test_saving_the_same_step_again_leaves_the_first_as_it_is(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        save_checkpoint(tmp_path, make_checkpoint(1, {"try": attempt}))
    save_checkpoint(tmp_path, make_checkpoint(0))
    paths = list_step_folders(tmp_path)
    assert [path.name for path in paths] == ["step_000000", "step_000001", "step_000001_2", "step_000001_3"]
    assert [read_step(path) for path in paths] == [0, 1, 1, 1]
    assert [load_checkpoint(path, GROUPS).values for path in paths[1:]] == [{"try": 1}, {"try": 2}, {"try": 3}]


def test_a_partial_folder_is_never_listed_and_does_not_hinder_the_next_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(1))
    partial = tmp_path / ".step_000002.partial"
    partial.mkdir()
    for file in (tmp_path / "step_000001").iterdir():
        (partial / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (tmp_path / "step_000003").mkdir()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    assert find_latest_checkpoint(tmp_path).name == "step_000001"
    save_checkpoint(tmp_path, make_checkpoint(2))
    assert not partial.exists()
    load_checkpoint(tmp_path / "step_000002", GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_a_flipped_bit_anywhere_in_a_tensor_file_is_noticed(tmp_path: Path, group: str) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1)).path
    file = path / f"{group}.safetensors"
    sound = file.read_bytes()
    for position in [0, 7, 8, 9, len(sound) - 1, *random.Random(0).sample(range(len(sound)), 60)]:
        flip(file, position)
        with pytest.raises(UserError, match="damaged"):
            load_checkpoint(path, GROUPS)
        file.write_bytes(sound)
    load_checkpoint(path, GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_a_shortened_or_lengthened_tensor_file_is_noticed(tmp_path: Path, group: str) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1)).path
    file = path / f"{group}.safetensors"
    sound = file.read_bytes()
    for content in [sound[:length] for length in (0, 4, 8, 20, len(sound) // 2, len(sound) - 1)] + [sound + b"\0"]:
        file.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            load_checkpoint(path, GROUPS)


def test_a_flipped_digit_in_checkpoint_json_is_noticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1, {"windows_read": 48})).path
    file = path / "checkpoint.json"
    file.write_text(file.read_text(encoding="utf-8").replace("48", "58"), encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(path, GROUPS)


DAMAGED = {
    "empty": b"",
    "cut short": b'{"format": "gptmill-checkpoint", "version": 1, "st',
    "no object": b"[1, 2]",
    "null": b"null",
    "not text": b"\xff\xfe\x00\x80",
    "without a format": b'{"step": 3}',
    "without its files": b'{"format": "gptmill-checkpoint", "version": 1, "step": 1, "saved_at": 0, "values": {}}',
    "without its values": b'{"format": "gptmill-checkpoint", "version": 1, "step": 1, "saved_at": 0, "files": {}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_checkpoint_json_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1)).path
    (path / "checkpoint.json").write_bytes(content)
    with pytest.raises(UserError):
        load_checkpoint(path, ())


@pytest.mark.parametrize(("key", "value"), [("format", "somebody-else"), ("version", 2), ("version", 999)])
def test_a_foreign_or_newer_checkpoint_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1)).path
    file = path / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    with pytest.raises(UserError, match=str(value)):
        load_checkpoint(path, GROUPS)


def test_a_missing_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read checkpoint"):
        load_checkpoint(tmp_path / "step_000009", GROUPS)
    with pytest.raises(UserError, match="no checkpoint yet"):
        find_latest_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"format": "gptmill-checkpoint", "version": 1}'], ids=["empty", "hollow"])
def test_a_damaged_checkpoint_does_not_stand_in_the_way_of_the_sound_ones(tmp_path: Path, content: bytes) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, make_checkpoint(step))
    (tmp_path / "step_000003" / "checkpoint.json").write_bytes(content)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 2]
    assert find_latest_checkpoint(tmp_path).name == "step_000002"


def test_a_damaged_old_checkpoint_does_not_end_the_run_that_prunes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, make_checkpoint(step))
    (tmp_path / "step_000001" / "checkpoint.json").write_bytes(b"")
    prune_checkpoints(tmp_path, 1, 3)
    load_checkpoint(tmp_path / "step_000003", GROUPS)
    assert not (tmp_path / "step_000002").exists()


@pytest.mark.parametrize("keep", [1, 2, 5, 9])
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    steps = [3, 20, 100, 7000, 90000]
    for step in reversed(steps):
        save_checkpoint(tmp_path, make_checkpoint(step))
    prune_checkpoints(tmp_path, keep, steps[-1])
    assert [info.step for info in list_checkpoints(tmp_path)] == steps[-keep:]


def test_pruning_never_takes_the_checkpoint_just_saved_for_an_old_one(tmp_path: Path) -> None:
    for step in (20, 30, 23):  # 30 was damaged, the run went back to 20 and has now saved 23
        save_checkpoint(tmp_path, make_checkpoint(step))
    prune_checkpoints(tmp_path, 1, 23)
    assert [info.step for info in list_checkpoints(tmp_path)] == [23]


def test_the_newest_checkpoint_is_the_one_with_the_most_steps_beyond_a_million_too(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert [info.step for info in list_checkpoints(tmp_path)] == [999_999, 1_000_000]
    assert find_latest_checkpoint(tmp_path).name == "step_1000000"
    prune_checkpoints(tmp_path, 1, 1_000_000)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1_000_000]


# A process that saves and prunes; every step's tensors hold the step's number. Many groups: a folder's files are
# deleted in the file system's order, and a folder that lost some of them must not pass for a checkpoint.
MANY_GROUPS = tuple(f"group{number}" for number in range(8))
SAVER = f"""
GROUPS = {MANY_GROUPS}
import os, signal, sys
from pathlib import Path
import torch
from gptmill.runs.checkpoints.storage import Checkpoint, prune_checkpoints, save_checkpoint

torch.set_num_threads(1)

def save(folder, step, size):
    tensors = {{group: {{"w": torch.full((size,), float(step))}} for group in GROUPS}}
    save_checkpoint(folder, Checkpoint(step, tensors, {{"step": step}}))
    prune_checkpoints(folder, 2, step)
"""
ENDLESS = (
    SAVER
    + """
step = 0
while True:
    step += 1
    save(Path(sys.argv[1]), step, 250_000)
    print(step, flush=True)
"""
)
# Three saves, then a fourth, killed at the n-th file operation of its save and of the pruning after, for every n.
EVERY_OPERATION = (
    SAVER
    + """
OPERATIONS = {"open", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.rename"}

def save_and_die(folder, deadly):
    for step in (1, 2, 3):
        save(folder, step, 100)
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in OPERATIONS:
            count += 1
            if count == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(folder, 4, 100)
    os._exit(0)

deadly, killed = 0, True
while killed:
    deadly += 1
    child = os.fork()
    if child == 0:
        save_and_die(Path(sys.argv[1]) / str(deadly), deadly)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(deadly)
"""
)


def check_every_listed_checkpoint(folder: Path) -> list[int]:
    steps = []
    for info in list_checkpoints(folder):
        loaded = load_checkpoint(info.path, MANY_GROUPS)
        assert loaded.values == {"step": loaded.step}
        assert all(bool((group["w"] == loaded.step).all()) for group in loaded.tensors.values())
        steps.append(loaded.step)
    return steps


def test_a_save_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    generator = random.Random(time.time_ns())  # other moments at every run: any of them must do
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            durable = [int(process.stdout.readline()) for _ in range(2)][-1]
            time.sleep(generator.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
        steps = check_every_listed_checkpoint(folder)
        assert steps[-1] >= durable


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_killed_at_any_file_operation_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", EVERY_OPERATION, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 10
    torn = {}
    for deadly in range(1, int(process.stdout) + 1):
        try:
            assert len(check_every_listed_checkpoint(tmp_path / str(deadly))) >= 2
        except (UserError, AssertionError) as error:
            torn[deadly] = str(error)
    assert torn == {}

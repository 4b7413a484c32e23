"""Checkpoints come back bit for bit, cannot be torn by a kill, and a damaged one is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_environment
from safetensors.torch import load_file, save
from torch import Tensor
from zygote import Zygote

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import (
    delete_checkpoint,
    find_damage,
    list_step_folders,
    load_checkpoint,
    measure_checkpoint,
    read_info,
    read_step,
    remove_leftovers,
    save_checkpoint,
)
from gptmill.runs.checkpoints.tensor_files import DTYPES, FileDigest, measure_tensors, read_tensors, write_tensors

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
    values = values or {"train_loss": 2.25, "val_loss": 2.5, "windows_read": 48}
    return Checkpoint(step, {"model": model, "optimizer": optimizer}, values)


def copy(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format)


def are_bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and copy(one[name]).view(torch.uint8).equal(copy(other[name]).view(torch.uint8))
        for name in one
    )


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = {"val_loss": 0.1 + 0.2, "windows_read": 2**60, "nested": {"list": [1, None, True], "text": "é\u2028"}}
    saved = make_checkpoint(250, values)
    info = save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(info.path, GROUPS)
    assert (loaded.step, loaded.values) == (250, values)
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(are_bit_equal(loaded.tensors[group], saved.tensors[group]) for group in GROUPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_shape_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 6, 8), dtype=torch.uint8).view(dtype)
    tensors = {
        "numbers": numbers,
        "turned": numbers.transpose(0, 1),
        "every second": numbers[:, ::2],
        "one of many": numbers.flatten()[::100][:1],
        "single": numbers[0, 0, 0],
        "none": numbers[:0],
        "beside": torch.ones(3, dtype=torch.int8),
        'naïve "name"\n': numbers[0],
    }
    file = tmp_path / "x.safetensors"
    written = write_tensors(file, tensors)
    content = file.read_bytes()
    assert written == FileDigest(hashlib.sha256(content).hexdigest(), len(content))
    assert len(content) == measure_tensors(tensors)
    assert are_bit_equal(load_file(file), tensors)
    # One file, whoever writes it: tensors in the library's order, so that each is aligned.
    assert content == save(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )


def test_a_file_larger_than_a_piece_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.runs.checkpoints.tensor_files.CHUNK_BYTES", 1000)
    tensors = {"w": torch.randn(1001), "v": torch.randn(250)}
    written = write_tensors(tmp_path / "x.safetensors", tensors)
    assert are_bit_equal(read_tensors(tmp_path / "x.safetensors", written), tensors)


def test_a_model_on_its_way_to_be_trained_can_be_saved(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    info = save_checkpoint(tmp_path, Checkpoint(1, {"model": {"w": parameter}}, {}))
    loaded = load_checkpoint(info.path, ("model",)).tensors["model"]
    assert are_bit_equal(loaded, {"w": parameter.detach()})


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
    assert [read_info(path) for path in list_step_folders(tmp_path)] == [info]
    assert (info.path, info.step) == (tmp_path / "step_000250", 250)
    assert (info.train_loss, info.val_loss) == (2.25, 2.5)
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


def test_everything_is_on_the_disk_before_it_is_in_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path).as_posix())
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(f"{Path(source).name} -> {Path(target).name}")
        rename(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save_checkpoint(tmp_path / "checkpoints", make_checkpoint(1))
    partial = "checkpoints/.step_000001.partial"
    assert calls == [
        ".",
        f"{partial}/model.safetensors",
        f"{partial}/optimizer.safetensors",
        f"{partial}/checkpoint.json",
        partial,
        ".step_000001.partial -> step_000001",
        "checkpoints",
    ]


@pytest.mark.skipif(os.name == "nt", reason="needs limits on files")
@pytest.mark.parametrize("room", [0, 8, 200, 100_000])
def test_a_save_without_room_raises_and_leaves_what_was_there(tmp_path: Path, room: int) -> None:
    import resource

    before = save_checkpoint(tmp_path, make_checkpoint(1))
    large = Checkpoint(2, {"model": {"w": torch.zeros(50_000)}}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_checkpoint(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert find_damage(before.path, thorough=True) == ""
    save_checkpoint(tmp_path, large)
    assert find_damage(tmp_path / "step_000002", thorough=True) == ""


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_what_a_save_takes_is_known_before(tmp_path: Path, size: int) -> None:
    tensors = {"model": {f"w{number}": torch.zeros(size) for number in range(20)}, "optimizer": {}}
    checkpoint = Checkpoint(1, tensors, {"text": "x" * size, "list": list(range(size // 100))})
    path = save_checkpoint(tmp_path, checkpoint).path
    taken = sum(file.stat().st_blocks * 512 if os.name != "nt" else file.stat().st_size for file in path.iterdir())
    exact = sum(file.stat().st_size for file in path.iterdir())
    assert max(taken, exact) <= measure_checkpoint(checkpoint) <= exact + 20_000


def test_leftovers_go_and_links_are_never_followed(tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere" / "precious"
    precious.parent.mkdir()
    precious.write_text("x", encoding="utf-8")
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, make_checkpoint(1))
    for name in (".step_000001.partial", ".step_000002.deleted", "step_000009"):
        (folder / name).symlink_to(precious.parent, target_is_directory=True)
    (folder / ".step_000003_2.partial").mkdir()
    (folder / ".step_000003_2.partial" / "model.safetensors").write_bytes(b"x")
    assert [path.name for path in list_step_folders(folder)] == ["step_000001"]
    delete_checkpoint(folder / "step_000009")
    remove_leftovers(folder)
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    assert precious.is_file()


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    assert list_step_folders(tmp_path / "nothing") == []
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot read"):
        list_step_folders(tmp_path / "loop")


def test_training_on_what_was_loaded_leaves_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    info = save_checkpoint(tmp_path, make_checkpoint(1))
    load_checkpoint(info.path, GROUPS).tensors["model"]["weight"].add_(1)
    assert find_damage(info.path, thorough=True) == ""


def test_a_partial_folder_is_never_listed_and_does_not_hinder_the_next_save(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(1))
    partial = tmp_path / ".step_000002.partial"
    partial.mkdir()
    for file in (tmp_path / "step_000001").iterdir():
        (partial / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert [path.name for path in list_step_folders(tmp_path)] == ["step_000001"]
    save_checkpoint(tmp_path, make_checkpoint(2))
    assert not partial.exists()
    load_checkpoint(tmp_path / "step_000002", GROUPS)


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


@pytest.mark.parametrize(("key", "value"), [("format", "somebody-else"), ("version", 3), ("version", 999)])
def test_a_foreign_or_newer_checkpoint_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(1)).path
    file = path / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    with pytest.raises(UserError, match=str(value)):
        load_checkpoint(path, GROUPS)


def test_a_missing_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read checkpoint"):
        load_checkpoint(tmp_path / "step_000009", GROUPS)


def test_folders_are_in_the_order_of_their_steps_beyond_a_million_too(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert [path.name for path in list_step_folders(tmp_path)] == ["step_999999", "step_1000000"]


# A process that saves and prunes; every step's tensors hold the step's number. Many groups: a folder's files are
# deleted in the file system's order, and a folder that lost some of them must not pass for a checkpoint.
MANY_GROUPS = tuple(f"group{number}" for number in range(6))
SAVER = f"""
GROUPS = {MANY_GROUPS}
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from gptmill.runs.checkpoints import manifest, tensor_files
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import delete_checkpoint, list_step_folders, save_checkpoint

torch.set_num_threads(1)

def save(folder, step, size):
    tensors = {{group: {{"w": torch.full((size,), float(step))}} for group in GROUPS}}
    save_checkpoint(folder, Checkpoint(step, tensors, {{"step": step}}))
    for old in list_step_folders(folder)[:-2]:
        delete_checkpoint(old)
"""
# Children that save for ever, each killed at a moment of its own; prints what each had said to be durable by then.
ANY_MOMENT = (
    SAVER
    + """
for attempt in range(4):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(1, 1_000_000):
            save(Path(sys.argv[1]) / str(attempt), step, 250_000)
            os.write(writing, b".")
    os.read(reading, 1)
    os.read(reading, 1)
    time.sleep(random.uniform(0.0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    print(2 + len(os.read(reading, 1_000_000)))
    os.close(reading)
"""
)
# Three saves, then a fourth, killed at the n-th file operation of its save and of the pruning after, for every n.
EVERY_OPERATION = (
    SAVER
    + """
OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rmdir", "os.rename"}
write_all = tensor_files.write_all

def save_and_die(folder, deadly):
    count = 0
    def strike():
        nonlocal count
        count += 1
        if count == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
    def write_halves(file, piece):
        middle = len(piece) // 2
        write_all(file, piece[:middle])
        strike()
        write_all(file, piece[middle:])
    tensor_files.write_all = manifest.write_all = write_halves
    sys.addaudithook(lambda event, _: strike() if event in OPERATIONS else None)
    save(folder, 4, 100)
    os._exit(0)

before = Path(sys.argv[1]) / "before"
for step in (1, 2, 3):
    save(before, step, 100)
deadly, killed = 0, True
while killed:
    deadly += 1
    folder = shutil.copytree(before, before.with_name(str(deadly)))
    child = os.fork()
    if child == 0:
        save_and_die(folder, deadly)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(deadly)
"""
)


def run_script(script: str, folder: Path, zygote: Zygote) -> list[int]:
    """The numbers that it prints."""
    process = zygote.run(["-c", script, str(folder)], folder, make_environment())
    assert process.returncode == 0, process.stderr
    return [int(line) for line in process.stdout.split()]


def check_every_listed_checkpoint(folder: Path) -> list[int]:
    steps = []
    for path in list_step_folders(folder):
        loaded = load_checkpoint(path, MANY_GROUPS)
        assert loaded.values == {"step": loaded.step}
        assert all(bool((group["w"] == loaded.step).all()) for group in loaded.tensors.values())
        steps.append(loaded.step)
    return steps


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path, zygote: Zygote) -> None:
    durable = run_script(ANY_MOMENT, tmp_path, zygote)  # at other moments at every run: any of them must do
    assert len(durable) == 4
    for attempt, step in enumerate(durable):
        assert check_every_listed_checkpoint(tmp_path / str(attempt))[-1] >= step


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_save_killed_at_any_file_operation_leaves_only_whole_checkpoints(tmp_path: Path, zygote: Zygote) -> None:
    (last,) = run_script(EVERY_OPERATION, tmp_path, zygote)
    assert last > 20
    torn = {}
    for deadly in range(1, last + 1):
        try:
            assert len(check_every_listed_checkpoint(tmp_path / str(deadly))) >= 2
        except (UserError, AssertionError) as error:
            torn[deadly] = str(error)
    assert torn == {}
    assert check_every_listed_checkpoint(tmp_path / str(last)) == [3, 4]

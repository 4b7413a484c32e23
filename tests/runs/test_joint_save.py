"""A checkpoint written by several ranks at once: complete and whole, or not there at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import HOLD, cut, hold_fsdp, open_writers
from torch import Tensor

from gptmill.runs.checkpoints import joint_save
from gptmill.runs.checkpoints.background_save import BackgroundSaver
from gptmill.runs.checkpoints.content import Checkpoint, CheckpointInfo, Held
from gptmill.runs.checkpoints.joint_save import Writers
from gptmill.runs.checkpoints.storage import (
    find_damage,
    list_step_folders,
    load_checkpoint,
    measure_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from gptmill.runs.checkpoints.tiers import LATEST, read_tiers
from gptmill.runs.checkpoints.tiling import Box
from gptmill.runs.events import CheckpointSaved, Event, Warned

GROUPS = ("model", "optimizer")
NEVER: Callable[[], float] = lambda: 0.0  # noqa: E731


def make_tensors(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    weights = {
        "embedding": torch.randn(7, 4, generator=generator),
        "norm": torch.randn(5, generator=generator),
        "bias": torch.randn(1, generator=generator),
    }
    moments = {f"{name}/exp_avg": torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    return {"model": weights, "optimizer": moments | {"norm/step": torch.tensor(float(step))}}


def start(writer: BackgroundSaver, step: int, rank: int, ranks: int, strategy: str = "fsdp") -> None:
    writer.start(Checkpoint(step, HOLD[strategy](make_tensors(step), rank, ranks), {"step": step}), [], NEVER)


def save(folder: Path, step: int, ranks: int, strategy: str = "fsdp") -> list[Event]:
    """Saves as many ranks do, here in the threads of one process; returns what rank 0 says."""
    writers = open_writers(folder, ranks)
    for rank, writer in enumerate(writers):
        start(writer, step, rank, ranks, strategy)
    assert all(finish(writers))
    return writers[0].collect()


def finish(writers: list[BackgroundSaver]) -> list[bool]:
    return [writer.finish() for writer in writers]


def is_same(found: Checkpoint[Tensor], step: int) -> bool:
    expected = make_tensors(step)
    return all(
        found.tensors[group].keys() == expected[group].keys()
        and all(found.tensors[group][name].equal(tensor) for name, tensor in expected[group].items())
        for group in GROUPS
    )


def show(events: list[Event]) -> list[str]:
    return [event.message if isinstance(event, Warned) else f"{event.step} saved" for event in events]


@pytest.mark.parametrize("strategy", HOLD)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_what_any_number_of_ranks_saves_reads_back_whole_and_in_slices(
    ranks: int, strategy: str, tmp_path: Path
) -> None:
    (event,) = save(tmp_path, 20, ranks, strategy)
    path = tmp_path / "step_000020"
    assert isinstance(event, CheckpointSaved)
    assert read_tiers(tmp_path) == {LATEST: path}
    assert find_damage(path, thorough=True) == ""
    assert is_same(load_checkpoint(path, GROUPS), 20)
    listed = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))["files"]
    assert {file.name for file in path.iterdir()} == {*listed, "checkpoint.json"}
    assert event.size_bytes == sum((path / name).stat().st_size for name in listed)
    saved = open_checkpoint(path, GROUPS)
    for readers in (1, 2, 3, 5):
        for group, tensors in make_tensors(20).items():
            for name, tensor in tensors.items():
                for wanted in [cut(tensor, rank, readers) for rank in range(readers)] if tensor.dim() else []:
                    box = Box(wanted.offset, tuple(wanted.tensor.shape))
                    assert saved.tensors[group][name].read_slice(box).equal(wanted.tensor)


def test_one_rank_that_holds_plain_tensors_writes_the_files_of_before(tmp_path: Path) -> None:
    plain = Checkpoint(20, make_tensors(20), {})
    save_checkpoint(tmp_path / "alone", plain)
    writers = open_writers(tmp_path / "joint", 2)
    for writer in writers:  # as in DDP, if it saved jointly
        writer.start(plain, [], NEVER)
    assert all(finish(writers))
    alone, joint = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "step_000020").glob("*.safetensors")}
        for name in ("alone", "joint")
    )
    assert alone == joint
    assert alone.keys() == {"model.safetensors", "optimizer.safetensors"}


def test_only_rank_0_writes_what_all_ranks_have(tmp_path: Path) -> None:
    save(tmp_path, 20, 3, "zero1")
    names = sorted(file.name for file in (tmp_path / "step_000020").glob("*.safetensors"))
    assert names == ["model.safetensors", *(f"optimizer.{rank:05d}.safetensors" for rank in range(3))]


def test_saves_follow_each_other_and_old_ones_are_deleted_whole(tmp_path: Path) -> None:
    writers = open_writers(tmp_path, 3)
    for step in (10, 20, 20, 30):  # 20 again, as after a rollback
        for rank, writer in enumerate(writers):
            start(writer, step, rank, 3)
    assert all(finish(writers))
    assert show(writers[0].collect()) == ["10 saved", "20 saved", "20 saved", "30 saved"]
    assert [path.name for path in list_step_folders(tmp_path)] == ["step_000020_2", "step_000030"]
    assert is_same(load_checkpoint(tmp_path / "step_000030", GROUPS), 30)
    assert not list(tmp_path.glob(".*"))


def test_a_rank_has_saved_even_if_rank_0_completes_the_checkpoint_as_soon_as_it_sees_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def replace_and_wait(path: Path, target: Path) -> Path:
        result = replace(path, target)
        ends = time.monotonic() + 10.0
        while target.name == "00001.json" and target.parent.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        return result

    monkeypatch.setattr(Path, "replace", replace_and_wait)
    assert show(save(tmp_path, 20, 2)) == ["20 saved"]


def test_rank_0_says_which_ranks_did_not_deliver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, 4)
    monkeypatch.setattr(joint_save, "JOIN_SECONDS", 0.3)
    writers = open_writers(tmp_path, 4)
    for rank in (0, 2):
        start(writers[rank], 20, rank, 4)
    assert [writers[rank].finish() for rank in (0, 2)] == [False, True]
    (said,) = show(writers[0].collect())
    assert said.startswith("step 20 is not saved: no shards of ranks 1, 3 came in time; check these machines")
    assert [path.name for path in list_step_folders(tmp_path)] == ["step_000010"]
    assert read_tiers(tmp_path) == {LATEST: tmp_path / "step_000010"}
    start(writers[0], 30, 0, 4)  # and the next save is one of all ranks again
    for rank in (1, 2, 3):
        writers[rank]._saves = 1
        start(writers[rank], 30, rank, 4)
    assert all(finish(writers))
    assert is_same(load_checkpoint(tmp_path / "step_000030", GROUPS), 30)


def test_a_rank_that_cannot_write_tells_rank_0_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files = joint_save.write_files

    def fail(partial: Path, checkpoint: Checkpoint[Held], rank: int) -> object:
        if rank == 1:
            raise OSError(5, "Input/output error", str(partial / "model.00001.safetensors"))
        return write_files(partial, checkpoint, rank)

    monkeypatch.setattr(joint_save, "write_files", fail)
    monkeypatch.setattr("gptmill.runs.checkpoints.background_save.RETRY_SECONDS", (0.0,))
    writers = open_writers(tmp_path, 2)
    for rank, writer in enumerate(writers):
        start(writer, 20, rank, 2)
    assert not any(finish(writers[::-1]))
    (said,) = show(writers[0].collect())
    assert said.startswith("step 20 is not saved: rank 1: Input/output error (")
    assert list_step_folders(tmp_path) == []


def test_rank_0_can_repeat_what_fails_after_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, failures = joint_save.publish, [5, 5]

    def fail(*arguments: Any) -> CheckpointInfo:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return publish(*arguments)

    monkeypatch.setattr(joint_save, "publish", fail)
    monkeypatch.setattr("gptmill.runs.checkpoints.background_save.RETRY_SECONDS", (0.0,))
    said = show(save(tmp_path, 20, 2))
    assert said[0].startswith("cannot save step 20: Input/output error")
    assert said[-2:] == ["step 20 is saved after 3 attempts", "20 saved"]
    assert is_same(load_checkpoint(tmp_path / "step_000020", GROUPS), 20)


def test_a_rank_whose_copy_fails_tells_rank_0(tmp_path: Path) -> None:
    writers = open_writers(tmp_path, 2)

    def fail_to_copy() -> float:
        raise RuntimeError("CUDA error")

    writers[1].start(Checkpoint(20, hold_fsdp(make_tensors(20), 1, 2), {}), [], fail_to_copy)
    start(writers[0], 20, 0, 2)
    assert not any(finish(writers))
    assert show(writers[0].collect()) == [
        "step 20 is not saved: rank 1: copying it to host memory failed: RuntimeError: CUDA error"
    ]


def test_ranks_stop_waiting_once_rank_0_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.runs.checkpoints.background_writer.free_bytes", lambda _: 0)
    writers = open_writers(tmp_path, 2)
    for rank in (1, 0):
        start(writers[rank], 20, rank, 2)
    assert not any(finish(writers))
    assert show(writers[0].collect())[0].startswith("THE DISK IS FULL")
    assert show(writers[1].collect()) == ["step 20 is not saved: rank 0 gave it up"]
    monkeypatch.undo()
    for rank, writer in enumerate(writers):
        start(writer, 30, rank, 2)
    assert all(finish(writers))
    open_writers(tmp_path, 2, token="next")
    assert not list(tmp_path.glob(".*"))


def test_a_failing_process_gives_the_others_little_time(tmp_path: Path) -> None:
    writer = open_writers(tmp_path, 2)[0]
    start(writer, 20, 0, 2)
    assert not writer.finish(patience_seconds=0.0)
    assert "no shards of rank 1 came" in show(writer.collect())[0]


def test_shards_that_do_not_make_up_a_tensor_are_not_published(tmp_path: Path) -> None:
    writers = open_writers(tmp_path, 2)
    for writer in writers:
        start(writer, 20, 0, 2)  # both ranks take themselves for the first
    assert finish(writers) == [False, True]
    assert "two shards overlap" in show(writers[0].collect())[0]
    assert list_step_folders(tmp_path) == []


def test_files_of_a_killed_start_are_no_part_of_the_next_save(tmp_path: Path) -> None:
    old = joint_save.JointSave(tmp_path, Writers(1, 2, "old", 0), Checkpoint(20, {}, {}), 1)
    old._partial.mkdir()
    old.contribute()
    assert show(save(tmp_path, 20, 2)) == ["20 saved"]
    assert is_same(load_checkpoint(tmp_path / "step_000020", GROUPS), 20)
    assert not list(tmp_path.glob(".*"))


def test_every_rank_measures_its_own_files(tmp_path: Path) -> None:
    save(tmp_path, 20, 3)
    written = sum(file.stat().st_size for file in (tmp_path / "step_000020").iterdir())
    parts = [Checkpoint(20, hold_fsdp(make_tensors(20), rank, 3), {"step": 20}) for rank in range(3)]
    measured = sum(measure_checkpoint(part, rank) for rank, part in enumerate(parts))
    assert written <= measured <= written + 3 * 20_000

"""Whatever happens to the bytes of a checkpoint, it is noticed: by `find_damage`, and by whoever loads it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.manifest import MANIFEST
from gptmill.runs.checkpoints.storage import find_damage, load_checkpoint, save_checkpoint

GROUPS = ("model", "optimizer")
NAMES = (MANIFEST, "model.safetensors", "optimizer.safetensors")
FLIPS = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound checkpoint of about 2 kB."""
    return save_small(tmp_path, 250)


def save_small(folder: Path, step: int) -> Path:
    generator = torch.Generator().manual_seed(step)
    tensors = {group: {f"{group}.weight": torch.randn(9, 11, generator=generator)} for group in GROUPS}
    values = {"val_loss": 1.5, "windows_read": step, "text": "é", "nested": [{"a": 1e-7}, None, True, []]}
    path = save_checkpoint(folder, Checkpoint(step, tensors, values)).path
    assert is_sound(path)
    return path


def is_sound(path: Path) -> bool:
    """Both ways of looking must agree."""
    found, refused = find_damage(path, thorough=True), ""
    try:
        load_checkpoint(path, GROUPS)
    except UserError as error:
        refused = str(error)
    assert bool(found) == bool(refused), f"found: {found!r}, refused: {refused!r}"
    return not found


def overwrite(file: Path, place: int, byte: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(bytes([byte]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_noticed(path: Path, name: str) -> None:
    file = path / name
    sound = file.read_bytes()
    for length in reversed(range(len(sound))):
        os.truncate(file, length)
        assert not is_sound(path), f"{name} cut to {length} of {len(sound)} bytes"
    file.write_bytes(sound)
    assert is_sound(path)


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(path: Path) -> None:
    sound = {name: (path / name).read_bytes() for name in NAMES}
    places = [(name, bit) for name in NAMES for bit in range(8 * len(sound[name]))]
    for name, bit in random.Random(0).sample(places, FLIPS):
        byte = sound[name][bit // 8]
        overwrite(path / name, bit // 8, byte ^ (1 << bit % 8))
        assert not is_sound(path), f"bit {bit} of {name}"
        overwrite(path / name, bit // 8, byte)
    assert is_sound(path)


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_s_white_space_is_noticed(path: Path) -> None:
    file = path / MANIFEST
    sound = file.read_bytes()
    for place in (place for place, byte in enumerate(sound) if byte in b" \n"):
        for changed in {b" ", b"\n", b"\t", b""} - {sound[place : place + 1]}:
            file.write_bytes(sound[:place] + changed + sound[place + 1 :])
            assert not is_sound(path), f"{changed!r} at {place}"


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_noticed_without_reading_the_others(path: Path, name: str) -> None:
    (path / name).unlink()
    assert not is_sound(path)
    assert name in find_damage(path, thorough=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "extra", [b"\0", b" ", b"\n", b"{}", b"\0" * 4096], ids=["0", "space", "line", "json", "block"]
)
def test_appended_bytes_are_noticed_without_reading_the_others(path: Path, name: str, extra: bytes) -> None:
    with (path / name).open("ab") as file:
        file.write(extra)
    assert not is_sound(path)
    assert name in find_damage(path, thorough=False)


def test_other_bytes_of_the_same_size_are_only_noticed_by_a_thorough_look(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert find_damage(path, thorough=False) == ""
    assert file.name in find_damage(path, thorough=True)


def test_a_group_that_is_not_asked_for_is_not_in_the_way(path: Path) -> None:
    (path / "optimizer.safetensors").write_bytes(b"")
    assert load_checkpoint(path, ("model",)).step == 250
    with pytest.raises(UserError, match=r"optimizer\.safetensors has 0 bytes"):
        load_checkpoint(path, GROUPS)


@pytest.mark.parametrize(
    "names", [NAMES[:1], NAMES[1:2], NAMES[:2], NAMES[1:], NAMES], ids="manifest model both tensors all".split()
)
def test_files_of_another_checkpoint_are_noticed(path: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    other = save_small(tmp_path, 500)
    for name in names:
        content = [(folder / name).read_bytes() for folder in (path, other)]
        (path / name).write_bytes(content[1])
        (other / name).write_bytes(content[0])
    assert not is_sound(path)
    assert not is_sound(other)


def test_a_tensor_file_in_the_place_of_another_of_its_size_is_noticed(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "optimizer.safetensors").read_bytes())
    assert not is_sound(path)


def test_a_checkpoint_may_lie_anywhere_under_any_name_that_is_no_other_step(path: Path, tmp_path: Path) -> None:
    for name in ("best_model", "step_000250_7", "elsewhere/copy"):
        assert is_sound(shutil.copytree(path, tmp_path / name))
    assert not is_sound(shutil.copytree(path, tmp_path / "step_000251"))
    for name, target in (("latest", path.name), ("latest_backup", "step_000251")):
        (tmp_path / name).symlink_to(target)
    assert is_sound(tmp_path / "latest")
    assert not is_sound(tmp_path / "latest_backup")

"""Two checkpoints compared: what is the same is called so bit for bit, and what is not is named and measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs import comparison
from gptmill.runs.checkpoints.storage import Checkpoint, save_checkpoint
from gptmill.runs.comparison import compare_checkpoints, describe_comparison


def save(folder: Path, model: dict[str, Tensor], values: dict[str, Any] | None = None, step: int = 5) -> Path:
    tensors = {"model": model, "optimizer": {"a/step": torch.tensor(3.0)}}
    return save_checkpoint(folder, Checkpoint(step, tensors, values or {})).path


def compare(tmp_path: Path, one: dict[str, Tensor], other: dict[str, Tensor]) -> comparison.Comparison:
    return compare_checkpoints(save(tmp_path / "one", one), save(tmp_path / "other", other))


def test_equal_checkpoints_are_identical_in_every_tensor(tmp_path: Path) -> None:
    model = {
        "matrix": torch.randn(30, 20),
        "half": torch.randn(9).bfloat16(),
        "counts": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "strange": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    }
    found = compare(tmp_path, model, model)
    assert found.has_same_tensors
    assert (found.identical, found.tensors) == (7, 7)
    assert (found.config, found.values, found.largest) == ([], [], None)
    text = describe_comparison(found)
    assert "model: 6 of 6 tensors are bit-identical" in text
    assert "config: the same" in text


@pytest.mark.parametrize("piece_numbers", [1 << 20, 7])
def test_differences_are_measured_and_the_furthest_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_numbers: int
) -> None:
    monkeypatch.setattr(comparison, "CHUNK_ELEMENTS", piece_numbers)
    one = {f"t{number:02d}": torch.full((5, 4), 2.0) for number in range(14)}
    other = {name: tensor.clone() for name, tensor in one.items()}
    for number in range(12):
        other[f"t{number:02d}"][4, 3] += number + 1
    found = compare(tmp_path, one, other)
    model = found.groups[0]
    assert (model.identical, model.differing, model.total) == (2, 12, 14)
    assert [item.name for item in model.largest] == [f"t{number:02d}" for number in range(11, 1, -1)]
    assert [item.max_abs for item in model.largest] == list(range(12, 2, -1))
    norm = math.sqrt(20 * 4)
    assert model.largest[0].norm_change == pytest.approx((math.sqrt(19 * 4 + 14**2) - norm) / norm)
    assert found.largest == model.largest[0]
    assert not found.has_same_tensors
    text = describe_comparison(found)
    assert "t11: by up to 12, norm by" in text
    assert "2 more that differ less" in text


def test_tensors_that_differ_alike_take_one_line(tmp_path: Path) -> None:
    names = [f"{letter}/step" for letter in "abcdefghijklmn"]
    one = {name: torch.tensor(10.0) for name in names} | {"weight": torch.tensor([1.0, 2.0])}
    other = {name: torch.tensor(30.0) for name in names} | {"weight": torch.tensor([1.0, 2.5])}
    model = compare(tmp_path, one, other).groups[0]
    assert [(item.name, item.count) for item in model.largest] == [("a/step", 14), ("weight", 1)]
    assert "a/step and 13 more: by up to 20, norm by +200.000%" in describe_comparison(compare(tmp_path, one, other))


@pytest.mark.parametrize(
    ("a", "b", "max_abs"),
    [(0.0, -0.0, 0.0), (1.0, math.nan, math.inf), (1.0, -math.inf, math.inf), (math.inf, -math.inf, math.inf)],
)
def test_what_equality_would_hide_is_a_difference(tmp_path: Path, a: float, b: float, max_abs: float) -> None:
    found = compare(tmp_path, {"x": torch.tensor([1.0, a])}, {"x": torch.tensor([1.0, b])})
    assert found.groups[0].differing == 1
    assert found.groups[0].largest[0].max_abs == max_abs
    assert "x: by up to" in describe_comparison(found)


def test_names_shapes_and_types_are_told(tmp_path: Path) -> None:
    one = {"gone": torch.zeros(1), "grown": torch.zeros(2, 3), "typed": torch.zeros(4)}
    other = {"come": torch.zeros(1), "grown": torch.zeros(3, 3), "typed": torch.zeros(4).bfloat16()}
    model = compare(tmp_path, one, other).groups[0]
    assert (model.missing, model.new) == (["gone"], ["come"])
    assert model.reshaped == ["grown: [2, 3] float32 -> [3, 3] float32", "typed: [4] float32 -> [4] bfloat16"]
    assert (model.identical, model.total) == (0, 4)


def test_a_group_that_only_one_has_is_missing_as_a_whole(tmp_path: Path) -> None:
    one = save(tmp_path / "one", {"x": torch.zeros(1)})
    other = save_checkpoint(tmp_path / "other", Checkpoint(5, {"model": {"x": torch.zeros(1)}}, {})).path
    found = compare_checkpoints(one, other)
    assert [group.name for group in found.groups] == ["model", "optimizer"]
    assert found.groups[1].missing == ["a/step"]
    assert not found.has_same_tensors


def test_config_and_values_are_told_leaf_by_leaf(tmp_path: Path) -> None:
    before = {"config": {"max_lr": 1e-3, "seed": 1}, "val_loss": None, "guard": {"skipped": 0, "band": [[1] * 99]}}
    after = {"config": {"max_lr": 5e-4, "seed": 1}, "val_loss": 2.5, "guard": {"skipped": 1, "band": [[2] * 99]}}
    one = save(tmp_path, {}, before, step=100)
    other = save(tmp_path, {}, after, step=200)
    found = compare_checkpoints(one, other)
    assert found.config == ["max_lr: 0.001 -> 0.0005"]
    assert found.values[:3] == ["step: 100 -> 200", "val_loss: None -> 2.5", "guard.skipped: 0 -> 1"]
    assert all(len(line) < 150 for line in found.values)
    assert any(line.startswith("guard.band: [[1, 1") for line in found.values)


def test_an_absent_value_is_not_an_empty_one(tmp_path: Path) -> None:
    found = compare_checkpoints(save(tmp_path / "a", {}, {"x": None, "y": 1}), save(tmp_path / "b", {}, {"y": 1}))
    assert found.values == ["x: None -> absent"]


def test_a_damaged_file_or_a_link_is_a_sentence(tmp_path: Path) -> None:
    sound, damaged = (save(tmp_path / name, {"x": torch.zeros(50)}) for name in ("sound", "damaged"))
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        compare_checkpoints(sound, damaged)
    file.unlink()
    file.symlink_to(sound / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        compare_checkpoints(sound, damaged)
    with pytest.raises(UserError, match="nowhere"):
        compare_checkpoints(sound, tmp_path / "nowhere")

"""The state of a run goes through a checkpoint and comes back bit for bit, and so do the steps after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_shards, open_tiny
from torch import Tensor

from gptmill.data.shards.opening import TokenShards
from gptmill.runs.checkpoints.storage import Checkpoint, load_checkpoint, save_checkpoint
from gptmill.training.session import make_origin

GROUPS = ("model", "optimizer")


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def save(tiny: Tiny, folder: Path) -> Checkpoint:
    """The state as it comes back from the disk."""
    info = save_checkpoint(folder, tiny.state.make_checkpoint({}))
    return load_checkpoint(info.path, GROUPS)


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].equal(other[name]) for name in one
    )


def assert_same_state(one: Tiny, other: Tiny) -> None:
    first, second = (tiny.state.make_checkpoint({}) for tiny in (one, other))
    assert first.step == second.step
    assert first.values == second.values
    for group in GROUPS:
        assert are_equal(first.tensors[group], second.tensors[group]), group


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1, "label_smoothing": 0.1},
    "bf16": {"precision": "bf16", "dropout": 0.1},
    "fp16": {"precision": "fp16", "dropout": 0.1},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_a_restored_state_goes_on_as_the_unbroken_one(
    shards: TokenShards, tmp_path: Path, fields: dict[str, Any]
) -> None:
    unbroken = open_tiny(shards, **fields)
    for _ in range(4):
        unbroken.step()
    unbroken.state.val_loss = 3.14159
    if unbroken.state.scaler.is_enabled():
        unbroken.state.scaler.update(2.0**11)  # not the scale that a fresh scaler has
    restored = open_tiny(shards, **fields)
    restored.state.restore(save(unbroken, tmp_path), "here")
    assert (restored.state.step, restored.state.windows_read, restored.state.val_loss) == (4, 32, 3.14159)
    assert restored.state.scaler.get_scale() == unbroken.state.scaler.get_scale()
    assert_same_state(restored, unbroken)
    for _ in range(3):
        assert restored.step().read() == unbroken.step().read()
        assert_same_state(restored, unbroken)


def test_a_state_that_has_done_no_step_can_be_restored(shards: TokenShards, tmp_path: Path) -> None:
    unbroken, restored = open_tiny(shards), open_tiny(shards)
    restored.state.restore(save(unbroken, tmp_path), "here")
    assert restored.step().read() == unbroken.step().read()
    assert_same_state(restored, unbroken)


def test_making_a_checkpoint_changes_nothing(shards: TokenShards) -> None:
    saved, untouched = open_tiny(shards), open_tiny(shards)
    for _ in range(3):
        saved.state.make_checkpoint({})
        assert saved.step().read() == untouched.step().read()
    assert_same_state(saved, untouched)


def test_the_optimizer_s_tensors_are_saved_under_the_parameters_names(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    tiny.step()
    checkpoint = tiny.state.make_checkpoint({})
    parameters = dict(tiny.state.model.named_parameters())
    keys = ("exp_avg", "exp_avg_sq", "step")
    assert checkpoint.tensors["optimizer"].keys() == {f"{name}/{key}" for name in parameters for key in keys}
    for name, parameter in parameters.items():
        assert checkpoint.tensors["optimizer"][f"{name}/exp_avg"].shape == parameter.shape
        assert checkpoint.tensors["optimizer"][f"{name}/exp_avg"] is tiny.state.optimizer.state[parameter]["exp_avg"]
    assert checkpoint.tensors["model"].keys() == parameters.keys()


def test_the_order_of_the_saved_tensors_does_not_matter(shards: TokenShards) -> None:
    unbroken, restored = open_tiny(shards), open_tiny(shards)
    unbroken.step()
    saved = unbroken.state.make_checkpoint({})
    tensors = {
        group: {name: tensor.clone() for name, tensor in reversed(saved.tensors[group].items())} for group in GROUPS
    }
    restored.state.restore(Checkpoint(saved.step, tensors, saved.values), "here")
    assert restored.step().read() == unbroken.step().read()
    assert_same_state(restored, unbroken)


def test_a_checkpoint_tells_what_made_it(shards: TokenShards) -> None:
    tiny = open_tiny(shards, seed=7)
    values = tiny.state.make_checkpoint(make_origin(tiny.config, tiny.corpora, None, CPU)).values
    assert values["config"]["seed"] == 7
    assert values["config"]["embd_size"] == 16
    assert values["tokenizer"] == {"name": "byte", "vocab_size": 257}
    assert values["tokenizer_fingerprint"] == shards.manifest.fingerprint
    assert values["torch_version"] == str(torch.__version__)


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp32")])
def test_a_run_can_go_on_in_another_precision(shards: TokenShards, tmp_path: Path, before: str, after: str) -> None:
    first, second = open_tiny(shards, precision=before), open_tiny(shards, precision=after)
    first.step()
    second.state.restore(save(first, tmp_path), "here")
    assert second.step().read()[0] == pytest.approx(first.step().read()[0], rel=1e-2)


def test_compiled_and_plain_states_have_the_same_names_and_go_on_from_each_other(
    shards: TokenShards, tmp_path: Path
) -> None:
    compiled, plain = open_tiny(shards), open_tiny(shards)
    compiled.state.model.compile(backend="eager")  # what machine.compile does, without waiting for a code generator
    compiled.step()
    checkpoint = save(compiled, tmp_path)
    names = [name for group in GROUPS for name in checkpoint.tensors[group]]
    assert names
    assert not [name for name in names if "_orig_mod" in name or "module." in name]
    plain.state.restore(checkpoint, "here")
    assert plain.step().read()[0] == pytest.approx(compiled.step().read()[0], rel=1e-5)
    compiled.state.restore(save(plain, tmp_path), "here")
    assert_same_state(compiled, plain)

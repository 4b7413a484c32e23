"""The state of a run goes through a checkpoint and comes back bit for bit, and so do the steps after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, Tiny, make_shards, open_tiny
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.shards.opening import TokenShards
from gptmill.runs.checkpoints.storage import Checkpoint, load_checkpoint, save_checkpoint
from gptmill.training.provenance import make_origin
from gptmill.training.snapshots import SnapshotBuffers

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


@pytest.mark.slow
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
        (adamw,) = tiny.state.optimizer.members
        assert checkpoint.tensors["optimizer"][f"{name}/exp_avg"] is adamw.state[parameter]["exp_avg"]
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
    compiled.state.model.compile_parts(
        backend="eager"
    )  # what machine.compile does, without waiting for a code generator
    compiled.step()
    checkpoint = save(compiled, tmp_path)
    names = [name for group in GROUPS for name in checkpoint.tensors[group]]
    assert names
    assert not [name for name in names if "_orig_mod" in name or "module." in name]
    plain.state.restore(checkpoint, "here")
    assert plain.step().read()[0] == pytest.approx(compiled.step().read()[0], rel=1e-5)
    compiled.state.restore(save(plain, tmp_path), "here")
    assert_same_state(compiled, plain)


def test_restoring_does_not_tie_the_state_to_what_it_was_restored_from(shards: TokenShards) -> None:
    tiny = open_tiny(shards)
    tiny.step()
    snapshot = SnapshotBuffers(CPU.device, 1).take(tiny.state.make_checkpoint({})).checkpoint
    before = {group: {name: tensor.clone() for name, tensor in snapshot.tensors[group].items()} for group in GROUPS}
    tiny.step()
    tiny.state.restore(snapshot, "here")
    tiny.step()
    assert all(are_equal(before[group], snapshot.tensors[group]) for group in GROUPS)


def test_every_number_of_a_state_comes_back(shards: TokenShards, tmp_path: Path) -> None:
    one, other = open_tiny(shards), open_tiny(shards)
    for step in range(3):
        metrics = (stats := one.step()).read()
        one.state.spike_detector.check(
            stats.make_observation(metrics._replace(loss=float("nan") if step == 1 else metrics.loss))
        )
    one.state.early_stop.note(2, 2.5)
    one.state.early_stop.note(3, 2.75)
    one.state.skipped_windows, one.state.windows_jumped = [(8, 16), (64, 80)], 8
    one.state.epochs_done, one.state.evaluated_at, one.state.train_loss = 4, 3, 1.25
    other.state.restore(save(one, tmp_path), "here")
    assert_same_state(one, other)
    assert other.state.make_checkpoint({}).values["guard"]["skipped"] == 1
    assert other.state.early_stop.best_loss == 2.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("windows_read", -5),
        ("windows_read", 10**30),
        ("windows_read", True),
        ("windows_read", None),
        ("epochs_done", 1.5),
        ("evaluated_at", "x"),
        ("skipped_windows", [[9, 3]]),
        ("skipped_windows", [[-1, 3]]),
        ("skipped_windows", 7),
        ("guard", []),
        ("guard", {"skipped": "x"}),
        ("guard", {"records": [[1, 2, 3, "x", 4]]}),
        ("guard", {"records": [[1, 2]]}),
        ("early_stop", None),
        ("early_stop", {"best_loss": "x"}),
        ("scaler", "x"),
        ("val_loss", [1]),
    ],
)
def test_numbers_that_no_run_could_have_saved_are_refused(shards: TokenShards, name: str, value: object) -> None:
    tiny = open_tiny(shards)
    tiny.step()
    live = tiny.state.make_checkpoint({})
    tiny.state.restore(live, "here")
    with pytest.raises(UserError, match="cannot resume from here: "):
        tiny.state.restore(replace(live, values={**live.values, name: value}), "here")


def spoil_moments(moments: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    name = next(name for name in moments if name.endswith("/exp_avg"))
    step = name.removesuffix("exp_avg") + "step"
    changes: dict[str, dict[str, Tensor]] = {
        "another shape": {name: torch.zeros(3)},
        "a single number": {name: torch.zeros(())},
        "another type": {name: moments[name].to(torch.int64)},
        "fewer than no steps": {step: torch.tensor(-5.0)},
        "no number of steps": {step: torch.tensor(float("nan"))},
        "something unknown": {"evil/exp_avg": torch.zeros(1)},
    }
    if how == "one missing":
        return {key: tensor for key, tensor in moments.items() if key != name}
    return {} if how == "all missing" else {**moments, **changes[how]}


@pytest.mark.parametrize(
    "how",
    "another shape|a single number|another type|fewer than no steps|no number of steps|something unknown|one missing|"
    "all missing".split("|"),
)
def test_moments_that_are_not_those_of_the_model_are_refused(shards: TokenShards, how: str) -> None:
    tiny = open_tiny(shards)
    tiny.step()
    live = tiny.state.make_checkpoint({})
    tensors = {**live.tensors, "optimizer": spoil_moments(live.tensors["optimizer"], how)}
    with pytest.raises(UserError, match="the optimizer of here"):
        tiny.state.restore(replace(live, tensors=tensors), "here")

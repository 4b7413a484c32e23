"""Presets stand above the recipe and below the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gptmill.training.presets
from gptmill.config.errors import UserError
from gptmill.config.hardware import HARDWARE_PRESETS
from gptmill.config.recipes import make_config
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.sizes import list_sizes, load_size, load_size_training
from gptmill.config.validation import check_config
from gptmill.training.presets import check_size_is_chosen, resolve_presets
from gptmill.training.run_request import make_run_request


def resolve(recipe: str | None, options: PresetOptions, **flags: Any) -> RunConfig:
    return make_config(recipe, resolve_presets(recipe, flags, options))


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, memory_gb: float | None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: memory_gb is not None)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr(gptmill.training.presets, "find_nvidia_gpus", lambda: "")
    monkeypatch.setattr(gptmill.training.presets, "read_device_memory", lambda _device: round((memory_gb or 0) * 2**30))


def test_a_size_is_above_the_recipe_and_below_the_flags() -> None:
    config = resolve("demo", PresetOptions(size="tiny-moe"), num_layers=7)
    size = load_size("tiny-moe")
    assert config.model.num_layers == 7
    assert config.model.embd_size == size["embd_size"]
    assert config.training == make_config("demo", {}).training


def test_a_flag_that_changes_a_part_drops_what_the_size_said_of_it() -> None:
    assert resolve(None, PresetOptions(size="tiny-moe"), feed_forward="swiglu").model.feed_forward.tag == "swiglu"


def test_without_a_recipe_a_small_size_brings_the_batch_that_fits_it() -> None:
    own = load_size_training("tiny-gpt2")
    assert {"total_batch_size", "mini_batch_size", "eval_tokens"} <= own.keys()
    training = resolve(None, PresetOptions(size="tiny-gpt2")).training
    assert (training.total_batch_size, training.mini_batch_size) == (own["total_batch_size"], own["mini_batch_size"])
    assert resolve(None, PresetOptions(size="tiny-gpt2"), total_batch_size=512).training.total_batch_size == 512
    assert resolve(None, PresetOptions(size="gpt2-small")) == RunConfig()


@pytest.mark.parametrize("flags", [{}, {"context_length": 96}, {"mini_batch_size": 5}, {"context_length": 4096}])
@pytest.mark.parametrize("size", ["tiny-gpt2", "tiny-llama", "tiny-qwen3", "tiny-moe"])
def test_that_batch_follows_the_micro_batches_of_the_flags(size: str, flags: dict[str, int]) -> None:
    config = resolve(None, PresetOptions(size=size), **flags, eval_tokens=4096)
    check_config(config)
    assert 1024 <= config.training.total_batch_size <= 32_768


def test_the_default_size_on_a_cpu_is_refused_with_a_command_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    with pytest.raises(UserError, match="gptmill train demo --data_dir=mine; or choose a size"):
        check_size_is_chosen(None, {"data_dir": "mine"}, PresetOptions())
    with pytest.raises(UserError, match="gptmill tune demo"):
        check_size_is_chosen(None, {}, PresetOptions(), "tune")


@pytest.mark.parametrize(
    ("recipe", "flags", "size"),
    [
        ("demo", {}, None),
        (None, {"num_layers": 2}, None),
        (None, {"total_batch_size": 1024}, None),
        (None, {}, "gpt2-small"),
        (None, {"device": "cuda"}, None),
    ],
)
def test_a_recipe_a_size_or_a_gpu_is_a_choice(
    recipe: str | None, flags: dict[str, Any], size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, None)
    check_size_is_chosen(recipe, flags, PresetOptions(size=size))


def test_a_gpu_makes_the_default_size_a_choice_unless_the_run_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 24)
    check_size_is_chosen(None, {}, PresetOptions())
    with pytest.raises(UserError, match="too slow for a CPU"):
        check_size_is_chosen(None, {"device": "cpu"}, PresetOptions())


@pytest.mark.parametrize("tier", HARDWARE_PRESETS)
def test_a_tier_sets_batch_context_accumulation_and_size(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    config = resolve("gpt2-124m", PresetOptions(hardware=tier))  # type: ignore[arg-type]
    assert config.model.embd_size == HARDWARE_PRESETS[tier]["embd_size"]
    assert config.training.mini_batch_size == HARDWARE_PRESETS[tier]["mini_batch_size"]
    assert resolve(None, PresetOptions(hardware=tier), embd_size=128).model.embd_size == 128  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory_gb", "tier"), [(7.6, "8gb"), (11.6, "12gb"), (23.5, "24gb"), (79.2, "80gb"), (139.8, "141gb")]
)
def test_auto_takes_the_tier_of_this_machine(memory_gb: float, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, memory_gb)
    config = resolve(None, PresetOptions(hardware="auto"))
    assert config.model.num_layers == HARDWARE_PRESETS[tier]["num_layers"]
    assert config.training.total_batch_size == HARDWARE_PRESETS[tier]["total_batch_size"]
    assert config.training.mini_batch_size <= HARDWARE_PRESETS[tier]["mini_batch_size"]
    assert resolve(None, PresetOptions(hardware="auto"), mini_batch_size=1).training.mini_batch_size == 1


def test_less_memory_makes_micro_batches_smaller_and_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 12)
    config = resolve(None, PresetOptions(hardware="24gb"))
    assert config.training.total_batch_size == HARDWARE_PRESETS["24gb"]["total_batch_size"]
    assert config.training.mini_batch_size < HARDWARE_PRESETS["24gb"]["mini_batch_size"]


def test_auto_without_a_gpu_names_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    with pytest.raises(UserError, match="there is none; name one of 8gb, 12gb, 16gb, 24gb, 48gb, 80gb, 141gb"):
        resolve(None, PresetOptions(hardware="auto"))


def test_an_unknown_size_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="gpt2-small"):
        resolve(None, PresetOptions(size="gpt2-smal"))


def test_presets_are_for_runs_that_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="leave them out with --resume"):
        make_run_request("demo", {}, StartOptions(resume="latest"), PresetOptions(size="tiny-moe"))
    request = make_run_request("demo", {"run_name": "new"}, StartOptions(resume="auto"), PresetOptions(size="tiny-moe"))
    assert request.config.model.feed_forward.tag == "moe"


@pytest.mark.slow
@pytest.mark.parametrize("tier", HARDWARE_PRESETS)
def test_every_size_goes_with_every_tier_and_wins(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    for size in list_sizes():
        config = resolve(None, PresetOptions(size=size, hardware=tier))  # type: ignore[arg-type]
        check_config(config)
        assert config.model.num_layers == load_size(size)["num_layers"], size


def test_a_tier_leaves_no_width_of_a_recipe_s_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    assert resolve("custom-300m-modern", PresetOptions(hardware="8gb")).model.hidden_size == 1408

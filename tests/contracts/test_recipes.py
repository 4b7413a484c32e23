"""Every shipped recipe loads, validates and plans; one that is meant for a CPU also runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GptMill, write_words

from gptmill.cli.main import run_guarded
from gptmill.config.recipes import SHIPPED, list_recipes, load_recipe
from gptmill.config.requests import PrepareRequest
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.validation import check_config
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.prepare import prepare_corpus
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import open_shards
from gptmill.runtime.world import World
from gptmill.training.plan import make_plan

# As the models were published; the padding of the vocabulary may add a little.
PUBLISHED_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
}
MOST_PADDING = 0.002
# Their steps are what one card does at once: more cards need a smaller mini_batch_size, and are told so.
ONE_CARD = {"shakespeare-char", "books-000", "books-124m", "books-124m-modern", "enwik8"}


def test_the_list_is_what_is_shipped() -> None:
    assert list(list_recipes()) == sorted(path.stem for path in SHIPPED.iterdir())
    assert PUBLISHED_PARAMETERS.keys() <= list_recipes().keys()


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Shards of one text by the tokenizer, prepared once."""
    parent = tmp_path_factory.mktemp("prepared")
    text = parent / "large.txt"
    text.write_text(write_words(parent).read_text(encoding="utf-8") * 4, encoding="utf-8")

    @cache
    def prepare(tokenizer: str) -> Path:
        request = PrepareRequest(out=str(parent / tokenizer), tokenizer=tokenizer, val_fraction=0.1)
        return prepare_corpus([str(text)], request, lambda _: None)[0]

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_validates_and_plans(name: str, prepare: Callable[[str], Path]) -> None:
    """On one rank; one made for many is valid on eight too."""
    config = build_config(RunConfig, load_recipe(name))
    check_config(config)
    if config.machine.device == "cuda" and name not in ONE_CARD:
        check_config(config, world_size=8)
    corpora = Corpora((open_shards(prepare(config.data.tokenizer or "gpt2"), config.data.tokenizer),))
    plan = make_plan(config, build_sampler(config, corpora), corpora.tokenizer, World(0, 1, torch.device("cpu")))
    assert plan.max_steps == (config.training.max_steps or 5 * 19073)
    assert plan.micro_batches * config.training.mini_batch_size == plan.windows_per_step
    assert plan.windows_per_step * config.model.context_length == plan.tokens_per_step
    if name in PUBLISHED_PARAMETERS:
        assert plan.parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=MOST_PADDING)


# What the founding documents say of their runs.
FOUNDING: dict[str, dict[str, Any]] = {
    "books-000": {
        **{"num_layers": 12, "embd_size": 768, "num_heads": 12, "context_length": 256, "total_batch_size": 8 * 256},
        **{"max_steps": 5 * 322, "max_lr": 5e-4, "schedule": "constant", "eval_freq": 100, "eval_tokens": 5 * 8 * 256},
        **{"eval_train": True, "early_stop_patience": 3, "checkpoint_freq": 1000, "val_fraction": 0.15},
    },
    "custom-300m": {
        **{"num_layers": 24, "embd_size": 1024, "context_length": 2048, "total_batch_size": 512 * 2048},
        **{"max_steps": 100_000, "max_lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 2000, "weight_decay": 0.1},
        **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip": 1.0, "schedule": "cosine", "dropout": 0.1},
        **{"precision": "fp16", "tied_head": True, "val_fraction": 0.05, "early_stop_patience": 10},
        **{"log_freq": 100, "eval_freq": 1000, "checkpoint_freq": 10_000},
    },
    "gpt2-124m": {
        **{"total_batch_size": 524_288, "mini_batch_size": 32, "context_length": 1024, "num_epochs": 5},
        **{"steps_per_epoch": 19_073, "max_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 715, "eval_freq": 250},
        **{"checkpoint_freq": 250, "keep_checkpoints": 10},
    },
    "optimized": {
        **{"num_layers": 12, "embd_size": 768, "context_length": 256, "total_batch_size": 4 * 128 * 256},
        **{"feed_forward": "swiglu", "bias": False, "tied_head": True, "label_smoothing": 0.1, "grad_clip": 1.0},
        **{"schedule": "cosine", "max_lr": 1e-3, "data_on_device": True, "compile": True},
    },
}


@pytest.mark.parametrize("name", FOUNDING)
def test_a_founding_run_has_the_settings_of_its_document(name: str) -> None:
    values = list_values(build_config(RunConfig, load_recipe(name)))
    assert {key: values[key] for key in FOUNDING[name]} == FOUNDING[name]


@pytest.mark.parametrize("name", ["books-000", "optimized", "common-crawl", "custom-300m", "custom-500m", "custom-1b"])
def test_a_recipe_is_planned_and_shown_without_its_corpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["plan", name, "--gpu", "H200"]) == 0
    assert "is not prepared: epochs unknown; gptmill prepare" in capsys.readouterr().out
    assert run_guarded(["config", "show", name]) == 0
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_fineweb_edu_say_how_to_get_it() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in SHIPPED.iterdir()}
    named = {name for name, text in texts.items() if 'data_dir = "data/edu_fineweb10B"' in text}
    assert {"gpt2-124m", "modern-124m", "custom-300m", "custom-300m-modern", "custom-500m", "moe-small"} <= named
    for name in named:
        assert "# FineWeb-Edu: gptmill prepare fineweb-edu-10B --" in texts[name], name


@pytest.mark.parametrize("name", ["books-000", "optimized", "custom-300m"])
def test_a_founding_run_does_a_step_on_a_cpu(name: str, gptmill: GptMill, text_file: Path, tmp_path: Path) -> None:
    sizes = "--num_layers 1 --embd_size 16 --num_heads 2 --ffn_size 32 --context_length 32 --sample_tokens 0".split()
    gptmill("train", name, "--corpus", text_file, "--force-cpu", "--run_name", "smoke", *sizes)
    assert (tmp_path / "runs" / "smoke" / "checkpoints" / "step_000001").is_dir()


def test_a_recipe_for_the_cpu_runs(gptmill: GptMill, text_file: Path, tmp_path: Path) -> None:
    flags = "--force-cpu --run_name smoke --sample_tokens 4".split()
    gptmill("train", "shakespeare-char-cpu", "--corpus", text_file, *flags)
    assert (tmp_path / "runs" / "smoke" / "checkpoints" / "step_000001").is_dir()

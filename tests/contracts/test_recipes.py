"""Every shipped recipe loads, validates and plans; one that is meant for a CPU also runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import GptMill, write_words

from gptmill.config.recipes import SHIPPED, list_recipes, load_recipe
from gptmill.config.requests import PrepareRequest
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
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


def test_a_recipe_for_the_cpu_runs(gptmill: GptMill, text_file: Path, tmp_path: Path) -> None:
    flags = "--force-cpu --run_name smoke --sample_tokens 4".split()
    gptmill("train", "shakespeare-char-cpu", "--corpus", text_file, *flags)
    assert (tmp_path / "runs" / "smoke" / "checkpoints" / "step_000001").is_dir()

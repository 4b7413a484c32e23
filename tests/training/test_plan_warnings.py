"""A run says at its start what its plan would, if it is long enough to be worth it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import CPU, make_config, make_shards

from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.training import plan_warnings
from gptmill.training.plan import make_plan
from gptmill.training.plan_warnings import warn_of_plan


def test_a_long_run_is_warned_of_what_its_plan_says_and_a_short_one_is_not(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(max_steps=5000, warmup_steps=2000)
    corpora = Corpora((make_shards(text_file),))
    plan = make_plan(config, build_sampler(config, corpora), corpora.tokenizer, CPU)
    assert warn_of_plan(config, plan, corpora) == []
    monkeypatch.setattr(plan_warnings, "WORTH_CHECKING_FLOPS", 0.0)
    found = [warning.message for warning in warn_of_plan(config, plan, corpora)]
    assert any("epochs of the" in message for message in found)
    assert any("2,000 are 40% of the 5,000 steps" in message for message in found)
    assert {warning.about for warning in warn_of_plan(config, plan, corpora)} == {"plan"}


def test_what_the_schedule_already_says_is_not_said_twice(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_warnings, "WORTH_CHECKING_FLOPS", 0.0)
    config = make_config(max_steps=50, warmup_steps=100)
    corpora = Corpora((make_shards(text_file),))
    plan = make_plan(config, build_sampler(config, corpora), corpora.tokenizer, CPU)
    assert not any("warmup_steps" in warning.message for warning in warn_of_plan(config, plan, corpora))

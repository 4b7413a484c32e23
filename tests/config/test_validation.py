"""Validation: all problems at once, and every fix that it proposes works."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gptmill.config.errors import ConfigError
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_fields
from gptmill.config.validation import RANGES, check_config, find_problems

COUNTS = (
    "num_layers embd_size num_heads context_length total_batch_size mini_batch_size num_epochs steps_per_epoch "
    "max_steps eval_freq eval_tokens checkpoint_freq keep_checkpoints log_freq"
)


def find(world_size: int = 1, **values: Any) -> list[str]:
    return [str(problem) for problem in find_problems(build_config(RunConfig, values), world_size)]


def read_suggestions(problem: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", problem.rpartition("nearest")[2])]


def test_the_defaults_are_valid() -> None:
    check_config(RunConfig())


@pytest.mark.parametrize(
    ("names", "wrong", "right"),
    [
        (COUNTS, [0, -1], []),
        ("warmup_steps sample_tokens seed weight_decay min_lr", [-1], [0]),
        ("max_lr eps grad_clip", [0.0, -1.0, math.nan], [1.0]),
        ("dropout label_smoothing beta1 beta2", [-0.1, 1.0, math.nan], [0.0, 0.999]),
        ("val_fraction", [1.0, -0.5, math.nan], [0.0, 0.5]),
        ("cache_gb", [0.0, -1.0, math.nan, math.inf, 1e308], [0.001, 1e6]),
        ("run_name", ["", ".", "..", "a/b"], ["a.b", "a b"]),
    ],
)
def test_every_range_is_kept(names: str, wrong: list[Any], right: list[Any]) -> None:
    for name in names.split():
        for value in wrong:
            (problem,) = find(**{name: value})
            assert problem.startswith(f"{name} = {value}: must "), problem
        for value in right:
            assert find(**{name: value}) == []


@pytest.mark.parametrize("name", ["max_lr", "weight_decay", "eps"])
def test_infinity_is_rejected(name: str) -> None:
    assert len(find(**{name: math.inf})) == 1


def test_a_seed_must_fit_into_64_bits() -> None:
    assert find(seed=2**63 - 1) == []
    assert len(find(seed=2**64)) == 1


def test_unset_optional_fields_are_no_problem() -> None:
    assert find(max_steps=None, steps_per_epoch=None, grad_clip=None, run_name=None) == []


def test_all_problems_are_reported_at_once() -> None:
    values = {"num_layers": 0, "dropout": 2.0, "max_lr": -1.0, "run_name": "a/b", "seed": -1, "val_fraction": 7.0}
    with pytest.raises(ConfigError) as caught:
        check_config(build_config(RunConfig, values))
    assert {problem.where.split(" = ")[0] for problem in caught.value.problems} == values.keys()
    assert str(caught.value).startswith("6 problems:\n")


def test_all_conflicts_are_reported_at_once() -> None:
    problems = find(num_heads=5, min_lr=1.0, total_batch_size=1000, eval_tokens=10)
    names = [problem.split(" = ")[0] for problem in problems]
    assert names == ["num_heads", "min_lr", "total_batch_size", "eval_tokens"]


def test_a_lone_problem_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(build_config(RunConfig, {"num_layers": 0}))
    assert str(caught.value) == "num_layers = 0: must be between 1 and 10,000"


@settings(deadline=None)
@given(
    batch=st.integers(1, 10**7),
    micro=st.integers(1, 64),
    window=st.integers(1, 4096),
    world_size=st.integers(1, 64),
)
def test_the_batch_sizes_suggested_are_valid_and_the_nearest(
    batch: int, micro: int, window: int, world_size: int
) -> None:
    quantum = micro * window * world_size
    assume(batch % quantum)
    values = {"mini_batch_size": micro, "context_length": window}
    (problem,) = find(world_size, total_batch_size=batch, **values)
    suggestions = read_suggestions(problem.partition("; or keep it")[0])
    assert problem.startswith(f"total_batch_size = {batch}: ")
    assert len(suggestions) == (2 if batch > quantum else 1)
    for size in suggestions:
        assert find(world_size, total_batch_size=size, **values) == []
        assert abs(size - batch) < quantum


@settings(deadline=None)
@given(width=st.integers(1, 4096), heads=st.integers(1, 512))
def test_the_numbers_of_heads_suggested_divide_and_are_the_nearest(width: int, heads: int) -> None:
    assume(width % heads)
    (problem,) = find(embd_size=width, num_heads=heads)
    suggestions = read_suggestions(problem)
    assert problem.startswith(f"num_heads = {heads}: ")
    assert 1 <= len(suggestions) <= 2
    furthest = max(abs(count - heads) for count in suggestions)
    for count in range(1, width + 1):
        if count in suggestions:
            assert find(embd_size=width, num_heads=count) == []
        elif abs(count - heads) < furthest:
            assert width % count
    assert len(suggestions) == len(set(suggestions))


def test_the_number_of_ranks_counts() -> None:
    fits = {"total_batch_size": 2 * 64, "mini_batch_size": 4, "context_length": 16}
    assert find(2, **fits) == []
    (problem,) = find(3, **fits)
    assert problem.endswith("3 rank(s) = 192 tokens; the nearest are 192")


@pytest.mark.parametrize(("ranks", "fitting"), [(4, 2), (8, 1), (12, None)])
def test_a_batch_for_fewer_ranks_names_the_micro_batch_that_keeps_it(ranks: int, fitting: int | None) -> None:
    fields = {"total_batch_size": 128, "mini_batch_size": 4, "context_length": 16}
    (problem,) = find(ranks, **fields)
    assert problem.endswith("" if fitting is None else f"; or keep it, with --mini_batch_size {fitting}")
    assert ("or keep it" in problem) == (fitting is not None)
    if fitting is not None:
        assert find(ranks, **fields | {"mini_batch_size": fitting}) == []


def test_a_wrong_field_hides_no_conflict_between_others() -> None:
    assert len(find(dropout=1.5, num_heads=7, min_lr=1.0, total_batch_size=1000)) == 4


def test_a_conflict_with_a_wrong_field_is_not_reported_twice() -> None:
    assert len(find(num_heads=0, context_length=0)) == 2


def test_every_number_has_a_range() -> None:
    limited = {name for limit in RANGES for name in limit.names.split()}
    numbers = {field.name for field in list_fields(RunConfig) if field.kind in (int, float)}
    assert numbers <= limited


@pytest.mark.parametrize(
    ("values", "field", "part"),
    [
        ({"mixture": "data/a"}, "mixture", "FOLDER=WEIGHT"),
        ({"mixture": "data/a=1,"}, "mixture", "FOLDER=WEIGHT"),
        ({"mixture": "=1"}, "mixture", "FOLDER=WEIGHT"),
        ({"mixture": "data/a=0"}, "mixture", "positive"),
        ({"mixture": "data/a=-1"}, "mixture", "positive"),
        ({"mixture": "data/a=1e999999999"}, "mixture", "positive"),
        ({"mixture": "data/a=nan"}, "mixture", "positive"),
        ({"mixture": "data/a=1,data/a=2"}, "mixture", "twice"),
        ({"mixture": "data/a=1", "data_dir": "data/b"}, "mixture", "data_dir = data/b"),
        ({"mixture": "data/a=1", "corpus": "b.txt"}, "mixture", "corpus = b.txt"),
        ({"documents": "whole", "order": "shards"}, "order", "documents = whole"),
        ({"documents": "whole", "order": "curriculum"}, "order", "documents = whole"),
        ({"documents": "whole", "context_warmup": "256:5"}, "context_warmup", "documents = whole"),
        ({"documents": "whole", "shift_windows": True}, "shift_windows", "documents = whole"),
        ({"context_warmup": "256"}, "context_warmup", "TOKENS:STEP"),
        ({"context_warmup": "0:5"}, "context_warmup", "TOKENS:STEP"),
        ({"context_warmup": "256:500,512:500"}, "context_warmup", "steps must increase"),
        ({"context_warmup": "300:500"}, "context_warmup", "300 tokens"),
        ({"score": "a/b"}, "score", "plain name"),
    ],
)
def test_invalid_data_options_are_rejected(values: dict[str, Any], field: str, part: str) -> None:
    (problem,) = find(**values)
    assert problem.startswith(f"{field} = {values[field]}: ")
    assert part in problem


@pytest.mark.parametrize(
    "values",
    [
        {"mixture": "data/a=0.7, data/b=3"},
        {"mixture": "a=b=1"},
        {"context_warmup": "256:500, 512:1500"},
        {"context_warmup": "1:1"},
        {"documents": "masked", "order": "shards", "context_warmup": "512:10"},
        {"documents": "whole"},
    ],
)
def test_valid_data_options_are_accepted(values: dict[str, Any]) -> None:
    assert find(**values) == []

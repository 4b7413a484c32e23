"""Flags: one spelling rule, typed values, and every mistake of a command line in one answer."""

from __future__ import annotations

from typing import Any

import pytest

from gptmill.cli.flags import Command, Parsed
from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config import schema
from gptmill.config.errors import ConfigError, UserError
from gptmill.config.requests import StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import list_fields

TRAIN = Command("train", "[RECIPE]", "Trains.", (StartOptions, RunConfig))
SAMPLE = Command("sample", "RUN", "Samples.", (SampleRequest,))


def parse(line: str, command: Command = TRAIN) -> Parsed:
    return command.parse(line.split())


def explain(line: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(line)
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "--total_batch_size 64 --max_lr 1e-3",
        "--total-batch-size 64 --max-lr 1e-3",
        "--total_batch-size=64 --max-lr=1e-3",
        "--total-batch-size 1 --total_batch_size 64 --max_lr=0.001",
    ],
)
def test_underscore_dash_space_and_equals_mean_the_same(line: str) -> None:
    assert parse(line).values == {"total_batch_size": 64, "max_lr": 1e-3}


def test_flags_alone_are_enough() -> None:
    assert parse("--seed 3") == Parsed([], {"seed": 3})
    assert parse("") == Parsed([], {})


@pytest.mark.parametrize("line", ["demo --seed 3 --compile", "--seed 3 demo --compile", "--compile --seed 3 demo"])
def test_words_may_stand_anywhere(line: str) -> None:
    assert parse(line) == Parsed(["demo"], {"seed": 3, "compile": True})


def test_a_value_is_left_as_the_user_wrote_it() -> None:
    values = TRAIN.parse(["--sample-prompt=--a-b=c", "--run_name", "my-run", "--corpus", "- a list"]).values
    assert values == {"sample_prompt": "--a-b=c", "run_name": "my-run", "corpus": "- a list"}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--compile", {"compile": True}),
        ("--no_compile", {"compile": False}),
        ("--no-use-tensorboard", {"use_tensorboard": False}),
        ("--compile --no-compile", {"compile": False}),
        ("--force-cpu", {"force_cpu": True}),
        ("--grad_clip none", {"grad_clip": None}),
        ("--compile=1 --bias=0", {"compile": True, "bias": False}),
        ("--compile=YES --bias=no", {"compile": True, "bias": False}),
        ("--compile=on --bias=off", {"compile": True, "bias": False}),
        ("--compile True --bias false --seed 1", {"compile": True, "bias": False, "seed": 1}),
        ("--no_compile=true --no-bias=0", {"compile": False, "bias": True}),
        ("--force-cpu=false", {"force_cpu": False}),
        ("--min_lr -1", {"min_lr": -1.0}),
        ("--min_lr -0.5", {"min_lr": -0.5}),
    ],
)
def test_switches_and_unusual_values(line: str, values: dict[str, Any]) -> None:
    assert parse(line).values == values


def test_a_negative_number_with_an_exponent_is_a_value_and_not_a_flag() -> None:
    assert parse("--min_lr -1e-3").values == {"min_lr": -1e-3}


def test_flags_are_not_abbreviated() -> None:
    assert "--total_batch: unknown flag" in explain("--total_batch 64")


def test_unknown_flags_are_all_listed_with_the_nearest() -> None:
    message = explain("demo --num-layer 3 --max_lrr=1 --zzzzzz -x")
    assert "--num_layer: unknown flag (did you mean --num_layers?)" in message
    assert "--max_lrr: unknown flag (did you mean --max_lr?)" in message
    assert "--zzzzzz: unknown flag\n" in message
    assert "-x: unknown flag" in message
    assert message.startswith("4 problems:")


def test_unknown_flags_and_bad_values_come_in_one_answer() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--num_layerz 3 --seed x --max_lr=fast --device gpu")
    lines = [str(problem) for problem in caught.value.problems]
    assert lines == [
        "--num_layerz: unknown flag (did you mean --num_layers?)",
        "--seed x: expected a whole number",
        "--max_lr fast: expected a number such as 3e-4",
        "--device gpu: expected one of auto, cuda, mps, cpu",
    ]


def test_a_switch_with_another_value_says_what_it_takes() -> None:
    message = explain("--compile=maybe --no_bias= --seed x")
    assert "--compile=maybe: expected true or false; --compile alone is true, --no_compile is false" in message
    assert "--bias=: expected true or false" in message
    assert "--seed x: expected a whole number" in message


def test_a_flag_of_other_software_names_ours() -> None:
    message = explain("demo --lr 3e-4 --n-layer=3")
    assert "--lr: unknown flag; gptmill calls it --max_lr" in message
    assert "--n_layer: unknown flag; gptmill calls it --num_layers" in message


@pytest.mark.parametrize("line", ["--seed", "--seed --compile", "demo --seed"])
def test_a_missing_value_names_its_flag(line: str) -> None:
    message = explain(line)
    assert "--seed" in message
    assert "gptmill train --help" in message


@pytest.mark.parametrize(("line", "fits"), [("", False), ("a", True), ("a b", False)])
def test_the_number_of_words_is_checked_and_the_form_shown(line: str, fits: bool) -> None:
    words = parse(line, SAMPLE).words
    if fits:
        SAMPLE.check_words(words, 1, 1)
    else:
        with pytest.raises(UserError, match=r"the usage is gptmill sample RUN \[flags\]"):
            SAMPLE.check_words(words, 1, 1)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_only_help_reads_the_texts_of_the_flags(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes longer than all else in the parsing of a command line."""
    texts = dict.fromkeys((field.name for field in list_fields(RunConfig)), "One text.")
    asked: list[type] = []
    monkeypatch.setattr(schema, "_read_docstrings", lambda owner: asked.append(owner) or texts)
    parse("demo --seed 3")
    assert not asked
    with pytest.raises(SystemExit):
        Command("train", "[RECIPE]", "Trains.", (RunConfig,)).parse([flag])
    assert capsys.readouterr().out.count("One text.") == len(asked) == len(list_fields(RunConfig))


def test_help_shows_the_defaults_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        TRAIN.parse(["--help"], {"num_layers": 77, "max_lr": 0.25})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Number of transformer blocks (n_layer). [77]" in text
    assert "Peak learning rate, after warm-up. [0.25]" in text
    assert "Hidden size (n_embd, d_model). [768]" in text


def test_a_wrong_flag_does_not_make_the_verb_s_own_options_unknown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe_call("train", "", StartOptions, ["demo", "--resume", "latest", "--max_stepz", "5"])
    assert [problem.where for problem in caught.value.problems] == ["--max_stepz"]

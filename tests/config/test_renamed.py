"""Former names of options: accepted in recipes, flags and checkpoints, shown nowhere, never mixed with the new name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptmill.cli.flags import Command
from gptmill.cli.main import run_guarded
from gptmill.config.errors import ConfigError, UserError
from gptmill.config.recipes import load_recipe, make_config
from gptmill.config.renamed import RENAMED_CHOICES, RENAMED_FIELDS
from gptmill.config.requests import StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import list_fields, list_values
from gptmill.config.serialization import dump_toml
from gptmill.config.settings import read_settings

TRAIN = Command("train", "[RECIPE]", "Trains.", (StartOptions, RunConfig))
SAMPLE = Command("sample", "RUN", "Samples.", (SampleRequest,), aliases={"step": "checkpoint"})
OLD_RECIPE = """\
[data]
read_ahead = 2
[model]
feed_forward = "moe"
balance_loss = 0.5
extra_heads = 1
[training]
context_stages = "256:500"
batch_stages = "65536:10"
[checkpoints]
copy_to = "s3://bucket/runs"
copy_tiers = "latest"
[guard]
guard = "heal"
"""
NEW_VALUES = {
    "prefetch_batches": 2,
    "router_aux_loss": 0.5,
    "mtp_heads": 1,
    "context_warmup": "256:500",
    "batch_size_warmup": "65536:10",
    "mirror_to": "s3://bucket/runs",
    "mirror_tiers": "latest",
    "guard": "rollback",
}


def test_every_former_name_leads_to_a_field_and_is_free() -> None:
    fields = {field.name: field for field in list_fields(RunConfig)}
    assert RENAMED_FIELDS.keys().isdisjoint(fields)
    assert set(RENAMED_FIELDS.values()) <= fields.keys()
    for (name, former), choice in RENAMED_CHOICES.items():
        assert choice in fields[name].choices
        assert former not in fields[name].choices


def test_a_recipe_with_former_names_loads_under_the_current_ones(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD_RECIPE, encoding="utf-8")
    assert load_recipe(str(path)) == {"feed_forward": "moe", **NEW_VALUES}
    assert NEW_VALUES.items() <= list_values(make_config(str(path), {})).items()


def test_a_recipe_may_override_a_former_name_of_the_one_it_extends(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("[data]\nread_ahead = 2\n", encoding="utf-8")
    path = tmp_path / "new.toml"
    path.write_text('extends = "old.toml"\n[data]\nprefetch_batches = 4\n', encoding="utf-8")
    assert load_recipe(str(path)) == {"prefetch_batches": 4}


@pytest.mark.parametrize("line", ["--read_ahead 2 --guard heal", "--read-ahead=2 --guard=heal"])
def test_former_flags_and_choices_are_accepted(line: str) -> None:
    assert TRAIN.parse(line.split()).values == {"prefetch_batches": 2, "guard": "rollback"}


def test_settings_of_an_old_checkpoint_are_read() -> None:
    saved = {"read_ahead": 2, "guard": "heal", "copy_to": None, "num_layers": 3}
    assert read_settings(RunConfig, saved, "checkpoint x") == {
        "prefetch_batches": 2,
        "guard": "rollback",
        "mirror_to": None,
        "num_layers": 3,
    }
    with pytest.raises(UserError, match=r"checkpoint x is damaged: read_ahead and prefetch_batches"):
        read_settings(RunConfig, {"read_ahead": 2, "prefetch_batches": 2}, "checkpoint x")


def test_two_names_of_one_option_in_a_recipe_are_rejected_together_with_all_other_problems(tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    text = "[data]\nprefetch_batches = 3\nread_ahead = 2\n[model]\nnum_layer = 3\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert [str(problem).removeprefix(f"{path}: ") for problem in caught.value.problems] == [
        "[data] prefetch_batches and read_ahead: are two names of the same option; keep prefetch_batches only",
        "[model] num_layer: unknown key (did you mean num_layers?)",
    ]


@pytest.mark.parametrize("line", ["--read_ahead 2 --prefetch-batches 2", "--read-ahead=2 --prefetch_batches=3"])
def test_two_names_of_one_option_on_the_command_line_are_rejected(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TRAIN.parse(line.split())
    assert str(caught.value) == (
        "--read_ahead and --prefetch_batches: are two names of the same option; keep --prefetch_batches only"
    )


def test_two_names_of_one_option_are_reported_with_unknown_flags_and_bad_values() -> None:
    with pytest.raises(ConfigError) as caught:
        TRAIN.parse("--copy_to a --mirror_to b --num_layer 3 --seed x".split())
    assert len(caught.value.problems) == 3


def test_an_alias_of_a_verb_is_a_second_name_too() -> None:
    assert SAMPLE.parse(["--step", "5"]).values == {"checkpoint": "5"}
    with pytest.raises(ConfigError, match="--step and --checkpoint: are two names of the same option"):
        SAMPLE.parse(["--step", "5", "--checkpoint", "best"])


def test_a_repeated_flag_takes_the_last_value() -> None:
    assert TRAIN.parse("--read_ahead 1 --read-ahead 2".split()).values == {"prefetch_batches": 2}


def test_config_show_prints_current_names_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD_RECIPE, encoding="utf-8")
    assert run_guarded(["config", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} = " in shown for name in NEW_VALUES)
    assert not any(name in shown for name in (*RENAMED_FIELDS, *(former for _, former in RENAMED_CHOICES)))
    assert dump_toml(make_config(str(path), {}), comments=True) in shown

"""The schema: fields are documented and unique, and raw values become typed ones or an error."""

from __future__ import annotations

from typing import Any

import pytest

from gptmill.config.model import LinearScaling, Moe, Rope
from gptmill.config.requests import PrepareRequest, PresetOptions, StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import build_config, find_inapplicable, list_fields, list_values, merge_values, parse_value

FIELDS = {field.name: field for field in list_fields(RunConfig)}
ALL_CLASSES = [RunConfig, StartOptions, PresetOptions, PrepareRequest, SampleRequest]


def test_field_names_are_unique_across_sections_and_launch_options() -> None:
    names = [field.name for config in (RunConfig, StartOptions, PresetOptions) for field in list_fields(config)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("config", ALL_CLASSES)
def test_every_field_has_a_docstring_and_a_titled_section(config: type) -> None:
    for field in list_fields(config):
        assert field.help.endswith("."), field.name
        assert "\n" not in field.help, field.name
        assert field.section_title, field.name


@pytest.mark.parametrize("config", ALL_CLASSES)
def test_every_default_is_a_value_of_its_field(config: type) -> None:
    for field in list_fields(config):
        if field.default is None:
            assert field.optional, field.name
        else:
            assert parse_value(field, field.default) == field.default
            assert type(field.default) is field.kind, field.name


def test_build_config_and_list_values_are_inverse() -> None:
    values = list_values(RunConfig()) | {"num_layers": 3, "run_name": "x", "grad_clip": None, "compile": True}
    config = build_config(RunConfig, values)
    assert list_values(config) == values
    assert config.model.num_layers == 3
    assert config.machine.compile is True


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("num_layers", "12", 12),
        ("num_layers", 12, 12),
        ("total_batch_size", "524_288", 524288),
        ("max_lr", "3e-4", 3e-4),
        ("max_lr", 1, 1.0),
        ("compile", True, True),
        ("compile", "False", False),
        ("tokenizer", "char", "char"),
        ("grad_clip", "none", None),
        ("max_steps", "None", None),
        ("sample_prompt", "none", "none"),
        ("sample_prompt", "", ""),
    ],
)
def test_a_valid_value_gets_its_type(name: str, raw: object, value: Any) -> None:
    parsed = parse_value(FIELDS[name], raw)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("num_layers", 12.0, "a whole number"),
        ("num_layers", "12.5", "a whole number"),
        ("num_layers", "5e5", "a whole number"),
        ("num_layers", "twelve", "a whole number"),
        ("num_layers", True, "a whole number"),
        ("num_layers", [12], "a whole number"),
        ("num_layers", "none", "a whole number"),
        ("max_lr", "fast", "a number"),
        ("max_lr", False, "a number"),
        ("max_lr", {}, "a number"),
        ("compile", 1, "true or false"),
        ("compile", "yes", "true or false"),
        ("sample_prompt", 3, "text"),
        ("device", "gpu", "auto, cuda, mps, cpu"),
        ("device", ["cpu"], "auto, cuda, mps, cpu"),
        ("tokenizer", 2, "text"),
    ],
)
def test_an_invalid_value_is_rejected_with_what_was_expected(name: str, raw: object, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse_value(FIELDS[name], raw)
    assert expected in str(caught.value)


def test_a_number_too_large_for_its_type_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected a number"):
        parse_value(FIELDS["max_lr"], 10**400)


def test_fields_are_listed_in_sections_that_do_not_interleave() -> None:
    sections = [field.section for field in list_fields(RunConfig)]
    assert sections == sorted(sections, key=sections.index)


def test_a_union_is_a_choice_followed_by_the_fields_of_its_variants() -> None:
    assert FIELDS["feed_forward"].choices == ("gelu", "relu2", "swiglu", "moe")
    assert FIELDS["feed_forward"].default == "gelu"
    names = list(FIELDS)
    assert names.index("num_experts") > names.index("feed_forward")
    assert names.index("rope_factor") > names.index("rope_scaling") > names.index("positions")
    assert {FIELDS[name].section for name in ("feed_forward", "num_experts", "rope_factor")} == {"model"}
    assert FIELDS["num_experts"].section_title == FIELDS["num_layers"].section_title


def test_the_selected_variant_is_built_and_listed_as_values() -> None:
    values = {
        "feed_forward": "moe",
        "num_experts": 5,
        "positions": "rope",
        "rope_scaling": "linear",
        "rope_factor": 3.0,
    }
    config = build_config(RunConfig, values)
    assert config.model.feed_forward == Moe(num_experts=5)
    assert config.model.positions == Rope(rope_scaling=LinearScaling(rope_factor=3.0))
    assert values.items() <= list_values(config).items()
    assert build_config(RunConfig, list_values(config)) == config
    assert "num_experts" not in list_values(RunConfig())


def test_values_of_variants_that_are_not_selected_are_found() -> None:
    inapplicable = find_inapplicable(
        RunConfig, {"num_experts": 4, "rope_factor": 2.0, "schedule": "constant", "min_lr": 0.1}
    )
    assert inapplicable == {
        "num_experts": [("feed_forward", "moe")],
        "rope_factor": [("rope_scaling", "linear"), ("rope_scaling", "llama3")],
        "min_lr": [("schedule", "cosine"), ("schedule", "linear"), ("schedule", "wsd")],
    }


def test_selecting_another_variant_drops_the_values_of_the_first() -> None:
    base = {"feed_forward": "moe", "num_experts": 4, "ffn_size": 32, "num_layers": 3}
    assert merge_values(RunConfig, base, {"feed_forward": "swiglu"}) == {
        "feed_forward": "swiglu",
        "ffn_size": 32,
        "num_layers": 3,
    }
    assert merge_values(RunConfig, base, {"num_layers": 5})["num_experts"] == 4
    # Values that were inapplicable before, or come with the change, stay and are reported.
    assert "min_lr" in merge_values(RunConfig, {}, {"schedule": "constant", "min_lr": 0.1})

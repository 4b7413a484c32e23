"""What rank 0 resolves arrives on the other ranks as it was: any config, what to resume, and the time that is left."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gptmill.api.configuration import parse_fields
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.runs.directory import RunDirectory
from gptmill.training.launch import Call, _decode, _encode, make_launch
from gptmill.training.run_request import RunRequest


def send(request: RunRequest) -> RunRequest:
    """Through JSON, as the store does."""
    return _decode(json.loads(json.dumps(_encode(request))))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"feed_forward": "moe", "num_experts": 4, "optimizer": "muon", "schedule": "wsd"},
        {"mixture": "a=0.7,b=0.3", "corpus": None, "documents": "masked", "sample_prompt": "ein Prüf\ntext"},
        {"batch_size_warmup": "1024:10", "total_batch_size": 8192, "mini_batch_size": 1, "context_length": 512},
        {"precision": "bf16", "ema_decay": 0.99, "early_stop_patience": 3, "hang_factor": None},
    ],
    ids=["demo", "experts", "mixture", "warm-up", "options"],
)
def test_any_config_arrives_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    request = make_launch(Call("demo", parse_fields("demo", fields), StartOptions()))
    assert request.config.tracking.run_name
    assert send(request) == request


def test_what_to_resume_and_the_time_left_arrive_too() -> None:
    request = make_launch(Call("demo", {"run_name": "r"}, StartOptions(time_limit="1h")))
    resumed = RunRequest(
        request.config,
        RunDirectory(Path("runs/r")),
        "best",
        Path("other/checkpoints/step_000010"),
        ("max_steps: 5 -> 6",),
        allows_changes=True,
        deadline=time.monotonic() + 100,
    )
    sent = send(resumed)
    assert (sent.resumed, sent.wanted, sent.parent) == (resumed.resumed, resumed.wanted, resumed.parent)
    assert (sent.changes, sent.allows_changes) == (resumed.changes, True)
    assert sent.deadline == pytest.approx(resumed.deadline, abs=5.0)


def test_what_was_given_is_known_by_the_names_of_the_flags() -> None:
    given = Call("demo", {"max_lr": 0.1, "corpus": None}, StartOptions(resume="auto"), PresetOptions(size="x"))
    found = given.list_given()
    assert found.items() >= {"RECIPE": "demo", "max_lr": "0.1", "resume": "auto", "size": "x"}.items()
    assert "corpus" not in found

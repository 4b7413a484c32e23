"""What takes long says so; what does not is silent."""

from __future__ import annotations

import time

import pytest

from gptmill.runs import slow_notice
from gptmill.runs.slow_notice import say_if_slow


def test_a_slow_body_is_announced_and_again_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow_notice, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(slow_notice, "REPEAT_SECONDS", 0.02)
    said = ""
    with say_if_slow("compiling"):
        deadline = time.monotonic() + 30
        while said.count("compiling (0 s so far)") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().out
    assert said.count("compiling (0 s so far)\n") >= 2


def test_a_quick_body_is_silent_even_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), say_if_slow("compiling"):
        raise KeyError
    assert capsys.readouterr().out == ""

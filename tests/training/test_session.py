"""What a run says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import TINY_FLAGS

import gptmill.training.session
from gptmill.cli.main import run_guarded
from gptmill.config.run import CompileMode, MachineConfig
from gptmill.training.provenance import describe_compiling


@pytest.mark.parametrize(
    ("is_compiled", "mode", "said"),
    [
        (False, "default", ""),
        (True, "default", "compiled"),
        (True, "max-autotune", "compiled (max-autotune)"),
        (False, "max-autotune", "not compiled: compile_mode max-autotune does nothing without --compile"),
    ],
)
def test_it_says_whether_and_how_it_is_compiled(is_compiled: bool, mode: CompileMode, said: str) -> None:
    assert describe_compiling(MachineConfig(compile=is_compiled, compile_mode=mode)) == said


def test_whatever_may_be_slow_at_the_start_is_announced_and_nothing_later(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = []

    @contextmanager
    def note(doing: str) -> Iterator[None]:
        announced.append(doing)
        yield

    monkeypatch.setattr(gptmill.training.session, "say_if_slow", note)
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["train", *words, *TINY_FLAGS, "--max_steps", "4"]) == 0
    assert announced == ["trying 4 x 16 tokens", "evaluating step 0", "training step 1", "training step 2"]

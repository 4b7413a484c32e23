"""The doctor's table: signs that the terminal has, the fix below what fails, and a sentence at the end."""

from __future__ import annotations

import io
import sys

import pytest

from gptmill.cli.doctor import make_table
from gptmill.experiments.doctor.finding import Finding

FINDINGS = [
    Finding("software", "torch", "ok", "2.13.0", fix="not shown"),
    Finding("GPU", "driver", "failed", "535.54", "too old for torch's CUDA", "pip install " + "x" * 90),
    Finding("GPU", "fp8 matmul", "skipped", "needs capability 8.9"),
    Finding("disk", "speed", "warning", "5 MB/s"),
]


@pytest.mark.parametrize(("encoding", "signs"), [("utf-8", "✓✗–!"), ("ascii", "oX-!")])
def test_the_table(encoding: str, signs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    lines = make_table(FINDINGS, 80)
    assert [line[2] for line in lines if line.startswith("  ") and line[2] != " "] == list(signs)
    text = "\n".join(lines)
    text.encode(encoding)
    assert "not shown" not in text
    assert "x" * 90 in text  # a command stays whole
    assert lines[-1] == "Training will not work here: driver."
    assert make_table(FINDINGS[2:], 80)[-1] == "Training will work here; 1 warning."
    assert make_table(FINDINGS[:1], 80)[-1] == "Training will work here."

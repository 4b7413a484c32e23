"""The compute part of a plan against what was measured on H200s: the figures of docs/performance.md and
docs/benchmarks.md."""

from __future__ import annotations

import re

import pytest
from conftest import PROJECT

import gptmill
from gptmill.training import time_estimate

RECIPES = {"124M": "gpt2-124m", "350M": "gpt2-350m", "774M": "gpt2-774m", "1.5B": "gpt2-1.5b"}
CONTEXT = {"custom-300m-modern": 2048}
ROW = re.compile(r"^\| (\S+) (bf16|fp8) \| (\d+) \| ([\d,]+) \|", re.MULTILINE)
PEER_ROW = re.compile(r"^\| gptmill, (bf16|fp8) \| ([\d,; ]+) \|", re.MULTILINE)


def read(page: str) -> str:
    return (PROJECT / "docs" / page).read_text(encoding="utf-8")


def predict(name: str, precision: str, windows: int) -> float:
    """Tokens per second of one H200."""
    recipe = RECIPES.get(name, name)
    batch = windows * CONTEXT.get(recipe, 1024)
    plan = gptmill.plan(
        recipe, gpu="H200", precision=precision, mini_batch_size=windows, total_batch_size=batch, corpus_tokens=1e10
    )
    assert plan.time is not None
    return plan.time.tokens_per_second


def list_measured() -> list[tuple[str, str, int, float]]:
    rows = ROW.findall(read("performance.md"))
    assert len(rows) == 10
    return [(name, precision, int(size), float(speed.replace(",", ""))) for name, precision, size, speed in rows]


def test_every_size_is_predicted_within_a_percent() -> None:
    """Most of these figures are those that the estimate interpolates."""
    for name, precision, size, measured in list_measured():
        assert predict(name, precision, size) == pytest.approx(measured, rel=0.01), f"{name} {precision}"


def test_other_h200s_are_predicted_within_three_percent() -> None:
    found = [
        (precision, speed) for precision, cell in PEER_ROW.findall(read("benchmarks.md")) for speed in cell.split(";")
    ]
    assert len(found) == 10
    predicted = {precision: predict("124M", precision, 64) for precision in ("bf16", "fp8")}
    for precision, speed in found:
        assert predicted[precision] == pytest.approx(float(speed.strip().replace(",", "")), rel=0.03)


def test_sizes_between_measured_ones_are_predicted_within_five_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size from 350M to 1.5B from the others alone."""
    for name, precision, size, measured in list_measured():
        if name not in ("350M", "774M", "1.5B"):
            continue
        curve = dict(time_estimate.MEASURED_MFU[precision])
        own = {"350M": 355e6, "774M": 774e6, "1.5B": 1.56e9}[name]
        del curve[own]
        monkeypatch.setitem(time_estimate.MEASURED_MFU, precision, curve)
        assert predict(name, precision, size) == pytest.approx(measured, rel=0.05), f"{name} {precision}"
        monkeypatch.undo()


def test_small_micro_batches_are_overestimated_by_up_to_twelve_percent() -> None:
    (measured,) = re.findall(r"^\| 124M bf16 by 8 \| 8 \| ([\d,]+) \|", read("performance.md"), re.MULTILINE)
    assert predict("124M", "bf16", 8) == pytest.approx(float(measured.replace(",", "")), rel=0.12)

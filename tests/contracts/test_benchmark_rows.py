"""The rows of the two tables of docs/models.md are runs that gptmill takes, with limits that make sense."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import PROJECT

from gptmill.cli.config import run
from gptmill.runs.events import RunFinished, StepLogged, to_json


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROJECT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for the names of their types
    spec.loader.exec_module(module)
    return module


ARCHITECTURES, PRECISIONS = load("architectures"), load("precisions")
PRECISION_ROWS = [row for group in PRECISIONS.GROUPS.values() for row in group]


@pytest.mark.parametrize("row", ARCHITECTURES.ROWS, ids=lambda row: row.name)
def test_every_architecture_is_a_config(row: tuple[str, ...]) -> None:
    flags = row[1].format(third=100).split()
    assert run(["show", "shakespeare-char-cpu", *ARCHITECTURES.FLAGS, *flags]) == 0


@pytest.mark.parametrize("row", PRECISION_ROWS, ids=lambda row: row.name)
def test_every_precision_is_a_config(row: tuple[str, ...]) -> None:
    assert run(["show", "gpt2-124m", *PRECISIONS.FLAGS, *row[1].split()]) == 0


def test_every_precision_is_compared_with_one_that_comes_before_it() -> None:
    seen: list[str] = []
    for row in PRECISION_ROWS:
        seen.append(row.name)
        assert row.reference in ("", *seen), row.name
    assert len(set(seen)) == len(seen)


def write_run(folder: Path, losses: list[float], *, is_finished: bool = True) -> None:
    folder.mkdir()
    steps = [StepLogged(step, 0.1, loss, 1e-3, 1.0, 1e5, 1.0, memory_gb=2.0) for step, loss in enumerate(losses, 1)]
    end = [RunFinished(len(losses), "finished", 1.0)] if is_finished else []
    (folder / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in [*steps, *end]), encoding="utf-8")


def test_a_deviation_is_the_largest_distance_of_the_smoothed_curves(tmp_path: Path) -> None:
    curve = [5.0 - step / 10 for step in range(40)]
    write_run(tmp_path / "fp32", curve[:20])
    row = next(row for row in PRECISION_ROWS if row.name == "bf16")
    # A step that is off by 1 moves the mean of ten by a tenth; what comes after fp32's last step is not compared.
    write_run(tmp_path / "bf16", [*curve[:12], curve[12] + 1.0, *curve[13:30], *(loss + 9 for loss in curve[30:])])
    result = PRECISIONS.read_result(tmp_path / "bf16")
    assert PRECISIONS.compare(row, result, tmp_path) == pytest.approx(0.1)
    assert result.loss == pytest.approx(sum(curve[30:]) / 10 + 9)
    assert result.memory_gb == 2.0


def test_a_curve_that_is_not_finite_or_has_no_reference_is_no_match(tmp_path: Path) -> None:
    row = next(row for row in PRECISION_ROWS if row.name == "bf16")
    write_run(tmp_path / "bf16", [math.nan] * 30)
    result = PRECISIONS.read_result(tmp_path / "bf16")
    assert math.isnan(PRECISIONS.compare(row, result, tmp_path))
    write_run(tmp_path / "fp32", [5.0] * 20)
    assert math.isnan(PRECISIONS.compare(row, result, tmp_path))


def test_a_run_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    write_run(tmp_path / "fp32", [5.0] * 20, is_finished=False)
    assert PRECISIONS.read_result(tmp_path / "fp32") is None

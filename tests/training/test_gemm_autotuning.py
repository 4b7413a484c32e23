"""The file that remembers the fastest ways to multiply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gptmill.models.kernels.gemm import autotuned
from gptmill.runtime.world import World
from gptmill.training.gemm_autotuning import autotune_run_gemms, find_file, read_autotuned, write_autotuned

pytestmark = pytest.mark.usefixtures("nothing_autotuned")


def test_what_processes_write_is_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "new" / "matmuls.json"
    autotuned["one"] = 3
    write_autotuned(path)
    autotuned.clear()
    autotuned.update({"other": -1, "one": 4})  # which another process uses already
    write_autotuned(path)
    assert read_autotuned(path) == {"one": 3, "other": -1}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps({"one": -2, "two": "x", "three": True, "four": 2.0})])
def test_a_broken_file_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "matmuls.json"
    path.write_text(text, encoding="utf-8")
    assert read_autotuned(path) == {}


def test_without_a_home_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GPTMILL_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", fail)
    assert find_file() is None


def test_nothing_is_timed_or_written_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "cache"))
    with autotune_run_gemms(World(0, 1, torch.device("cpu"))):
        pass
    assert not (tmp_path / "cache").exists()

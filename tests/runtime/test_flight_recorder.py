"""The flight recorder's files are named after the run, unless the user's environment names them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gptmill.runtime.flight_recorder import PATH_VARIABLES, SIZE_VARIABLES, set_up_flight_recorder


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PATH_VARIABLES, *SIZE_VARIABLES, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("version", "number"), [("2.9.1", 1), ("2.10.0", 0), ("2.13.0+cpu", 0)])
def test_the_names_are_those_of_the_torch_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, number: int
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    before = dict(os.environ)
    with set_up_flight_recorder(tmp_path / "rank_"):
        added = {name: value for name, value in os.environ.items() if name not in before}
    assert added == {
        PATH_VARIABLES[number]: str(tmp_path / "rank_"),
        SIZE_VARIABLES[number]: "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert dict(os.environ) == before


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLES[1], "/elsewhere/rank_")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    with set_up_flight_recorder(tmp_path / "rank_"):
        assert PATH_VARIABLES[0] not in os.environ
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ[PATH_VARIABLES[1]] == "/elsewhere/rank_"

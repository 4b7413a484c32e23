"""What torch.compile needs of the machine, found before it is asked for."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from gptmill.runtime.toolchain import find_compile_cache, find_obstacle


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the PATH, and headers that exist."""
    for name in ("CC", "CXX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_INDUCTOR_INSTALL_GXX"):
        monkeypatch.delenv(name, raising=False)
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(include)})
    monkeypatch.setattr("sys.platform", "linux")
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("device", "program"), [("cpu", "g++"), ("cuda", "gcc"), ("cuda", "clang")])
def test_a_missing_compiler_is_the_obstacle_until_it_is_there(tools: Path, device: str, program: str) -> None:
    obstacle = find_obstacle(device)
    assert obstacle
    assert program in obstacle.what
    assert "apt install g++" in obstacle.fix
    put_program(tools, program)
    assert find_obstacle(device) is None


def test_a_compiler_that_a_variable_names_must_exist(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tools, "g++")
    monkeypatch.setenv("CXX", "my-c++ -pthread")
    obstacle = find_obstacle("cpu")
    assert obstacle
    assert "my-c++ -pthread (CXX)" in obstacle.what
    put_program(tools, "my-c++")
    assert find_obstacle("cpu") is None


def test_missing_headers_name_the_package(tools: Path) -> None:
    put_program(tools, "g++")
    (tools.parent / "include" / "Python.h").unlink()
    obstacle = find_obstacle("cpu")
    assert obstacle
    assert "Python.h" in obstacle.what
    assert obstacle.fix.startswith("sudo apt install python3.")


def test_a_cache_that_cannot_be_written_is_an_obstacle(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tools, "g++")
    (tools.parent / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tools.parent / "file" / "cache"))
    obstacle = find_obstacle("cpu")
    assert obstacle
    assert "TORCHINDUCTOR_CACHE_DIR" in obstacle.fix


def test_the_cache_is_the_one_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert os.fspath(find_compile_cache()) == default_cache_dir()

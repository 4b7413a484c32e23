"""A checkpoint of several ranks is opened as if it were whole, by every command; a hostile one in no other way."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from sharding import reshard

import gptmill
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Held, Shard
from gptmill.runs.checkpoints.mirror import Mirror, fetch_checkpoint
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, load_checkpoint, open_checkpoint
from gptmill.runs.checkpoints.tensor_files import write_tensors
from gptmill.runs.comparison import compare_checkpoints
from gptmill.training.initial_source import CheckpointWeights, make_pin, read_source

GROUPS = ("model", "optimizer")


@pytest.fixture
def run(straight: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run `straight`, whose last checkpoint three ranks have saved."""
    monkeypatch.chdir(straight.parent.parent)
    shutil.copytree(straight, "whole", symlinks=True)
    reshard(list_step_folders(straight / "checkpoints")[-1], 3)
    return straight


@pytest.fixture
def path(run: Path) -> Path:
    return list_step_folders(run / "checkpoints")[-1]


def test_every_command_reads_it(run: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {file.name for file in path.glob("model*")} == {f"model.{rank:05d}.safetensors" for rank in range(3)}
    whole = Path("whole")
    assert compare_checkpoints(path, whole / "checkpoints" / path.name).has_same_tensors
    for command in ("verify", "list"):
        assert run_guarded(["checkpoints", command, "straight"]) == 0
    assert f"{path.name}: valid" in capsys.readouterr().out
    texts = [gptmill.load(str(folder), device="cpu").generate("the", max_new_tokens=8) for folder in (run, whole)]
    assert texts[0] == texts[1]


def test_a_new_run_starts_from_its_weights_and_knows_them_again(path: Path) -> None:
    source = read_source(str(path), "runs")
    assert isinstance(source, CheckpointWeights)
    assert source.weights.keys() == load_checkpoint(path, ("model",)).tensors["model"].keys()
    assert read_source(make_pin(source), "runs").sha256 == source.sha256
    reshard(path, 2)
    with pytest.raises(UserError, match="have changed since"):
        read_source(make_pin(source), "runs")


@pytest.mark.usefixtures("memory")
def test_a_mirror_has_all_files_and_gives_them_back(path: Path, tmp_path: Path) -> None:
    mirror = Mirror("memory://mirror", "latest", "straight", tmp_path / "mirrored.txt")
    mirror.offer(path, ["latest"], 40)
    mirror.finish(60)
    mirror.close()
    assert mirror.collect() == []
    fetched = fetch_checkpoint("memory://mirror/straight/latest", tmp_path / "fetched")
    assert find_damage(fetched, thorough=True) == ""
    assert {file.name for file in fetched.iterdir()} == {file.name for file in path.iterdir()}


@pytest.fixture
def memory() -> Iterator[None]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield
    files.store.clear()


# What somebody has made with checksums that fit


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and makes all checksums fit."""
    file = path / "checkpoint.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["sha256"]
    for name in content["files"]:
        if (path / name).exists():
            data = (path / name).read_bytes()
            content["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def replace_shards(path: Path, shards: dict[str, dict[str, Held]]) -> None:
    for name, tensors in shards.items():
        (path / name).unlink()
        write_tensors(path / name, tensors)
    forge(path, lambda _: None)


FIRST, SECOND, THIRD = (f"model.{rank:05d}.safetensors" for rank in range(3))


def drop_from_manifest(path: Path) -> None:
    forge(path, lambda manifest: manifest["files"].pop(SECOND))


def claim_more(path: Path) -> None:
    forge(path, lambda manifest: manifest["files"].update({"model.00003.safetensors": manifest["files"][FIRST]}))


def name_badly(path: Path) -> None:
    forge(path, lambda manifest: manifest["files"].update({"model.3.safetensors": manifest["files"][FIRST]}))


def repeat(path: Path) -> None:
    (path / SECOND).write_bytes((path / FIRST).read_bytes())
    forge(path, lambda _: None)


def truncate(path: Path) -> None:
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-8])
    forge(path, lambda _: None)


def change_dtype(path: Path) -> None:
    replace_shards(path, {THIRD: {"blocks.0.norm1.weight": Shard(torch.zeros(4).half(), (16,), (12,))}})


def claim_huge(path: Path) -> None:
    replace_shards(path, {SECOND: {"x": Shard(torch.zeros(4), (10**12,), (0,))}})


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file that is not there": (lambda path: (path / SECOND).unlink(), "has no model.00001.safetensors"),
    "a shorter file": (lambda path: (path / SECOND).write_bytes(b"short"), "has 5 bytes, not"),
    "a truncated file whose checksum fits": (truncate, "damaged|not a valid safetensors"),
    "shards that overlap": (repeat, "overlap"),
    "a gap": (drop_from_manifest, "elements"),
    "a rank that does not exist": (claim_more, "has no model.00003.safetensors"),
    "a name that is none": (name_badly, "not a plain NAME.safetensors or NAME.RANK.safetensors"),
    "another dtype": (change_dtype, "elements|differ in dtype"),
    "a shape of 10^12": (claim_huge, "elements"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_one_is_refused_in_one_sentence(case: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, expected = HOSTILE[case]
    spoil(path)
    with pytest.raises(UserError, match=expected):
        load_checkpoint(path, GROUPS)
    assert find_damage(path, thorough=True) or case.startswith("a truncated")
    if "bytes" not in expected:
        with pytest.raises(UserError):
            [tensor.read() for tensor in open_checkpoint(path, GROUPS).tensors["model"].values()]
    assert run_guarded(["sample", str(path), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("gptmill: ")
    assert "\n" not in said

"""gptmill plan: what it prints with and without a corpus, a GPU and a probe, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_FLAGS, GptMill

import gptmill as package
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.runs.event_log import read_events
from gptmill.runs.events import CheckpointSaved, EvalDone, RunStarted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The plan as JSON."""
    assert run_guarded(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_of_a_gpu_recipe_needs_neither_gpu_nor_corpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["plan", "custom-300m", "--gpu", "H200", "--gpus", "8", "--corpus_tokens", "12.8e9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:18].strip(): line[18:] for line in lines}
    assert rows["device"] == "8 x H200, fp16"
    assert rows["tokens"].startswith("104.9 B in 100,000 steps of 1,048,576 (8 x 8 x 2,048 on each device), 421 per")
    assert rows["corpus"] == "data/edu_fineweb10B: 12.8 B tokens (as given), 8.19 epochs"
    assert rows["parameters"].startswith("248,912,896: token embedding 51.5 M, positions 2.1 M, blocks 195.3 M")
    assert "weights 1.00, copies 0.50, gradients 1.00, buffers 1.00, optimizer 1.99, activations" in rows["peak memory"]
    assert "assumes an MFU of 44%" in rows["speed"]
    assert "at $3.50 per GPU and hour, a typical price" in rows["cost"]
    assert "8.2 epochs" in lines[-1]
    assert lines[-1].startswith("warning: ")
    assert list(folder.iterdir()) == []


def test_several_gpus_are_planned_with_every_strategy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "gpt2-1.5b --gpus 64 --gpu h100 --nodes 8 --interconnect infiniband --mini_batch_size 8".split()
    assert run_guarded(["plan", *words, "--corpus_tokens", "10e9", "--num_epochs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (links,) = (line for line in lines if line.startswith("8 machines of 8 GPUs: "))
    assert "450 GB/s between GPUs of a machine, 400 GB/s between machines (infiniband)" in links
    for name in ("ddp", "zero1", "fsdp", "hsdp"):
        memory, step = (line for line in lines if line.startswith(f"{name} "))
        assert memory.endswith("fits")
        assert "$" in step
    assert "cheapest that fits: --parallel ddp; the plan above is for it" in lines
    found = plan(capsys, *words, "--corpus_tokens", "10e9", "--num_epochs", "1", "--parallel", "fsdp")
    fsdp = found["strategies"][2]
    assert found["strategy"] == fsdp["strategy"] == "fsdp"
    assert found["memory_bytes"] == fsdp["memory_bytes"]["total"]
    assert found["cost"] == fsdp["cost"]
    assert found["seconds"] == fsdp["time"]["seconds"]
    assert found["links"]["nodes"] == 8
    assert run_guarded(["plan", "gpt2-124m", "--gpus", "8", "--corpus_tokens", "1e9", "--device", "cuda"]) == 0
    assert "name the GPU, e.g. --gpu H100, to learn which is cheapest" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder")
def test_ranks_that_share_layers_are_planned_as_copies(capsys: pytest.CaptureFixture[str]) -> None:
    words = "gpt2-124m --gpus 8 --gpu h100 --tensor_parallel 2 --mini_batch_size 16 --corpus_tokens 1e10".split()
    found = plan(capsys, *words)
    (copies,) = found["strategies"]
    assert found["memory_bytes"] == copies["memory_bytes"]["total"]
    assert copies["sent_bytes"]["all_reduce"] > 0
    assert copies["memory_bytes"]["weights"] < 0.51 * 4 * found["parameters"]["total"]
    assert run_guarded(["plan", *words]) == 0
    assert "--tensor_parallel 2, with 4 copies of the model: the plan above is for it" in capsys.readouterr().out
    assert run_guarded(["plan", *words, "--gpus", "3"]) == 2
    assert "--tensor_parallel 2 takes 2 GPUs or a multiple of them, not 3; add --gpus 2" in capsys.readouterr().err
    found = plan(capsys, *TINY_FLAGS, "--corpus_tokens", "1e6", "--gpus", "2", "--tensor_parallel", "2")
    assert "on a CPU the plan does not know --tensor_parallel 2" in found["warnings"][-1]["message"]


def test_without_a_named_gpu_time_is_unknown_and_the_way_to_know_it_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(["plan", "demo", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "python-stdlib is not prepared: epochs unknown; gptmill prepare python-stdlib --tokenizer byte" in output
    assert "--val_fraction 0.05 --out data/python-stdlib-byte" in output
    assert "unknown; --probe measures it here" in output
    assert list(folder.iterdir()) == []


def test_a_plain_text_gives_an_estimate_of_its_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my.txt").write_text("0123456789" * 1000, encoding="utf-8")
    flags = [*TINY_FLAGS, "--corpus", "my.txt", "--tokenizer", "byte", "--num_epochs", "2"]
    found = plan(capsys, *flags)
    assert found["corpus"] == {"name": "my.txt", "tokens": 9900, "source": "estimated"}
    assert found["steps"] == 2 * (9900 // 16) * 16 // 128
    assert found["time"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt2-124m", "--gpu", "H2000"], "--gpu H2000: not known"),
        (["gpt2-124m", "--gpu", "H200", "--probe"], "measures this machine"),
        (["gpt2-124m", "--probe_steps", "5"], "needs --probe"),
        (["gpt2-124m", "--gpu", "H200", "--mfu", "45"], "mfu = 45.0: must be above 0 and at most 1"),
        (["gpt2-124m", "--gpu", "H200", "--gpus", "3"], "total_batch_size"),
        (["gpt2-124m", "--gpu", "H200", "--gpus", "8", "--nodes", "3"], "nodes = 3: must divide the number of GPUs, 8"),
        (["gpt2-124m", "--gpu", "H200", "--gpus", "8", "--interconnect", "rose"], "(did you mean roce?)"),
        (["--device", "cpu", "--data_dir", "none_here"], "not prepared"),
        (["demo", "--probe", "--device", "cpu"], "prepare it first: gptmill prepare python-stdlib"),
    ],
    ids=["gpu", "both", "unprobed", "mfu", "gpus", "nodes", "network", "endless", "unprepared"],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run_guarded(["plan", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder")
def test_the_figures_of_a_plan_are_those_of_the_run(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """runs/straight was trained by the flags of its own config."""
    found = plan(capsys, str(straight / "config.toml"))
    events = read_events(straight / "events.jsonl")
    (start,) = (event for event in events if isinstance(event, RunStarted))
    saves = [event for event in events if isinstance(event, CheckpointSaved)]
    assert found["steps"] == start.max_steps
    assert found["tokens"] == start.total_tokens
    assert found["parameters"]["total"] == start.parameters
    assert found["flops_per_token"] == start.flops_per_token
    assert found["corpus"]["source"] == "prepared"
    assert found["counts"]["evaluations"] == sum(isinstance(event, EvalDone) for event in events)
    assert found["counts"]["saves"] >= len(saves)
    assert found["counts"]["kept_checkpoints"] >= len(list((straight / "checkpoints").glob("step_*")))
    assert found["counts"]["checkpoint_bytes"] == pytest.approx(
        saves[-1].size_bytes, rel=0.35
    )  # headers are large here
    assert found["free_disk_bytes"] > 0


def test_a_probe_measures_here_and_leaves_nothing(gptmill: GptMill, words: list[str], tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, *words, "--max_steps", "1000", "--probe", "--probe_steps", "3", "--price_per_hour", "0.5"]
    found = json.loads(gptmill("plan", *flags, "--json").stdout)
    assert found["seconds"] == pytest.approx(sum(found["time"][part] for part in PARTS))
    assert found["time"]["training"] == pytest.approx(1000 * found["probe"]["step_seconds"])
    assert found["memory_bytes"] == found["probe"]["peak_memory_bytes"]
    assert found["cost"] == pytest.approx(found["seconds"] / 3600 * 0.5)
    assert "measured by a probe on CPU" in found["time"]["basis"]
    assert not (tmp_path / "runs").exists()


PARTS = ("training", "evaluation", "checkpoints", "startup")


@pytest.mark.usefixtures("folder")
def test_python_plans_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = package.plan("gpt2-124m", gpu="A100 80GB", gpus=8, corpus_tokens=10e9, num_epochs=1)
    printed = plan(
        capsys, "gpt2-124m", "--gpu", "A100 80GB", "--gpus", "8", "--corpus_tokens", "10e9", "--num_epochs", "1"
    )
    assert json.loads(json.dumps(found.to_dict())) == printed
    assert found.warnings == ()
    assert found.cost == pytest.approx(found.to_dict()["seconds"] / 3600 * 8 * 1.80)
    config = package.make_config("gpt2-124m", num_epochs=1)
    assert package.plan(config, gpu="A100 80GB", gpus=8, corpus_tokens=10e9).to_dict() == found.to_dict()
    with pytest.raises(UserError, match="change the RunConfig itself"):
        package.plan(config, num_epochs=2)


@pytest.mark.usefixtures("folder")
def test_on_a_cpu_a_run_is_held_against_the_memory_that_is_free(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gptmill train does, and in its words; a named GPU is held against its own memory."""
    free = 10**9
    monkeypatch.setattr("gptmill.training.planned_machine.read_available_memory", lambda: free)
    words = "demo --device cpu --mini_batch_size 128 --total_batch_size 12288 --corpus_tokens 1e9".split()
    found = plan(capsys, *words)
    assert found["available_memory_bytes"] == free < found["device_memory_bytes"]
    (message,) = (each["message"] for each in found["warnings"] if each["about"] == "memory")
    assert message.startswith("gptmill train would refuse this run now: out of memory on cpu: one micro-batch of")
    assert "but 1.0 GB are available; --mini_batch_size 64 would fit" in message
    assert run_guarded(["plan", *words, "--mini_batch_size", "64"]) == 0
    printed = capsys.readouterr().out
    assert " of 1.0 GB that are free now" in printed
    assert "would refuse" not in printed
    named = plan(capsys, *words, "--gpu", "H200")
    assert named["available_memory_bytes"] is None
    assert not [each for each in named["warnings"] if each["about"] == "memory"]

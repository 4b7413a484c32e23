"""Poisoned data and broken gradients: the run heals, says so, and a kill around it changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_FLAGS, RunRanks, run_forked
from torch import Tensor
from zygote import Zygote

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.models.gpt import GPT
from gptmill.models.language_model import Losses
from gptmill.runs.checkpoints.storage import load_checkpoint
from gptmill.training.metrics import Metrics
from gptmill.training.step import StepStats

pytestmark = pytest.mark.slow

STEPS = 160
LONG = 300  # after which runs that differ in their seed alone are 0.2 apart
NOISE = 0.2
POISON = 0xC3  # the first byte of every accented letter, of which the clean text has none
RUN = [
    *TINY_FLAGS, "--max_lr", "0.01", "--dropout", "0.1", "--guard_window", "32", "--checkpoint_freq", "20",
    "--eval_freq", "80", "--eval_tokens", "2000", "--sample_tokens", "0", "--snapshot_freq", "10",
    "--num_layers", "1", "--mini_batch_size", "8",
]  # fmt: skip


def write_corpora(folder: Path) -> None:
    """`clean`, and `poisoned` with a stretch of another alphabet in its training part."""
    generator = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    text = " ".join(generator.choice(words) for _ in range(6000))
    noise = "".join(chr(generator.randint(0xC0, 0xFF)) for _ in range(8))
    for name, content in (("clean", text), ("poisoned", text[:9000] + noise + text[9000:])):
        source = folder / f"{name}.txt"
        source.write_text(content, encoding="utf-8")
        request = PrepareRequest(out=str(folder / name), tokenizer="byte", val_fraction=0.1)
        prepare_corpus([str(source)], request, lambda _progress: None)


@pytest.fixture(autouse=True)
def _corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpora(tmp_path)


@pytest.fixture(scope="module")
def usual_val_loss(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> float:
    """That of a long run that nothing has spoiled."""
    folder = tmp_path_factory.mktemp("well")
    write_corpora(folder)
    flags = ["--data_dir", "poisoned", "--max_steps", str(LONG), "--run_name", "well"]
    run_forked(["train", *RUN, *flags], folder, zygote)
    return read_val_loss(folder / "runs/well")


def train(name: str, *flags: str, steps: int = STEPS) -> int:
    return run_guarded(["train", *RUN, "--max_steps", str(steps), "--run_name", name, *flags])


def read_entries(name: str, kind: str) -> list[dict[str, Any]]:
    lines = Path(f"runs/{name}/ledger.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == kind]


def read_val_loss(run: Path) -> float:
    lines = (run / "log.txt").read_text().splitlines()
    return float([line for line in lines if " val " in line][-1].split()[-1])


def assert_same_end(one: str, other: str) -> None:
    for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
        assert Path(f"runs/{one}/{name}").read_bytes() == Path(f"runs/{other}/{name}").read_bytes(), name
    assert not [entry for name in (one, other) for entry in read_entries(name, "Warned") if entry["about"] == "logs"]


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiplies the loss of training batches that hold poison."""
    forward = GPT.forward

    def spoiled(self: GPT, tokens_BT: Tensor, *arguments: Any, **named: Any) -> Losses:
        losses = forward(self, tokens_BT, *arguments, **named)
        # Random tokens hold some too, and are nobody's data.
        is_poisoned = self.training and (tokens_BT == POISON).float().mean() > 0.03
        return multiply(losses, factor) if is_poisoned else losses

    monkeypatch.setattr(GPT, "forward", spoiled)


def multiply(losses: Losses, factor: float) -> Losses:
    return losses._replace(objective=losses.objective * factor, cross_entropy=losses.cross_entropy * factor)


def break_off(monkeypatch: pytest.MonkeyPatch, occasions: list[int]) -> None:
    """Ends the process, so to speak, when a step is done for the first time in it: nothing is saved or said."""
    push = Metrics.push

    def broken(self: Metrics, stats: StepStats) -> None:
        push(self, stats)
        if occasions and stats.step == occasions[0]:
            occasions.pop(0)
            raise KeyboardInterrupt

    monkeypatch.setattr(Metrics, "push", broken)


def test_gradients_that_are_not_finite_are_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, usual_val_loss: float
) -> None:
    spoil(monkeypatch, float("nan"))
    assert train("spoiled", "--data_dir", "poisoned", steps=LONG) == 0
    skipped = read_entries("spoiled", "UpdateSkipped")
    assert skipped
    assert all(entry["loss"] is None for entry in skipped)
    events = [json.loads(line) for line in Path("runs/spoiled/events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["event"] == "StepLogged"][-1]["skipped"] >= 1
    assert read_val_loss(Path("runs/spoiled")) == pytest.approx(usual_val_loss, abs=NOISE)


def test_a_run_goes_back_behind_poisoned_data_and_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, usual_val_loss: float
) -> None:
    """Whether it finds the state to go back to in memory or on the disk makes no difference."""
    spoil(monkeypatch, 8.0)
    for name, snapshot_freq in (("memory", "10"), ("disk", "1000")):
        flags = ("--data_dir", "poisoned", "--snapshot_freq", snapshot_freq)
        assert train(name, *flags, steps=LONG) == 0
    rollbacks = read_entries("memory", "RolledBack")
    assert rollbacks
    assert all(entry["step"] < entry["from_step"] for entry in rollbacks)
    assert all(entry["windows"][0] < entry["windows"][1] for entry in rollbacks)
    assert read_val_loss(Path("runs/memory")) == pytest.approx(usual_val_loss, abs=NOISE)
    steps = [int(line.split()[0]) for line in Path("runs/memory/log.txt").read_text().splitlines() if "train" in line]
    assert steps == list(range(1, LONG + 1))
    assert len(read_entries("disk", "RolledBack")) == len(rollbacks)
    assert_same_end("memory", "disk")


@pytest.mark.parametrize("way", ["", pytest.param("--precision fp16", marks=pytest.mark.torture), "--num_epochs 1"])
def test_a_kill_around_a_rollback_changes_nothing(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    spoil(monkeypatch, 8.0 if "fp16" not in way else 4.0)
    flags = [*RUN, "--data_dir", "poisoned", *way.split()] + ([] if "epochs" in way else ["--max_steps", str(STEPS)])
    assert run_guarded(["train", *flags, "--run_name", "straight"]) == 0
    first = read_entries("straight", "RolledBack")[0]
    last = min(first["from_step"] + 25, STEPS - 2)
    break_off(monkeypatch, [first["from_step"] - 1, first["step"] + 1, first["from_step"] + 3, last])
    code = run_guarded(["train", *flags, "--run_name", "killed"])
    deaths = 0
    while code == 130:
        deaths += 1
        code = run_guarded(["train", "--run_name", "killed", "--resume", "latest"])
    assert (code, deaths) == (0, 4)
    assert_same_end("straight", "killed")


def test_a_run_that_cannot_be_healed_explains_itself_and_keeps_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("sick", "--data_dir", "clean", steps=60) == 0
    spoil(monkeypatch, 1.0)
    forward = GPT.forward
    monkeypatch.setattr(
        GPT, "forward", lambda self, *a, **n: multiply(forward(self, *a, **n), 9.0 if self.training else 1.0)
    )
    capsys.readouterr()
    assert run_guarded(["train", "--run_name", "sick", "--resume", "latest", "--max_steps", "160"]) == 76
    printed = capsys.readouterr().out
    assert "gave up" in printed
    assert "--resume STEP --allow_changes and --max_lr" in printed
    assert "--max_lr" in printed
    assert run_guarded(["checkpoints", "verify", "sick"]) == 0
    monkeypatch.setattr(GPT, "forward", forward)
    assert run_guarded(["train", "--run_name", "sick", "--resume", "60", "--max_steps", "70"]) == 0


def test_off_and_warn_never_go_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(monkeypatch, 8.0)
    for guard in ("off", "warn"):
        assert train(guard, "--data_dir", "poisoned", "--guard", guard) == 0
        assert not read_entries(guard, "RolledBack")
    assert not read_entries("off", "Warned")
    assert read_entries("warn", "Warned")
    assert "warning: step" in capsys.readouterr().out


SPOILED_RANK = f"""
import sys
import pytest
sys.path.insert(0, {str(Path(__file__).parent)!r})  # the process that this one is forked from may not know the tests
from test_rolled_back_runs import spoil
from gptmill.cli.main import run_guarded

spoil(pytest.MonkeyPatch(), 8.0)
sys.exit(run_guarded(sys.argv[1:]))
"""


def test_ranks_go_back_together(monkeypatch: pytest.MonkeyPatch, run_ranks: RunRanks) -> None:
    """Only one of them holds the state that they go back to; they end with the bits of one rank."""
    flags = [*RUN, "--data_dir", "poisoned", "--max_steps", "120", "--mini_batch_size", "4"]
    run_ranks("train", *flags, "--run_name", "two", program=("-c", SPOILED_RANK))
    spoil(monkeypatch, 8.0)
    assert run_guarded(["train", *flags, "--run_name", "one"]) == 0
    places = [
        [(entry["from_step"], entry["windows"]) for entry in read_entries(run, "RolledBack")] for run in ("one", "two")
    ]
    assert places[0] == places[1] != []
    # Two ranks save their optimizer in a file each.
    one, two = (
        load_checkpoint(Path(f"runs/{run}/checkpoints/latest"), ("model", "optimizer")) for run in ("one", "two")
    )
    for group in ("model", "optimizer"):
        tensors = two.tensors[group]
        assert [name for name, tensor in one.tensors[group].items() if not tensor.equal(tensors[name])] == []
    assert Path("runs/one/log.txt").read_bytes() == Path("runs/two/log.txt").read_bytes()


@pytest.mark.torture
@pytest.mark.parametrize("flag", ["--tensor_parallel", "--context_parallel"])
def test_ranks_that_share_a_model_go_back_together(
    monkeypatch: pytest.MonkeyPatch, run_ranks: RunRanks, flag: str
) -> None:
    """Each of them holds a part of the state that they go back to."""
    flags = [*RUN, "--data_dir", "poisoned", "--max_steps", "120", "--dropout", "0"]
    run_ranks("train", *flags, flag, "2", "--run_name", "two", program=("-c", SPOILED_RANK))
    spoil(monkeypatch, 8.0)
    assert run_guarded(["train", *flags, "--run_name", "one"]) == 0
    places = [
        [(entry["from_step"], entry["windows"]) for entry in read_entries(run, "RolledBack")] for run in ("one", "two")
    ]
    assert places[0] == places[1] != []
    assert read_val_loss(Path("runs/two")) == pytest.approx(read_val_loss(Path("runs/one")), abs=0.02)

"""After a kill, a resume and a rollback, every tracker has every step exactly once, read back by its own library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from zygote import Zygote

from gptmill.config.run import TrackingConfig
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_log import read_events
from gptmill.runs.events import (
    CheckpointSaved,
    EvalDone,
    Event,
    HistogramsTaken,
    RolledBack,
    RunFinished,
    RunStarted,
    SampleDrawn,
    StepLogged,
    TrainEvalDone,
    Warned,
)
from gptmill.runs.histogram_buckets import NUM_BUCKETS
from gptmill.runs.trackers import open_trackers
from gptmill.runs.trackers.wandb_file import read_records

TRACKING = TrackingConfig(use_tensorboard=True, use_wandb=True, wandb_mode="offline", use_trackio=True)
START = RunStarted(
    0, "runs/a", 20, 128, 12345, "CPU, 1 threads", "fp32", 1, "data/x", "byte:1", "0.1", "2.9", None,
    config={"max_lr": "0.0006", "corpus": "data/x|y", "tokenizer": "None"},
)  # fmt: skip
COUNTS = [0] * 100 + [3, 4] + [0] * (NUM_BUCKETS - 102)

# Three more steps than the checkpoint has, and then kill -9: what the background has not written by then is lost.
KILLED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from test_every_tracker import START, TRACKING, RunDirectory, Path, list_events, open_trackers

with open_trackers(RunDirectory(Path(sys.argv[1])), TRACKING, 0, is_quiet=True) as trackers:
    for event in [START, *list_events(0, 8, path=1)]:
        trackers.track(event)
    for background in trackers._trackers[-2:]:
        while background._done < 9:
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def list_events(first: int, last: int, path: int) -> Iterator[Event]:
    """A step each with its path as the loss; an evaluation, a sample, histograms and a checkpoint at every fifth."""
    for step in range(first, last + 1):
        if step > 0:
            yield StepLogged(
                step, step / 8, float(path), 6e-4, 1.25, 4321.0, 3725.0, telemetry={"gpu_power_watts": 99.0}
            )
        if step % 5 == 0:
            yield EvalDone(step, float(path), 64, 0.1)
            yield TrainEvalDone(step, path + 1.0, 64, 0.1)
            yield SampleDrawn(step, "Say ", f"“né” {step}", ["a", "b", "c"], 2)
            yield HistogramsTaken(step, {"blocks.0.weight": COUNTS}, {"blocks.0.weight": COUNTS})
            yield CheckpointSaved(step, "p", 9, 0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> RunDirectory:
    """Killed after step 8 and resumed from the checkpoint of step 5; at step 14 rolled back to step 12."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    folder.mkdir()
    here = str(Path(__file__).parent)
    process = zygote.run(["-c", KILLED, str(folder), here], folder, make_environment())
    assert process.returncode == -9, process.stderr
    directory = RunDirectory(folder)
    with open_trackers(directory, TRACKING, 5, is_quiet=True) as trackers:
        for event in [replace(START, step=5, resumed_from="p"), *list_events(6, 14, path=1)]:
            trackers.track(event)
        trackers.rewind(12)
        trackers.track(RolledBack(12, 14, "loss spike", 9.0, 1.0, [14, 15]))
        trackers.track(Warned(12, "gpu", "the GPU is hot"))
        for event in list_events(13, 20, path=2):
            trackers.track(event)
        trackers.track(RunFinished(20, "finished", 1.0))
        assert len(trackers._trackers) == 8
    return directory


STEPS = list(range(1, 21))
LOSSES = [1.0] * 12 + [2.0] * 8
EVALUATED = [0, 5, 10, 15, 20]


def test_events_and_the_text_log(run: RunDirectory) -> None:
    steps = [event for event in read_events(run.events) if isinstance(event, StepLogged)]
    assert [(event.step, event.loss) for event in steps] == list(zip(STEPS, LOSSES, strict=True))
    assert "HistogramsTaken" not in run.events.read_text(encoding="utf-8")
    lines = [line.split() for line in run.text_log.read_text(encoding="utf-8").splitlines()]
    assert [int(step) for step, kind, _ in lines if kind == "train"] == STEPS
    for kind in ("val", "train_eval"):
        assert [int(step) for step, found, _ in lines if found == kind] == EVALUATED


def test_tensorboard(run: RunDirectory) -> None:
    board = EventAccumulator(str(run.tensorboard), {"scalars": 0, "histograms": 0, "tensors": 0})
    board.Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("loss/train")] == list(
        zip(STEPS, LOSSES, strict=True)
    )
    assert [scalar.step for scalar in board.Scalars("machine/gpu_power_watts")] == STEPS
    for name in ("loss/val", "loss/train_eval", "perplexity/train_eval"):
        assert [scalar.step for scalar in board.Scalars(name)] == EVALUATED
    for kind in ("weights", "gradients"):
        histograms = board.Histograms(f"{kind}/blocks.0.weight")
        assert [histogram.step for histogram in histograms] == EVALUATED
        assert histograms[0].histogram_value.bucket == [3, 4]
    assert [text.step for text in board.Tensors("sample")] == EVALUATED
    (config, *_) = board.Tensors("config")
    assert "| corpus | data/x&#124;y |" in config.tensor_proto.string_val[0].decode()
    incidents = [text.tensor_proto.string_val[0].decode() for text in board.Tensors("incidents")]
    assert incidents == ["step 14: loss spike: rolled back to step 12", "the GPU is hot"]
    assert set(board.PluginTagToContent("hparams")) == {
        f"_hparams_/{tag}" for tag in ("experiment", "session_start_info", "session_end_info")
    }


def test_weights_and_biases(run: RunDirectory) -> None:
    """The run that was killed and resumed under its id, and the path that it took after the rollback."""
    run_id = (run.wandb / "run_id.txt").read_text(encoding="utf-8").strip()
    files = sorted(run.wandb.glob("offline-run-*/*.wandb"))
    first_id = next(path.stem.removeprefix("run-") for path in files if path.stem != f"run-{run_id}")
    assert read_wandb(run, first_id, "loss/train") == dict.fromkeys(range(1, 15), 1.0)
    assert read_wandb(run, run_id, "loss/train") == dict(zip(STEPS, LOSSES, strict=True))
    assert list(read_wandb(run, run_id, "loss/val")) == EVALUATED
    (alert,) = [record.alert.text for path in files for record in read_records(path) if "hot" in record.alert.text]
    assert alert == "the GPU is hot"
    tables = sorted(
        run.wandb.glob(f"*-{run_id}/files/media/table/samples_*.json"), key=lambda path: path.stat().st_size
    )
    rows = json.loads(tables[-1].read_text(encoding="utf-8"))["data"]
    names = ["rank 0 sample 0", "rank 0 sample 1", "rank 1 sample 0", "rank 1 sample 1"]
    texts = [[f'"né" {step}', "a", "b", "c"] for step in EVALUATED]
    assert rows == [
        [step, "Say ", text, name]
        for step, drawn in zip(EVALUATED, texts, strict=True)
        for text, name in zip(drawn, names, strict=True)
    ]


def read_wandb(run: RunDirectory, run_id: str, name: str) -> dict[int, float]:
    """The values of a chart by step, in the order in which `wandb sync` uploads the folders."""
    found: dict[int, float] = {}
    for path in sorted(run.wandb.glob(f"offline-run-*-{run_id}/*.wandb")):
        for record in read_records(path):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if name in items:
                step = record.history.step.num
                assert step > max(found, default=-1), f"step {step} is doubled or late"
                found[step] = json.loads(items[name])
    return found


def test_trackio(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", run.path.parent / ".trackio")
    storage = sqlite_storage.SQLiteStorage
    rows = storage.get_logs("gptmill", "a", run_id="a")
    assert [(row["step"], row["loss/train"]) for row in rows if "loss/train" in row] == list(
        zip(STEPS, LOSSES, strict=True)
    )
    assert [row["step"] for row in rows if "loss/val" in row] == EVALUATED
    assert [row["step"] for row in rows if "loss/train_eval" in row] == EVALUATED
    samples = [[line["text"] for line in row["sample"]["_value"]] for row in rows if "sample" in row]
    assert samples == [[f'"né" {step}', "a", "b", "c"] for step in EVALUATED]
    assert storage.get_run_config("gptmill", "a", run_id="a")["max_lr"] == "0.0006"
    assert "the GPU is hot" in [alert["text"] for alert in storage.get_alerts("gptmill")]

"""Every row of a benchmark is a valid run, and is judged by the right limit."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, TINY_FLAGS, make_environment
from zygote import Zygote

from gptmill.cli.config import run
from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.runs.event_json import to_json
from gptmill.runs.events import RunFinished, StepLogged

sys.path.append(str(PROJECT / "benchmarks"))
ARCHITECTURES, PRECISIONS = importlib.import_module("architectures"), importlib.import_module("precisions")
SPEED, QUALITY = importlib.import_module("gpt2_speed"), importlib.import_module("quality")
RUNS, FITTING = importlib.import_module("runs"), importlib.import_module("fitting")
INTERLEAVED = importlib.import_module("interleaved")
PRECISION_ROWS = [row for group in PRECISIONS.GROUPS.values() for row in group]


@pytest.mark.slow
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


def test_a_deviation_is_the_largest_difference_of_the_smoothed_curves(tmp_path: Path) -> None:
    curve = [5.0 - step / 10 for step in range(40)]
    write_run(tmp_path / "fp32", curve[:20])
    row = next(row for row in PRECISION_ROWS if row.name == "bf16")
    # A step that is off by 1 moves the mean of ten by 0.1; steps after fp32's last one are not compared.
    write_run(tmp_path / "bf16", [*curve[:12], curve[12] + 1.0, *curve[13:30], *(loss + 9 for loss in curve[30:])])
    result = PRECISIONS.read_result(tmp_path / "bf16")
    assert PRECISIONS.compare(row, result, tmp_path) == pytest.approx(0.1)
    assert result.loss == pytest.approx(sum(curve[30:]) / 10 + 9)
    assert result.memory_gb == 2.0


def test_a_curve_with_nan_or_without_a_reference_does_not_match(tmp_path: Path) -> None:
    row = next(row for row in PRECISION_ROWS if row.name == "bf16")
    write_run(tmp_path / "bf16", [math.nan] * 30)
    result = PRECISIONS.read_result(tmp_path / "bf16")
    assert math.isnan(PRECISIONS.compare(row, result, tmp_path))
    write_run(tmp_path / "fp32", [5.0] * 20)
    assert math.isnan(PRECISIONS.compare(row, result, tmp_path))


def test_a_run_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    write_run(tmp_path / "fp32", [5.0] * 20, is_finished=False)
    assert PRECISIONS.read_result(tmp_path / "fp32") is None


@pytest.mark.slow
@pytest.mark.parametrize("row", SPEED.ROWS, ids=lambda row: row.name)
def test_every_row_of_the_speed_table_is_a_config(row: Any) -> None:
    assert run(["show", row.recipe, *row.make_flags("all")]) == 0
    assert run(["show", "books-124m", *SPEED.LOSS_FLAGS]) == 0


def test_speeds_are_compared_with_rows_that_come_before() -> None:
    seen: list[str] = []
    for row in SPEED.ROWS:
        assert row.limit is None or row.limit.against in ("", *seen), row.name
        seen.append(row.name)
    assert len(set(seen)) == len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("flags", QUALITY.VARIANTS.values(), ids=QUALITY.VARIANTS)
def test_every_variant_of_the_modern_model_is_another_config(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", QUALITY.ABLATED]) == 0
    unchanged = capsys.readouterr().out
    assert run(["show", QUALITY.ABLATED, *flags.split()]) == 0
    assert (capsys.readouterr().out == unchanged) == (flags == "")


@pytest.mark.parametrize(
    ("limit", "value", "verdict"),
    [
        (SPEED.Limit("tokens/s", 590e3, 620e3), 589e3, "missed"),
        (SPEED.Limit("tokens/s", 590e3, 620e3), 590e3, "met"),
        (SPEED.Limit("tokens/s", 590e3, 620e3), 621e3, "aim"),
        (SPEED.Limit("seconds", 15.0, 8.0), 16.0, "missed"),
        (SPEED.Limit("seconds", 15.0, 8.0), 9.0, "met"),
        (SPEED.Limit("seconds", 15.0, 8.0), 7.0, "aim"),
        (SPEED.Limit("times", 0.9, None, "x"), 2.0, "met"),
        (SPEED.Limit("times", None, 1.2, "x"), 0.5, "met"),
        (SPEED.Limit("share", 0.6, 0.68), None, "not measured"),
        (SPEED.Limit("share", 0.6, 0.68), math.nan, "missed"),
    ],
)
def test_a_limit_judges(limit: Any, value: float | None, verdict: str) -> None:
    assert limit.judge(value) == verdict


def write_speeds(folder: Path, speeds: list[float]) -> None:
    folder.mkdir()
    kind = {"event": "StepLogged", "data_wait": 0.01, "memory_gb": 3.0}
    steps = [
        {**kind, "step": step, "time": 107.0 + step, "tokens_per_second": speed, "tflops": speed / 10}
        for step, speed in enumerate(speeds, 1)
    ]
    lines = [{"event": "RunStarted", "step": 0, "time": 100.0}, *steps]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_speed_is_the_median_of_the_steps_after_the_first(tmp_path: Path) -> None:
    row = next(row for row in SPEED.ROWS if row.name == "124M bf16 by 8")
    write_speeds(tmp_path / "124M_bf16", [1.0] * 20 + [1000.0] * 24 + [5000.0] * 26 + [9.0] * 99)
    write_speeds(tmp_path / "by_8", [4600.0] * 70)
    found = SPEED.read_result(RUNS.read_run(tmp_path / "124M_bf16"), tmp_path, 20, 70)
    assert (found.tokens_per_second, found.tflops, found.memory_gb) == (5000.0, 500.0, 3.0)
    assert found.first_step_seconds == 8.0
    result = SPEED.read_result(RUNS.read_run(tmp_path / "by_8"), tmp_path, 20, 70)
    line, is_missed = SPEED.describe(row, result, tmp_path, 790.0)
    assert not is_missed
    assert "| 4,600 | 460 | 58.2% | 1.00% | 3.0 GB |" in line
    assert line.endswith("| 0.900 × 124M bf16 | – | 0.920 × 124M bf16 | met |")
    (tmp_path / "124M_bf16" / "events.jsonl").unlink()
    assert SPEED.describe(row, result, tmp_path, 790.0)[1]


def test_a_row_that_failed_has_as_many_cells_as_the_others(tmp_path: Path) -> None:
    line, is_missed = SPEED.describe(SPEED.ROWS[0], None, tmp_path, 790.0)
    assert is_missed
    assert line.count("|") == len(SPEED.HEADER) + 5


def write_evaluations(folder: Path, losses: list[tuple[float, float | None, float | None]]) -> Any:
    """A run that started training at 1,000 s in a process started at 990 s, with evaluations at the given times."""
    kinds: list[dict[str, Any]] = [{"event": "RunStarted", "step": 0, "time": 1000.0, "parameters": 7}]
    for step, (seconds, loss, averaged) in enumerate(losses):
        kinds.append({"event": "EvalDone", "step": step, "time": seconds, "val_loss": loss, "ema_loss": averaged})
    kinds.append({"event": "StepLogged", "step": 9, "time": 1089.0, "loss": 1.25})
    kinds.append({"event": "RunFinished", "step": 9, "time": 1090.0, "reason": "finished"})
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(kind) + "\n" for kind in kinds), encoding="utf-8")
    (folder / "process.json").write_text('{"started": 990.0, "origin": {}}', encoding="utf-8")
    return RUNS.read_run(folder)


def test_a_target_is_met_by_the_first_evaluation_below_it_counted_from_process_start(tmp_path: Path) -> None:
    losses = [(1001.0, 4.0, None), (1020.0, None, None), (1030.0, 1.5, 1.4), (1040.0, 1.3, None), (1050.0, 1.45, None)]
    run = write_evaluations(tmp_path / "run", losses)
    assert QUALITY.find_met(run, 1.465) == 40.0
    assert QUALITY.find_met(run, 1.2) is None
    line = QUALITY.describe("shakespeare-char", run, 40.0)
    assert line == "| shakespeare-char | 7 | 9 | 100.0 | 1.3000 (1.8755) | 1.4500 | 1.2500 | 1.465 in 45 s | 40.0 s |"


@pytest.mark.parametrize(("seconds", "steps"), [(100.0, 820), (40.0, 232), (11.0, -52)])
def test_count_steps_fills_the_time_budget(seconds: float, steps: int) -> None:
    """5 s to the first step, 0.1 s a step, 2 s for an evaluation with its sample, and a margin."""
    events = [
        {"event": "RunStarted", "step": 0, "time": 2.0, "tokens_per_step": 50},
        {"event": "EvalDone", "step": 0, "time": 4.0, "seconds": 60.0},  # compiles
        *({"event": "StepLogged", "step": step, "time": 4.9 + step / 10, "tokens_per_second": 500} for step in (1, 2)),
        {"event": "EvalDone", "step": 2, "time": 6.1, "seconds": 1.0},
        {"event": "SampleDrawn", "step": 2, "time": 7.1},
        *({"event": "StepLogged", "step": step, "time": 6.9 + step / 10, "tokens_per_second": 500} for step in (3, 4)),
    ]
    assert FITTING.count_steps(RUNS.Run(events, started=0.0), 4, seconds) == steps


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["124M bf16"], ["124M bf16"]),
        (["124M"], ["124M bf16", "124M fp8", "124M bf16 by 8", "124M fp8 by 8"]),
        (["1.5B fp8", "start"], ["1.5B fp8", "start"]),
        (["start,"], ["start, warm cache"]),
        (["none"], []),
    ],
)
def test_rows_are_chosen_by_name_or_prefix(names: list[str], found: list[str]) -> None:
    assert [row.name for row in SPEED.choose_rows(names)] == found
    assert SPEED.choose_rows(None) == list(SPEED.ROWS)


def test_a_speed_is_read_from_the_row_that_was_asked_for() -> None:
    output = "| | micro-batch | tokens/s |\n| 124M bf16 by 8 | 8 | 1 | x |\n| 124M bf16 | 64 | 590,123 | 504 | 1 |\n"
    assert INTERLEAVED.read_speed(output, "124M bf16") == 590_123.0
    with pytest.raises(UserError, match="measured no speed of 124M fp8"):
        INTERLEAVED.read_speed(output, "124M fp8")


# A run that is stopped at its third step, asked for again, and then with a recipe that no run has.
OBTAINED = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
import runs

recipe, ends = Path("tiny.toml"), []
def obtain(text):
    recipe.write_text(text, encoding="utf-8")
    return runs.obtain(Path("runs/tiny"), str(recipe), sys.argv[2:], 120.0, 3, lambda: ends.append(1))

first = obtain("[training]\\nmax_steps = 1000000\\n")
again = obtain("[training]\\nmax_steps = 1000000\\n")
seconds = first.select("StepLogged")[0]["time"] - first.started
found = [first.last_step, seconds, first.is_finished, again == first, len(ends)]
print(json.dumps([*found, obtain("[training]\\nmax_steps = 1000000\\n[model]\\ndropout = 2.0\\n")]))
"""


@pytest.mark.slow
def test_a_run_is_stopped_at_its_step_kept_and_trained_again_only_when_something_changed(
    words: list[str], tmp_path: Path, zygote: Zygote
) -> None:
    flags = [*TINY_FLAGS, "--data_dir", str(tmp_path / words[1])]
    done = zygote.run(["-c", OBTAINED, str(PROJECT / "benchmarks"), *flags], tmp_path, make_environment())
    assert done.returncode == 0, done.stderr
    last_step, seconds, is_finished, is_kept, num_ends, refused = json.loads(done.stdout)
    assert 3 <= last_step < 1_000_000
    assert 0 < seconds < 120
    assert not is_finished
    assert is_kept
    assert num_ends == 1
    assert refused is None
    assert "dropout = 2.0" in done.stderr


@pytest.mark.parametrize(("is_alone", "folder"), [(True, "own"), (False, "runs/cache")])
def test_runs_that_share_the_gpu_use_a_private_autotuning_cache(
    is_alone: bool, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, pathlib; pathlib.Path('runs/row').mkdir(); print(os.environ['GPTMILL_CACHE'])"
    monkeypatch.setattr("gptmill.experiments.child_run.PROGRAM", (sys.executable, "-c", program))
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    RUNS.train(tmp_path / "runs" / "row", "demo", [], 60.0, None, is_alone=is_alone)
    assert (tmp_path / "runs" / "row.txt").read_text(encoding="utf-8").strip() == str(tmp_path / folder)


def test_only_a_recipe_with_prepared_shards_gets_a_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.toml").write_text('[data]\nmixture = "data/a=0.5,data/b=0.5"\n', encoding="utf-8")
    assert QUALITY.make_data_flags("demo", None) == []
    assert QUALITY.make_data_flags("mixed.toml", None) == []
    assert QUALITY.make_data_flags("books-124m", None) == ["--data_dir", str(tmp_path / "data" / "books")]
    assert QUALITY.make_data_flags("demo", "mine") == ["--data_dir", str(tmp_path / "mine")]
    assert QUALITY.make_data_flags("demo", "s3://far/away") == ["--data_dir", "s3://far/away"]


@pytest.mark.parametrize(
    ("benchmark", "words", "complaint"),
    [
        (QUALITY, ["nosuch"], "nosuch"),
        (QUALITY, ["--ablate", "--only", "no QKnorm"], "no variant is called 'no QKnorm' (did you mean no QK-norm?)"),
        (QUALITY, ["demo", "--only", "no QK-norm"], "add --ablate or drop --only"),
        (QUALITY, ["demo", "--data_dir", "empty"], "empty holds no prepared corpus"),
        (QUALITY, ["demo", "--out", "file"], "cannot write to file"),
        (QUALITY, ["--ablate", "--seconds", "60"], "--seconds is for recipes"),
        (SPEED, ["--data_dir", "empty"], "empty holds no prepared corpus"),
        (INTERLEAVED, ["empty", "--data_dir", "empty"], "empty is not a checkout of gptmill"),
        (INTERLEAVED, [str(PROJECT), "--data_dir", "empty"], "empty holds no prepared corpus"),
        (INTERLEAVED, [str(PROJECT), "--data_dir", "empty", "--rounds", "0"], "must be at least 1"),
    ],
)
def test_a_benchmark_rejects_mistakes_before_it_trains(
    benchmark: Any,
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_speed_is_not_measured_without_a_gpu(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = PrepareRequest(out=str(tmp_path / "shards"), tokenizer="byte", val_fraction=0.1)
    prepare_corpus([str(text_file)], request, lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gpt2_speed.py", "--data_dir", str(tmp_path / "shards")])
    with pytest.raises(SystemExit) as ended:
        SPEED.main()
    assert ended.value.code == 2
    assert "torch finds no GPU" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_terminated_benchmark_leaves_no_training_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('[data]\ncorpus = "python-stdlib"\n[training]\nmax_steps = 1000000\n', encoding="utf-8")
    benchmark = subprocess.Popen(
        [sys.executable, str(PROJECT / "benchmarks" / "quality.py"), str(recipe), "--flags", " ".join(TINY_FLAGS)],
        cwd=tmp_path,
        env=make_environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list_trainings(recipe), benchmark)
        benchmark.send_signal(number)
        assert benchmark.wait(60) == code
        wait_for(lambda: not list_trainings(recipe))
    finally:
        benchmark.kill()
        benchmark.wait()
        for training in list_trainings(recipe):
            os.kill(training, signal.SIGKILL)


def list_trainings(recipe: Path) -> list[int]:
    """Processes that train a recipe; those that have ended have no command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"train" in words and str(recipe).encode() in words:
                found.append(int(path.parent.name))
    return found


def wait_for(is_so: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)

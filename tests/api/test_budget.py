"""Training within a budget: what it writes and says, what it refuses, and that the run ends in time."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Protocol

import pytest

import gptmill
from gptmill.api.budget import run_budget
from gptmill.api.training import run_training
from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.config.recipes import load_recipe
from gptmill.config.requests import ReadingOptions, StartOptions
from gptmill.data.sources import resolve_source
from gptmill.data.tokenizers.bpe_training import train_tokenizer
from gptmill.experiments.budget import planning
from gptmill.experiments.budget.corpus_sample import measure_density, measure_spread, measure_tokenizers, read_sample
from gptmill.experiments.budget.excerpt import SEPARATOR, read_excerpt, read_few_documents
from gptmill.experiments.budget.explanation import explain_result
from gptmill.experiments.budget.planning import check_given, parse_budget
from gptmill.experiments.budget.recipe_files import claim_stem
from gptmill.experiments.budget.speed_model import MeasuredStep, make_speed_model
from gptmill.runs.directory import RunDirectory
from gptmill.runs.event_json import to_json
from gptmill.runs.event_log import read_events
from gptmill.runs.events import EvalDone, StepLogged, Warned
from gptmill.training import pacing
from gptmill.training.loop import Outcome
from gptmill.training.run_request import RunRequest, make_run_request

TINY = {
    "num_layers": 1, "embd_size": 32, "num_heads": 1, "context_length": 16, "total_batch_size": 64, "max_steps": 50,
    "tokenizer": "byte", "device": "cpu", "sample_tokens": 0,
}  # fmt: skip


class GptMill(Protocol):
    def __call__(self, *arguments: str | Path, check: bool = True) -> CompletedProcess[str]: ...


def write_text(path: Path, words: int) -> Path:
    chosen = random.Random(3).choices("the sea is calm tonight and far away a ship sails on".split(), k=words)
    path.write_text(" ".join(chosen), encoding="utf-8")
    return path


def freeze_speed(monkeypatch: pytest.MonkeyPatch, largest_flops: float = 1e6) -> None:
    """Measures nothing."""
    frozen = make_speed_model([MeasuredStep(1024, largest_flops, 0.05)])
    monkeypatch.setattr(planning, "measure_speed", lambda *_arguments: frozen)
    monkeypatch.setattr(planning, "measure_candidate", lambda candidate, *_rest: candidate.step_seconds)


def list_losses(events: Path) -> list[float]:
    return [event.val_loss for event in read_events(events) if isinstance(event, EvalDone)]


def test_it_explains_writes_a_recipe_trains_and_says_how_far_off_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, lines = write_text(tmp_path / "sea.txt", 20_000), []
    freeze_speed(monkeypatch)
    started = pacing.time.monotonic()
    flags = {**TINY, "corpus": str(text), "run_name": "sea"}
    result = run_budget(None, flags, "10m", started, lines.append, progress=False)
    labels = {line.split()[0] for line in lines}
    assert {"corpus", "tokenizer", "model", "batch", "steps", "rates", "dropout", "expected"} <= labels
    assert result.outcome.reason == "finished"
    recipe = load_recipe(str(result.files.recipe))
    assert {name: recipe[name] for name in ("num_layers", "context_length", "max_steps")} == {
        "num_layers": 1,
        "context_length": 16,
        "max_steps": 50,
    }
    assert "run_name" not in recipe
    loss = list_losses(result.outcome.run.events)[-1]
    measured = float(result.verdict.partition("; ")[2].split()[0])
    assert measured == pytest.approx(loss / math.log(2), rel=1e-2)  # a byte per token, but for the ends of pieces
    assert "of 10m used" in result.verdict


@pytest.mark.parametrize(
    ("exit_code", "verdict"),
    [
        pytest.param(exit_codes.TIME_UP, "the run stopped before its last step", id="time limit"),
        pytest.param(exit_codes.INTERRUPTED, "the run stopped before its last step", id="Ctrl-C"),
        pytest.param(exit_codes.NOT_SAVED, "2.891 bits per byte", id="the last checkpoint is not saved"),
    ],
)
def test_only_a_run_that_reached_its_last_step_is_compared_with_the_prediction(
    exit_code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(request: RunRequest, **_options: bool) -> Outcome:
        (tmp_path / "events.jsonl").write_text(to_json(EvalDone(40, 2.0, 64, 0.9)) + "\n", encoding="utf-8")
        return Outcome(RunDirectory(tmp_path), request.config, 50, "stopped", exit_code)

    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "sea.txt", 20_000)
    freeze_speed(monkeypatch)
    monkeypatch.setattr("gptmill.api.budget.run_training", stop)
    flags, started = {**TINY, "corpus": str(text), "run_name": "sea"}, pacing.time.monotonic()
    result = run_budget(None, flags, "10m", started, lambda _line: None, progress=False)
    assert f"of 10m used; {verdict}" in result.verdict


def test_rivals_are_trained_in_the_time_that_is_left_and_the_best_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    freeze_speed(monkeypatch, largest_flops=3e5)
    text, lines = write_text(tmp_path / "sea.txt", 20_000), []
    flags = {name: value for name, value in TINY.items() if name != "embd_size"}
    flags |= {"optimizer": "adamw", "eval_tokens": 512, "corpus": str(text), "run_name": "sea"}
    result = run_budget(None, flags, "10m", pacing.time.monotonic(), lines.append, progress=False)
    shapes = re.findall(r"^rival +(\d+) layers? of width (\d+), byte, 50 steps", "\n".join(lines), re.MULTILINE)
    runs = sorted(Path("runs").iterdir(), key=lambda path: (path / "config.toml").stat().st_mtime)
    assert len(shapes) >= 2
    assert [path.name for path in runs] == ["sea", *(f"sea-{layers}x{width}" for layers, width in shapes)]
    losses = {path: list_losses(path / "events.jsonl")[-1] for path in runs}
    assert result.outcome.run.path == min(losses, key=lambda path: losses[path])
    assert result.verdict.count(" x ") == len(runs)
    assert f"{min(losses.values()) / math.log(2):.2f}" in result.verdict.splitlines()[-1]
    assert [path.name for path in Path("data").iterdir() if path.is_dir()] == ["sea-10m"], "one tokenizer, one folder"
    assert {path.stem for path in Path().glob("*.toml")} == {"sea-10m", *(f"sea-10m{run.name[3:]}" for run in runs)}


@pytest.mark.parametrize(
    ("exit_code", "is_first_told"),
    [
        pytest.param(exit_codes.INTERRUPTED, False, id="Ctrl-C"),
        pytest.param(exit_codes.TIME_UP, True, id="time limit"),
        pytest.param(None, True, id="error"),
    ],
)
def test_a_rival_that_fails_does_not_hurt_what_was_trained_before(
    exit_code: int | None, is_first_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def stop(request: RunRequest, **_options: bool) -> Outcome:
        calls.append(request.config.tracking.run_name)
        if len(calls) > 1 and exit_code is None:
            raise UserError("the disk is full")
        run = RunDirectory(tmp_path / f"{len(calls)}")
        run.path.mkdir()
        run.events.write_text(to_json(EvalDone(50, 2.0 / len(calls), 64, 0.9)) + "\n", encoding="utf-8")
        return Outcome(run, request.config, 50, "stopped", exit_code or 0 if len(calls) > 1 else 0)

    monkeypatch.chdir(tmp_path)
    freeze_speed(monkeypatch)
    monkeypatch.setattr("gptmill.api.budget.run_training", stop)
    text, lines = write_text(tmp_path / "sea.txt", 200_000), []
    flags = {"corpus": str(text), "max_steps": 50, "tokenizer": "byte", "device": "cpu", "run_name": "sea"}
    result = run_budget(None, flags, "10m", pacing.time.monotonic(), lines.append, progress=False)
    assert (result.outcome.run.path.name == "1") == is_first_told
    assert "2.890 bits per byte" in result.verdict, "that of the first"
    assert (str(tmp_path / "1") in result.verdict) == (not is_first_told)
    assert any("the disk is full" in line for line in lines) == (exit_code is None)


def test_from_python_it_is_planned_and_trained_by_two_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "sea.txt", 20_000)
    freeze_speed(monkeypatch)
    plan = gptmill.plan_within_budget(text, 600, progress=False, **TINY)
    assert (plan.seconds, plan.values["num_layers"]) == (600.0, 1)
    assert capsys.readouterr().err == ""
    run = gptmill.train_within_budget(text, "10m", run_name="sea", **TINY)
    assert (run.state, run.path.name) == ("finished", "sea")
    assert "bits per byte" in capsys.readouterr().err
    with pytest.raises(UserError, match="--budget 5s: too short"):
        gptmill.train_within_budget(text, "5s")
    with pytest.raises(gptmill.ConfigError, match="num_layer"):
        gptmill.plan_within_budget(text, "10m", num_layer=2)


def test_a_slow_machine_ends_the_run_early_with_its_decay_done(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes 20 s per step: of 200 planned steps, about 45 fit into the 1,000 s."""
    monkeypatch.chdir(tmp_path)
    start = pacing.time.monotonic()
    clock = count()
    schedule = {"schedule": "wsd", "min_lr": 0.0, "decay_fraction": 0.5, "warmup_steps": 2, "eval_freq": 1000}
    flags = {
        **TINY,
        **schedule,
        "tokenizer": None,
        "data_dir": words[1],
        "max_steps": 200,
        "mini_batch_size": 4,
        "run_name": "slow",
    }
    request = make_run_request(None, flags, StartOptions(time_limit="1000s"), started=start)
    monkeypatch.setattr(pacing, "read_clock", lambda: start + 20.0 * next(clock))
    outcome = run_training(replace(request, is_paced=True), progress=False)
    events = read_events(outcome.run.events)
    steps = [event for event in events if isinstance(event, StepLogged)]
    assert outcome.reason == "finished"
    assert 35 < len(steps) <= 50
    assert steps[-1].lr == 0.0
    assert any(isinstance(event, EvalDone) and event.step == len(steps) for event in events)
    assert load_recipe(str(RunDirectory(outcome.run.path).config))["max_steps"] == len(steps)
    messages = [event.message for event in events if isinstance(event, Warned)]
    assert any("instead of 200, to stay inside its budget" in message for message in messages)


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ("5s", "too short"),
        ("20", "has no unit; write 20s, 20m or 20h"),
        ("soon", "must be a duration"),
    ],
)
def test_a_bad_budget_is_one_clear_sentence(budget: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"--budget {budget}: .*{sentence}"):
        parse_budget(budget)


@pytest.mark.parametrize(
    ("recipe", "given", "sentence"),
    [
        pytest.param(None, {}, "add --corpus my.txt", id="no corpus"),
        pytest.param("demo", {"corpus": "a.txt"}, "leave out the recipe", id="recipe"),
        pytest.param(None, {"corpus": "a.txt", "data_dir": "words"}, "does not go with --data_dir", id="shards"),
        pytest.param(None, {"corpus": "a.txt", "total_batch_size": 1000}, "multiple of a context of 128", id="batch"),
    ],
)
def test_what_does_not_go_with_a_budget_is_refused(recipe: str | None, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_given(recipe, given)


def test_ranks_which_would_each_choose_their_last_step_get_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="--budget plans for one process; run it without torchrun"):
        check_given(None, {"corpus": "my.txt"})


def test_missing_and_tiny_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_sample(str(tmp_path / "none.txt"))
    (tmp_path / "ten.txt").write_text("ten bytes.", encoding="utf-8")
    with pytest.raises(UserError, match="has 10 bytes of text; a budget needs at least 2,000"):
        read_sample(str(tmp_path / "ten.txt"))


def test_an_excerpt_is_of_all_of_the_corpus(tmp_path: Path) -> None:
    """Books and files come one after the other: the first of them are not like the rest."""
    (tmp_path / "lines.txt").write_text(
        "".join(f"{number:06d} of them\n" for number in range(50_000)), encoding="utf-8"
    )
    source = resolve_source([str(tmp_path / "lines.txt")], ReadingOptions())
    text, is_whole = read_excerpt(source, 100_000)
    assert not is_whole
    assert 95_000 <= len(text) <= 101_000
    pieces = text.split(SEPARATOR)
    assert len(pieces) == 100_000 // 4_096
    starts = [int(piece[:6]) for piece in pieces]  # each begins with a line
    assert starts[0] == 0
    assert all(0 < after - before < 2_200 for before, after in pairwise(starts))
    assert starts[-1] > 47_000
    assert read_excerpt(source, 10**6)[1]


def test_validation_text_is_of_all_parts_of_a_single_document(tmp_path: Path) -> None:
    """Else the loss is that of the last play, and says nothing about the prediction."""
    lines = [f"{number:06d} of them\n" for number in range(20_000)]
    (tmp_path / "lines.txt").write_text("".join(lines), encoding="utf-8")
    text = read_few_documents(resolve_source([str(tmp_path / "lines.txt")], ReadingOptions()))
    assert text is not None
    pieces = text.split(SEPARATOR)
    assert "".join(pieces) == "".join(lines)  # all of it, and each line once
    assert all(0 <= int(piece[:6]) - 1250 * number <= 1 for number, piece in enumerate(pieces))
    assert len(pieces) == 16
    (tmp_path / "many").mkdir()
    for number in range(20):
        (tmp_path / "many" / f"{number}.txt").write_text("one of many", encoding="utf-8")
    assert read_few_documents(resolve_source([str(tmp_path / "many")], ReadingOptions())) is None


def test_two_budgets_that_start_together_never_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sea-1m-2.toml").touch()
    assert [claim_stem("sea-1m") for _ in range(3)] == ["sea-1m", "sea-1m-3", "sea-1m-4"]


def test_the_command_line_refuses_before_anything_is_written(tmp_path: Path, gptmill: GptMill) -> None:
    write_text(tmp_path / "sea.txt", 3000)
    for arguments, sentence in (
        (["train", "--corpus", "sea.txt", "--budget", "5s"], "too short"),
        (["train", "--corpus", "sea.txt", "--budget", "1m", "--resume", "latest"], "leave out --resume"),
        (["plan", "--corpus", "sea.txt", "--budget", "1m", "--gpu", "H200"], "leave out the other options"),
    ):
        result = gptmill(*arguments, check=False)
        assert result.returncode == 2
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sea.txt"]


def test_density_is_what_a_compressor_leaves(tmp_path: Path) -> None:
    assert measure_density("abcd" * 5000) < 0.1
    letters = random.Random(5).choices("abcd", k=50_000)
    assert measure_density("".join(letters)) == pytest.approx(2.0, rel=0.2)
    text = write_text(tmp_path / "sea.txt", 20_000)
    sample = read_sample(str(text))
    assert sample.is_whole
    assert sample.facts.text_bytes == text.stat().st_size


def test_tokenizers_are_measured_and_a_given_one_is_the_only_one(tmp_path: Path) -> None:
    sample = read_sample(str(write_text(tmp_path / "sea.txt", 20_000)))
    (given,) = measure_tokenizers(sample, "char")
    assert given.option.bytes_per_token == 1.0
    found = [each.option for each in measure_tokenizers(sample, None)]
    assert [option.name for option in found] == ["byte"]  # so few words yield too few merges for a vocabulary of 512


def test_one_training_gives_the_tokenizers_of_all_sizes(tmp_path: Path) -> None:
    letters = random.Random(7)
    words = ["".join(letters.choices("abcdefghijklm", k=letters.randint(2, 9))) for _ in range(900)]
    (tmp_path / "words.txt").write_text(" ".join(letters.choices(words, k=25_000)), encoding="utf-8")
    sample = read_sample(str(tmp_path / "words.txt"))
    _, *found = measure_tokenizers(sample, None)
    assert [each.option.name for each in found] == ["bpe-512", "bpe-1024"]
    for each in found:
        trained = train_tokenizer([sample.text], each.option.vocab_size, 10**6, lambda _: None)
        held_out = trained.on_held_out or trained.on_training
        assert each.make_definition is not None
        assert each.make_definition() == trained.definition
        assert each.option.bytes_per_token == held_out.bytes_per_token


def test_the_more_the_pieces_of_a_text_differ_the_wider_is_the_interval() -> None:
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(5000)]
    easy, hard = (" ".join(generator.choices(words[:count], k=50_000)) for count in (50, 5000))
    even, uneven = easy + easy, easy + hard
    assert measure_spread(even, len(even)) < 0.01 < 0.1 < measure_spread(uneven, len(uneven))
    assert measure_spread(uneven, 100 * len(uneven)) < measure_spread(uneven, len(uneven)), "more is held out"
    assert measure_spread("too short to tell", 17) == 0.0


def test_the_verdict_tells_whether_the_loss_was_inside_the_interval() -> None:
    inside, outside = (explain_result(2.0, 0.02, measured, 55.0, 60.0) for measured in (2.05, 2.3))
    assert "+2.5% from the expected 2.000, inside" in inside
    assert "outside the interval 1.922 to 2.082" in outside
    assert inside.startswith("budget: 55s of 1m used")

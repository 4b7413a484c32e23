"""gptmill eval: a run, its checkpoints and a Hugging Face folder, on tasks, splits and texts; also as two ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import GptMill, RunRanks

import gptmill as package
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError

ON_CPU = ["--device", "cpu"]
TASK = """
title = "which word follows"
kind = "multiple_choice"
context = "{start}"
choices = "ends"
answer = "right"
file = "words.jsonl"
"""


@pytest.fixture(autouse=True)
def _data(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run runs/straight in the current folder, a task of one's own, and LAMBADA of three passages."""
    del straight
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.toml").write_text(TASK, encoding="utf-8")
    ends = ["fox", "dog on", "rain falls"]
    records = [{"start": "the quick"[number:], "ends": ends, "right": number % 3} for number in range(9)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    passages = "".join(json.dumps({"text": f"the old dog sees {word}"}) + "\n" for word in ("rain", "stones", "a"))
    (tmp_path / "lambada.jsonl").write_text(passages)


def evaluate(*arguments: str) -> dict[str, Any]:
    """What the command writes as JSON."""
    assert run_guarded(["eval", *arguments, *ON_CPU, "--json", "out.json"]) == 0
    content: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return content


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_guarded(["eval", *arguments, *ON_CPU]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gptmill: ")
    return captured.err


def test_without_more_it_measures_the_validation_split(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = evaluate("straight")["results"]
    assert (result["step"], result["name"]) == (40, "words (val)")
    manifest = json.loads(Path("words/manifest.json").read_text(encoding="utf-8"))
    assert result["num_tokens"] == manifest["val"]["tokens"] - 1
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "step 40"
    assert re.fullmatch(r"words \(val\) +loss +\d\.\d{4} +0\.\d{4} +[\d,]+ tokens", output[2])
    assert [line.split()[2] for line in output[2:]] == ["loss", "perplexity", "bits_per_byte"]


def test_the_loss_is_that_of_the_python_model_on_the_text(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the lazy fox", encoding="utf-8")
    (result,) = evaluate("straight", "--text", "short.txt")["results"]
    scores = package.evaluate("straight", text="short.txt", device="cpu", progress=False)
    assert scores["short.txt"].metrics["loss"].value == result["metrics"]["loss"]["value"]
    # The vocabulary of 257 is padded to 320; the model's own loss counts the padding as possible tokens.
    assert result["metrics"]["loss"]["value"] <= package.load("straight", device="cpu").loss("the lazy fox") + 1e-6


def test_tasks_have_their_metrics_and_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    own, lambada = evaluate("straight", "--tasks", "own.toml,lambada", "--task_data", "lambada=lambada.jsonl")[
        "results"
    ]
    assert (own["name"], own["num_examples"], own["groups"]) == ("own", 9, {})
    assert [*own["metrics"]] == ["acc", "acc_norm", "acc_token_mean"]
    assert [*lambada["metrics"]] == ["acc", "perplexity"]
    assert lambada["num_cropped"] == 3
    assert "lambada: 3 sequences were longer than the context" in capsys.readouterr().out
    limited = evaluate("straight", "--tasks", "own.toml", "--limit", "4")
    assert (limited["limit"], limited["results"][0]["num_examples"]) == (4, 4)


def test_samples_are_measured_alone_or_beside_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = evaluate("straight", "--samples", "3")["results"]
    assert [*result["metrics"]] == ["distinct_1", "distinct_2", "distinct_3", "repetition"]
    assert re.search(r"^samples +repetition +[\d.]+ +[\d.]+ +\d+ tokens$", capsys.readouterr().out, re.MULTILINE)
    split, samples = evaluate("straight", "--samples", "3", "--split", "val")["results"]
    assert (split["name"], samples["metrics"]) == ("words (val)", result["metrics"])


def test_python_gets_the_same_scores_from_a_model_at_hand() -> None:
    (result,) = evaluate("straight", "--tasks", "own.toml")["results"]
    scores = package.evaluate(package.load("straight", device="cpu"), tasks="own.toml", progress=False)["own"]
    assert {name: measured.value for name, measured in scores.metrics.items()} == {
        name: measured["value"] for name, measured in result["metrics"].items()
    }
    with pytest.raises(UserError, match="this model has no run"):
        package.evaluate(package.load("straight", device="cpu"), progress=False)
    with pytest.raises(UserError, match="evaluate takes one checkpoint"):
        package.evaluate("straight", all=True)


def test_checkpoints_give_a_curve(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [entry.step for entry in package.open_run("straight").checkpoints]
    found = evaluate("straight", "--all", "--tasks", "own.toml", "--split", "val")["results"]
    assert [result["step"] for result in found if result["name"] == "own"] == steps
    assert [result["step"] for result in found if result["name"] == "words (val)"] == steps
    header, *rows = capsys.readouterr().out.splitlines()
    assert "own acc_norm" in header
    assert "words (val) loss" in header
    assert [row.split()[0] for row in rows] == [str(step) for step in steps]
    assert all("±" in row for row in rows)
    last = evaluate("straight", "--every", str(steps[-1]), "--split", "val")["results"]
    assert last[0]["metrics"] == found[-2]["metrics"]


def test_a_damaged_checkpoint_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    folders = sorted(Path("runs/straight/checkpoints").glob("step_*"))
    for file in folders[0].rglob("*.safetensors"):
        file.write_bytes(b"damage")
    found = evaluate("straight", "--all", "--tasks", "own.toml")["results"]
    assert len(found) == len(folders) - 1
    assert "warning: " in capsys.readouterr().err


def test_a_checkpoint_finds_the_corpus_of_its_run() -> None:
    path = sorted(Path("runs/straight/checkpoints").glob("step_*"))[-1]
    assert evaluate(str(path))["results"][0]["metrics"] == evaluate("straight")["results"][0]["metrics"]


def test_two_ranks_find_the_same_bits(run_ranks: RunRanks, tmp_path: Path) -> None:
    flags = ["--tasks", "own.toml", "--split", "val", "--batch_tokens", "64"]
    alone = evaluate("straight", *flags)["results"]
    run_ranks("eval", "straight", *flags, *ON_CPU, "--json", "ranks.json")
    ranks = json.loads((tmp_path / "ranks.json").read_text(encoding="utf-8"))["results"]
    for result in (*alone, *ranks):
        del result["seconds"]
    assert ranks == alone


def test_the_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["eval", "--tasks", "list"]) == 0
    assert "hellaswag  " in capsys.readouterr().out


def test_ctrl_c_shows_what_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gptmill.api.evaluation.score_task", interrupt)
    assert run_guarded(["eval", "straight", "--split", "val", "--tasks", "own.toml", *ON_CPU]) == 130
    captured = capsys.readouterr()
    assert "words (val)  bits_per_byte" in captured.out
    assert captured.err.endswith("gptmill: interrupted\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tasks helaswag", "unknown task 'helaswag' (did you mean hellaswag?)"),
        ("--tasks lambada", "the data of task lambada is not here; download https://"),
        ("--tasks own.toml --limit 0", "--limit 0: must be at least 1"),
        ("--tasks lambada --task_data none.jsonl", "--task_data none.jsonl does not exist"),
        ("--tasks none.toml", "cannot read task none.toml"),
        ("--limit 3", "--limit: is for tasks; name them with --tasks"),
        ("--text none.txt", "cannot read --text none.txt"),
        ("--text words.txt --stride 17", "--stride 17 is more than the model's context_length 16"),
        ("--text words.txt --stride 0", "--stride 0: must be at least 1"),
        ("--data_dir missing", "missing"),
        ("--data_dir none", "--data_dir none names no corpus"),
        ("--all --every 3", "--all: and --every exclude each other"),
        ("--every 7", "straight has no checkpoint at a multiple of 7 steps; it has 8, "),
        ("--all --checkpoint 8", "--checkpoint 8: is one; leave out --all and --every"),
        ("--json none/out.json", "--json none/out.json: cannot write this file"),
    ],
)
def test_a_mistake_costs_one_sentence(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refuse(capsys, "straight", *flags.split())


def test_results_do_not_go_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    assert "--json pipe: cannot write this file" in refuse(capsys, "straight", "--json", "pipe")


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run 'strait'" in refuse(capsys, "strait")
    assert "the usage is gptmill eval MODEL" in refuse(capsys)


@pytest.mark.realdata
def test_real_hellaswag_and_lambada(realdata: Path, gptmill: GptMill) -> None:
    output = gptmill(
        *"eval straight --tasks hellaswag,hellaswag_raw,lambada --limit 5 --device cpu --task_data".split(), realdata
    ).stdout
    assert output.count("5 examples") == 7

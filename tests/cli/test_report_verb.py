"""gptmill report as users call it."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import GptMill

import gptmill as package


def test_a_trained_run_is_reported_in_every_format(straight: Path, gptmill: GptMill) -> None:
    assert gptmill("report", "straight").stdout == "report: runs/straight/report.html\n"
    page = (straight / "report.html").read_text(encoding="utf-8")
    assert "embd_size" in page
    assert "token embedding" in page
    run = json.loads(gptmill("report", "straight", "--format", "json").stdout)["runs"][0]
    assert run["config"]["embd_size"] == "16"
    assert sum(run["parameters_by_part"].values()) == run["environment"]["parameters"]
    report = package.report(straight, format="md", price_per_hour=2.0)
    assert report.path is None
    assert "# straight" in report.text


def test_what_cannot_be_reported_is_one_sentence(tmp_path: Path, gptmill: GptMill) -> None:
    (tmp_path / "runs/fresh").mkdir(parents=True)
    (tmp_path / "runs/fresh/config.toml").touch()
    for words, says in (
        (["fresh"], "has no events.jsonl: it has not started yet"),
        (["none"], "there is no run 'none'"),
        ([], "the usage is gptmill report RUN [RUN ...]"),
    ):
        process = gptmill("report", *words, check=False)
        assert process.returncode == 2
        assert says in process.stderr
        assert process.stderr.count("\n") == 1

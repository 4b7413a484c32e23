"""The classic model's numbers: a small run gives the losses that it gave before its parts could be exchanged.

Runs from before --exact_ranks drew the dropout of a step's micro-batches one after the other, and go on so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptmill.cli.main import run_guarded
from gptmill.training import run_request

FLAGS = (
    "--num_layers 2 --embd_size 32 --num_heads 2 --context_length 32 --total_batch_size 512 --mini_batch_size 4 "
    "--warmup_steps 5 --eval_tokens 640 --eval_freq 10 --sample_tokens 0 --device cpu --tokenizer byte "
    "--val_fraction 0.1 --max_steps 10 --dropout 0.1 --padded_softmax"
).split()
GOLDEN = [5.7790899, 5.7798562, 5.7431297, 5.7065048, 5.6239347, 5.5603514, 5.496839, 5.4518299, 5.4265213, 5.4070644]
BEFORE = [5.7795172, 5.7816505, 5.7450309, 5.7025437, 5.6237702, 5.5620894, 5.4981008, 5.4502602, 5.425014, 5.4066782]


@pytest.mark.parametrize("golden", [GOLDEN, BEFORE], ids=["now", "before"])
def test_a_classic_run_gives_its_golden_losses(
    golden: list[float], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if golden is BEFORE:
        monkeypatch.setattr(run_request, "_set_exact_ranks", lambda config: config)
    flags = [*FLAGS, "--corpus", str(text_file), "--run_name", "golden"]
    assert run_guarded(["train", *flags]) == 0
    lines = (tmp_path / "runs/golden/events.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "StepLogged"]
    assert losses == pytest.approx(golden, abs=1e-5)

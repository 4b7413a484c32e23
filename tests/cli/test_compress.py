"""gptmill compress: the table, a run that samples, recovery that keeps zeros and resumes, and bad requests."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS, GptMill, Start, wait_for_text

import gptmill as package
from gptmill.inference.loading import load_model
from gptmill.models.compressible import list_matrices
from gptmill.models.gpt import GPT

CPU = ["--device", "cpu"]
RECOVER = "--method prune-2:4 --recover_steps 30 --recover_lr 3e-3".split()


def read_row(table: str, name: str) -> list[float]:
    (line,) = (line for line in table.splitlines() if line.startswith(name))
    return [float(word.replace(",", "")) for word in line.removeprefix(name).split()[:2]]


def count_zeros(path: Path) -> int:
    model = load_model(path, torch.device("cpu")).model
    assert isinstance(model, GPT)
    for weight in list_matrices(model).values():
        assert ((weight.unflatten(-1, (-1, 4)) == 0).sum(-1) >= 2).all()
    return sum(int((weight == 0).sum()) for weight in list_matrices(model).values())


@pytest.mark.parametrize("flags", [["int8"], ["int4", "--group_size", "16"]], ids=["int8", "int4"])
def test_a_compressed_run_is_used_but_not_trained(straight: Path, gptmill: GptMill, flags: list[str]) -> None:
    table = gptmill("compress", "straight", "--method", *flags, *CPU).stdout
    before, after = read_row(table, "size (MB)")
    assert after < before
    before, after = read_row(table, "validation loss")
    assert after == pytest.approx(before, abs=0.05)
    name = f"straight-{flags[0]}"
    assert gptmill("sample", name, "--max_new_tokens", "5", *CPU).stdout
    assert float(gptmill("eval", name, *CPU).stdout.split("loss")[1].split()[0]) == pytest.approx(after, abs=0.05)
    assert "were dequantized" in gptmill("export", name, "--to", "onnx", *CPU).stdout
    shutil.rmtree(straight)
    process = gptmill("train", *TINY_FLAGS, "--data_dir", "words", "--init_from", name, check=False)
    assert process.returncode == 2
    assert f"{flags[0]} weights, which cannot be trained" in process.stderr
    process = gptmill("compress", name, *CPU, check=False)
    assert process.returncode == 2
    assert "is quantized already" in process.stderr


def test_recovery_lowers_the_loss_keeps_zeros_and_survives_a_kill(
    straight: Path, gptmill: GptMill, start: Start
) -> None:
    pruned = gptmill("compress", "straight", "--method", "prune-2:4", *CPU).stdout
    whole = gptmill("compress", "straight", *RECOVER, "--out", "whole", *CPU).stdout
    assert read_row(whole, "validation loss")[1] < read_row(pruned, "validation loss")[1]
    runs = straight.parent
    zeros = count_zeros(runs / "straight-prune-2-4/checkpoints/latest")
    assert zeros == count_zeros(runs / "whole/checkpoints/latest")

    process = start("compress", "straight", *RECOVER, "--out", "killed", *CPU)
    wait_for_text(process, runs / "killed/log.txt", "\n10 ")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gptmill("train", "--run_name", "killed", "--resume", "latest")
    first, second = (
        load_model(runs / f"{name}/checkpoints/latest", torch.device("cpu")) for name in ("whole", "killed")
    )
    assert first.step == second.step == 30
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


BAD = {
    "--sparsity 1.5 --method prune": "--sparsity 1.5: must be greater than 0 and less than 1",
    "--method int88": "expected one of int8, int8-dynamic, int4, prune, prune-2:4",
    "--method int4 --group_size 7": "--group_size 7: must be one of 16, 32",
    "--method int8 --recover_steps 5": "the integers of --method int8 cannot be trained",
    "--recover_lr 1e-3 --method prune": "applies only with --recover_steps",
    "--data_dir nowhere": "skip the losses with --no_eval",
    "--method int4 --group_size 32": "blocks.0.attention.qkv.weight has 16 inputs",
    "--out straight": "exists already",
    "--checkpoint 7777": "has no checkpoint of step 7777",
}


@pytest.mark.parametrize("flags", BAD)
def test_a_bad_request_is_one_sentence_and_writes_nothing(straight: Path, gptmill: GptMill, flags: str) -> None:
    process = gptmill("compress", "straight", *flags.split(), *CPU, check=False)
    assert process.returncode == 2
    assert BAD[flags] in process.stderr
    assert "Traceback" not in process.stderr
    assert [path.name for path in straight.parent.iterdir()] == ["straight"]


def test_python_gets_the_run_and_the_measures(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(straight.parent.parent)
    made = package.compress("straight", "int8-dynamic", device="cpu", progress=False)
    assert made.run.name == "straight-int8-dynamic"
    assert made.before.bits_per_weight == 32
    assert made.after.bits_per_weight < 10.1
    assert made.after.perplexity is not None
    assert made.run.load(device="cpu").generate("the ", 3)


def test_a_fresh_run_has_no_zeros_to_keep(words: list[str], gptmill: GptMill) -> None:
    process = gptmill("train", "demo", *words, "--keep_zeros", check=False)
    assert process.returncode == 2
    assert "name that with --init_from" in process.stderr

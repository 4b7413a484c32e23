"""Exact resume holds for every optimizer, schedule, precision and architecture: a run that goes back half way and
trains on ends with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY_FLAGS

from gptmill.cli.main import run_guarded

pytestmark = pytest.mark.slow

STEPS, HALF = 8, 4
FLAGS = [
    *TINY_FLAGS,
    *("--data_dir words --sample_tokens 0 --dropout 0.1").split(),
    *(f"--max_steps {STEPS} --checkpoint_freq {HALF} --eval_freq {HALF} --run_name run").split(),
]
VARIANTS = {
    "llama": "--norm rmsnorm --no_bias --positions rope --feed_forward swiglu --num_kv_heads 1 --no_tied_head",
    "qwen3": "--norm rmsnorm --no_bias --positions rope --feed_forward swiglu --qk_norm --head_size 16",
    "qwen3_moe": "--norm rmsnorm --no_bias --positions rope --qk_norm --feed_forward moe --num_experts 4",
    "moe with muon": "--feed_forward moe --num_experts 4 --optimizer muon",
    "windows and masks": "--attention_windows 4,full --documents masked --positions none",
    "parts of no layout": "--feed_forward relu2 --logit_softcap 15 --value_embeddings 1 --zero_init",
    "extra heads": "--mtp_heads 2 --z_loss 1e-3 --label_smoothing 0.1",
    "muon": "--optimizer muon",
    "muon and modern": "--optimizer muon --positions rope --norm rmsnorm --feed_forward swiglu --qk_norm",
    "lion": "--optimizer lion --max_lr 1e-4 --min_lr 1e-5",
    "adamw8bit": "--optimizer adamw8bit",
    "linear": "--schedule linear",
    "wsd and stages": "--schedule wsd --decay_fraction 0.5 --batch_size_warmup 64:3,192:6 --context_warmup 8:5",
    "constant": "--schedule constant",
    "ema": "--ema_decay 0.9",
    "ema and muon": "--ema_decay 0.9 --optimizer muon",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fp8": "--precision fp8-emulated",
    "fp8 in all layers": "--precision fp8-emulated --fp8_layers all",
    "recomputing": "--gradient_checkpointing full --loss_chunk 24",
    "selective": "--gradient_checkpointing selective --precision bf16",
}


@pytest.fixture
def run(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["prepare", str(text_file), "--tokenizer", "byte", "--out", "words"]) == 0
    return tmp_path / "runs/run"


def read_end(run: Path) -> dict[str, bytes]:
    """Every byte that the last checkpoint holds of the state, and the log."""
    tensors = sorted((run / "checkpoints/latest").resolve().glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in [*tensors, run / "log.txt"]}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_run_that_goes_back_ends_with_the_same_bytes(run: Path, flags: str) -> None:
    if "adamw8bit" in flags:
        pytest.importorskip("torchao")
    assert run_guarded(["train", *FLAGS, *flags.split()]) == 0
    end = read_end(run)
    assert run_guarded(["train", "--run_name", "run", "--resume", str(HALF)]) == 0
    assert (run / "checkpoints/latest").resolve().name == f"step_{STEPS:06d}_2"
    again = read_end(run)
    assert again.keys() == end.keys()
    assert ("ema.safetensors" in end) == ("--ema_decay" in flags)
    for name, content in end.items():
        assert again[name] == content, name

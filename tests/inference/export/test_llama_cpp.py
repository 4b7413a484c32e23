"""llama.cpp itself loads what is exported, encodes a prompt as we do, and writes the same greedy text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import GptMill

import gptmill as package
from gptmill.inference.model import Model

RUNNER = Path(__file__).parent / "llama_cpp.mjs"
SHAPE = "--num_layers 2 --embd_size 64 --num_heads 4 --context_length 64 --total_batch_size 2048 --mini_batch_size 8"
TRAINING = "--max_steps 100 --max_lr 5e-3 --warmup_steps 20 --eval_tokens 64 --sample_tokens 0 --device cpu"
MODERN = "--norm rmsnorm --no_bias --positions rope --num_kv_heads 2"
LAYOUTS = {
    "gpt2": "",
    "llama": f"{MODERN} --feed_forward swiglu --no_tied_head",
    "qwen3": f"{MODERN} --feed_forward swiglu --qk_norm",
    "qwen3_moe": f"{MODERN} --feed_forward moe --num_experts 4 --qk_norm",
}
PROMPTS = ("the quick brown", "rain falls  on\n")
COUNT = 24


@pytest.fixture
def node_folder() -> str:
    folder = os.environ.get("GPTMILL_LLAMA_CPP")
    if not folder or shutil.which("node") is None:
        pytest.skip("no llama.cpp: npm install node-llama-cpp, and set GPTMILL_LLAMA_CPP to that folder")
    return folder


def continue_greedily(model: Model, prompt: list[int]) -> list[int]:
    ids: list[int] = []
    while len(ids) < COUNT:
        ids.append(int(model(prompt + ids)[-1].argmax()))
    return ids


@pytest.mark.slow
@pytest.mark.llamacpp
@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama_cpp_writes_our_greedy_text(
    layout: str, tokenizer: str, node_folder: str, gptmill: GptMill, text_file: Path
) -> None:
    gptmill("prepare", text_file, "--tokenizer", tokenizer, "--out", "corpus")
    flags = f"{SHAPE} {TRAINING} {LAYOUTS[layout]} --data_dir corpus --run_name run"
    gptmill("train", *flags.split())
    folder = text_file.parent
    model = package.load(folder / "runs/run", device="cpu")
    for dtype in ("f16", "q8_0"):
        path = package.export_model(
            folder / "runs/run", "gguf", dtype=dtype, out=folder / f"{dtype}.gguf", device="cpu"
        )
        for prompt in PROMPTS:
            ids = model.encode_document(prompt)
            command = ["node", str(RUNNER), node_folder, str(path), prompt, str(COUNT)]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(process.stdout.splitlines()[-1])
            assert found["input"] == ids
            assert found["ids"] == continue_greedily(model, ids), dtype

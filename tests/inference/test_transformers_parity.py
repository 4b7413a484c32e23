"""Greedy texts are transformers', token for token: Hugging Face folders, and batches of unequal prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gptmill.inference.generator import BatchGenerator
from gptmill.inference.huggingface_folder import read_hf_folder
from gptmill.inference.loading import build_empty
from gptmill.inference.token_sampling import SamplingConfig

VOCAB, COUNT = 128, 24
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {**SMALL, **HEADS},
    "qwen3": {**SMALL, **HEADS, "head_dim": 16},
}
PROMPTS = [[5, 9, 17, 3, 60, 2, 88], [101], [7, 7, 7, 12, 13, 14, 15, 16, 17, 18, 19, 20], [33, 44]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_texts_of_a_batch_are_those_of_transformers(
    layout: str, penalty: float, device: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(layout, **LAYOUTS[layout])).eval()
    with torch.no_grad():  # far from the initial state, in which a model repeats its last token
        for parameter in theirs.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    found = read_hf_folder(tmp_path)
    ours = build_empty(found.config, VOCAB)
    ours.load_state_dict(found.convert(VOCAB), assign=True)
    generator = BatchGenerator(ours.to(device), SamplingConfig(0.0, repetition_penalty=penalty), VOCAB)
    steps = list(generator.generate(PROMPTS, COUNT, range(len(PROMPTS))))
    options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    for row, prompt in enumerate(PROMPTS):
        expected = theirs.to(device).generate(
            torch.tensor([prompt], device=device), eos_token_id=None, repetition_penalty=penalty, **options
        )
        assert [step.tokens[row] for step in steps] == expected[0, len(prompt) :].tolist()
    assert len({step.tokens[0] for step in steps}) > 3

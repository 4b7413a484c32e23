"""Tiny models as other software saves them, for the tests of imports."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCAB = 320
BOS, EOS = "<s>", "</s>"
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", LLAMA),
    "smollm2": ("llama", {**LLAMA, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100_000.0}}),
    "llama3": ("llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama biased": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 8}),
    "mistral full": ("mistral", {**LLAMA, "sliding_window": None}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**LLAMA, "head_dim": 12, **MOE}),
}


@torch.no_grad()
def build_published(name: str, **changes: Any) -> Any:
    """A model of `transformers` with weights so large that every part of it shows in the logits."""
    import transformers

    kind, options = CONFIGS[name]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**options, **changes}, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model


@cache
def train_tokenizer() -> str:
    """The tokenizer.json of a byte-level BPE that begins a text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # spares every test the comparison with tiktoken
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    words = [f"{one}{two}{three}" for one in "bdkt" for two in "aeiou" for three in "lmnr"]
    tokenizer.train_from_iterator([" ".join(words)] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    assert tokenizer.get_vocab_size() == VOCAB
    return str(tokenizer.to_str())


def save_published(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A folder with a model, in whole or in shards, and its tokenizer; returns the model."""
    model = build_published(name).to(dtype)
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(train_tokenizer(), encoding="utf-8")
    return model


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@torch.no_grad()
def compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.float()(ids).logits
    return logits


def make_ids() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(2))

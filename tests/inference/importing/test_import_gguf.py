"""GGUF files, written by the library `gguf` under llama.cpp's names: the logits of the model that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from published import LLAMA3_ROPE, VOCAB, build_published, compute_logits, make_ids, train_tokenizer
from tokenizers import Tokenizer

from gptmill import UserError, import_model
from gptmill.data.tokenizers import Tokenizer as OurTokenizer
from gptmill.inference.importing.gguf_file import GgufFile
from gptmill.inference.importing.gguf_model import read_gguf, unpermute
from gptmill.inference.importing.gguf_tokenizer import build_gguf_tokenizer
from gptmill.inference.model import Model
from gptmill.models.gpt import GPT
from gptmill.models.rotary import make_llama3_factors

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "smollm2": "llama", "llama biased": "llama", "mistral": "llama"}
ARCHITECTURES |= {"llama3": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.ln_f.": "output_norm.",
    "transformer.h.": "blk.",
    "model.layers.": "blk.",
    "attn.c_attn": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    ".ln_1.": ".attn_norm.",
    ".ln_2.": ".ffn_norm.",
}


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does: halves of a head become neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def list_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter writes."""
    tensors: dict[str, np.ndarray] = {}
    tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        if name == "lm_head.weight" and tied and architecture != "gpt2":
            continue
        if "experts.gate_up_proj" in name:
            block = f"blk.{name.split('.')[2]}."
            tensors[f"{block}ffn_gate_exps.weight"], tensors[f"{block}ffn_up_exps.weight"] = np.split(array, 2, axis=1)
            continue
        if "experts.down_proj" in name:
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = array
            continue
        if architecture == "gpt2" and ".c_" in name and name.endswith("weight"):
            array = array.T
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture == "llama" and part in name:
                array = permute(array, getattr(model.config, heads))
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = array
    return tensors


def write_metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_context_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_embedding_length(32)
    if architecture == "gpt2":
        writer.add_feed_forward_length(128)
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_feed_forward_length(48)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(2)
    width = getattr(config, "head_dim", None) or 8
    writer.add_key_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(24)


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(train_tokenizer())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def write_gguf(path: Path, name: str, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Any:
    """The model as a GGUF file; matrices are quantised, except those whose rows are too short for it."""
    model, architecture = build_published(name), ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, model.config, architecture)
    write_tokenizer(writer)
    for key, array in list_tensors(model, architecture).items():
        is_matrix = array.ndim > 1 and array.shape[-1] % 32 == 0 and kind != gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array), kind) if is_matrix else array
        writer.add_tensor(key, np.ascontiguousarray(data), raw_dtype=kind if is_matrix else None)
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", make_rope_factors())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def make_rope_factors() -> np.ndarray:
    """What Llama 3's scaling divides each frequency of a head of 16 by, by its published formula."""
    factors = []
    for index in range(8):
        wavelength = 2 * np.pi * LLAMA3_ROPE["rope_theta"] ** (index / 8)  # type: ignore[operator]
        share = min(1.0, max(0.0, (32 / wavelength - 1.0) / 3.0))
        factors.append(1 / ((1 - share) / 4.0 + share))
    return np.array(factors, np.float32)


def run_import(path: Path) -> Model:
    return import_model(path, path.with_name("imported")).load(device="cpu")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_its_logits_are_those_of_the_model_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    theirs = write_gguf(tmp_path / "model.gguf", name)
    read = read_gguf(tmp_path / "model.gguf")
    ours = GPT(read.config, VOCAB).eval()
    ours.load_state_dict(read.convert(VOCAB))
    torch.testing.assert_close(ours.logits(make_ids()), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)
    assert ours.config.tied_head == theirs.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_what_the_library_makes_of_them(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    theirs = write_gguf(tmp_path / "model.gguf", "llama", number)
    ours = read_gguf(tmp_path / "model.gguf").convert(VOCAB)["token_embedding.weight"]
    embedding = theirs.get_input_embeddings().weight.detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(embedding, number), number)
    torch.testing.assert_close(ours, torch.from_numpy(expected), atol=0, rtol=0)
    assert abs(ours.numpy() - embedding).max() < 0.2


def make_half(value: float) -> bytes:
    return np.float16(value).tobytes()


# One super-block of 256 values of each K-quant, by hand: scale 1 for all of them, no minimum.
K_BLOCKS = {
    "Q4_K": (make_half(1) + make_half(0) + bytes([1] * 4 + [0] * 4 + [1] * 4) + bytes([0x53] * 128), {3.0, 5.0}),
    "Q5_K": (
        make_half(1) + make_half(0) + bytes([1] * 4 + [0] * 4 + [1] * 4) + bytes(32) + bytes([0x53] * 128),
        {3.0, 5.0},
    ),
    "Q6_K": (bytes([0x53] * 128) + bytes([0xAA] * 64) + bytes([2] * 16) + make_half(0.5), {3.0, 5.0}),
    "Q2_K": (bytes([1] * 16) + bytes([0b11100100] * 64) + make_half(1) + make_half(0), {0.0, 1.0, 2.0, 3.0}),
    "Q3_K": (
        bytes([255] * 32) + bytes([0b11100100] * 64) + bytes([1] * 8 + [0xAA] * 4) + make_half(1),
        {0.0, 1.0, 2.0, 3.0},
    ),
}


@pytest.mark.parametrize("kind", K_BLOCKS)
def test_k_quants_are_dequantised(kind: str, tmp_path: Path) -> None:
    block, values = K_BLOCKS[kind]
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", np.frombuffer(block * 3, np.uint8).reshape(3, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "k.gguf").read("w")
    assert tensor.shape == (3, 256)
    assert set(tensor.flatten().tolist()) == values


def test_rows_of_queries_and_keys_are_restored() -> None:
    rows = np.arange(48).reshape(24, 2)
    for heads in (2, 3, 6):
        assert np.array_equal(unpermute(torch.from_numpy(permute(rows, heads)), heads).numpy(), rows)


def test_the_factors_of_llama_3_are_those_of_the_config() -> None:
    from gptmill.config.model import ModelConfig, Rope

    config = ModelConfig(embd_size=64, num_heads=4, positions=Rope(rope_base=500.0))
    found = make_llama3_factors(config, 4.0, 32)
    assert found is not None
    np.testing.assert_allclose(found[1].numpy(), make_rope_factors(), rtol=1e-5)


def write_vocabulary(path: Path, **entries: Any) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in entries.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_a_bpe_tokenizer_comes_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    tokenizer: OurTokenizer = run_import(tmp_path / "model.gguf").tokenizer
    expected = Tokenizer.from_str(train_tokenizer())
    for text in ("bal dem", " kor! x\n\n 12", "naïve 漢字 <s>"):
        ids = tokenizer.encode(text).tolist()
        assert text == "naïve 漢字 <s>" or ids == expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode_bytes(ids) == text.encode()
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (1, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("pre", "pieces"), [("llama-bpe", ["x", "123", "45"]), ("qwen2", ["x", "1", "2", "3", "4", "5"])]
)
def test_numbers_are_split_as_the_pre_tokenizer_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokens = [*sorted(json.loads(train_tokenizer())["model"]["vocab"]), "12", "123", "45"]
    vocabulary = {"tokens": tokens, "merges": ["1 2", "12 3", "4 5"], "eos_token_id": tokens.index("</s>")}
    file = write_vocabulary(tmp_path / "v.gguf", model="gpt2", pre=pre, **vocabulary)
    ids = build_gguf_tokenizer(file).encode("x12345").tolist()
    assert [tokens[id_] for id_ in ids] == pieces


def test_a_sentencepiece_tokenizer_comes_along(tmp_path: Path) -> None:
    """Merges follow the scores, a space goes before the text, and unknown characters become bytes."""
    words = {"▁": -9.0, "a": -8.0, "b": -7.0, "ab": -1.0, "▁a": -2.0, "▁ab": -3.0, "bb": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    file = write_vocabulary(
        tmp_path / "v.gguf",
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + list(words.values()),
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(words),
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer = build_gguf_tokenizer(file)
    assert [tokens[id_] for id_ in tokenizer.encode("ab abb")] == ["▁ab", "▁ab", "b"]
    assert [tokens[id_] for id_ in tokenizer.encode("é")] == ["▁", "<0xC3>", "<0xA9>"]
    assert (tokenizer.end_of_text, tokenizer.begin_of_text) == (2, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "has no tokenizer; give the model's tokenizer.json with --tokenizer"),
        ({"model": "bert", "tokens": ["a"]}, "kind 'bert'"),
        ({"model": "gpt2", "pre": "tekken", "tokens": ["a"], "merges": ["a a"]}, "the pre-tokenizer 'tekken'"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "a"], "merges": ["a a"]}, "a token occurs twice"),
        ({"model": "llama", "tokens": ["a", "b"], "scores": [1.0]}, "is damaged"),
        ({"model": "llama", "tokens": ["a", "b"], "eos_token_id": 9}, "is damaged"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        build_gguf_tokenizer(write_vocabulary(tmp_path / "v.gguf", **entries))

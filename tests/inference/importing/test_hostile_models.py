"""Damaged and hostile models: one sentence each, and nothing of the run is written."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published import build_published, edit_json, save_published, train_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmill import UserError, import_model

GGUF = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_published("llama", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for path in saved.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    return made


def refuse(source: Path, said: str) -> None:
    target = source.with_name("imported")
    with pytest.raises(UserError, match=said) as refused:
        import_model(source, target)
    assert "\n" not in str(refused.value)
    assert not target.exists()
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def claim(length: int) -> Callable[[bytes], bytes]:
    return lambda data: length.to_bytes(8, "little") + data[8:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "is not a valid safetensors file"),
        (lambda _data: b"", "is not a valid safetensors file"),
        (claim(1 << 30), "is not a valid safetensors file"),
        (claim(1 << 63), "is not a valid safetensors file"),
        (claim(20_000), "is not a valid safetensors file"),
        (lambda _data: b"\x80\x04cos\nsystem\n", "is a pickle"),
    ],
    ids=["truncated", "empty", "header of 1 GB", "header of 2^63", "header into the data", "pickle"],
)
def test_a_damaged_safetensors_file(folder: Path, change: Callable[[bytes], bytes], said: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    refuse(folder, said)


def edit(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {name: make(weights[name])}


NORM, QUERY, EMBEDDING = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: {key: weights[key] for key in weights if key != NORM}, "have no model.norm.weight"),
        (lambda weights: weights | {"model.extra": torch.ones(2)}, "have model.extra, unknown to their config"),
        (edit(QUERY, lambda x: x[:-1]), "is 31 x 32, but by their config it has 32 rows"),
        (edit(QUERY, lambda x: x[:, :-1].contiguous()), "do not match its config"),
        (edit(NORM, lambda x: x[:-1]), "by their config it has 32 rows"),
        (edit(EMBEDDING, lambda x: x[0]), "the embedding has not 320 rows"),
        (edit(EMBEDDING, lambda x: x[:, :16].contiguous()), "different shape"),
        (edit(NORM, lambda x: x * torch.nan), "final_norm.weight in .* is not finite"),
        (edit(QUERY, lambda x: x.to(torch.int8)), "use a model whose weights are floats"),
    ],
    ids=["missing", "extra", "rows", "columns", "norm", "embedding", "narrow embedding", "NaN", "integers"],
)
def test_weights_that_do_not_fit(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str
) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    refuse(folder, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "is not valid JSON"),
        ('{"a":' * 100_000, "is not valid JSON"),
        ("[]", "model_type None"),
        (json.dumps({"model_type": "llama", "hidden_size": 10**30}), "has no"),
    ],
    ids=["deep list", "deep object", "list", "huge"],
)
def test_a_config_of_nonsense(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    refuse(folder, said)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size"])
@pytest.mark.parametrize("value", [10**30, -1, "many", [1], 2**40])
def test_numbers_of_a_config_that_no_model_has(folder: Path, name: str, value: object) -> None:
    edit_json(folder / "config.json", **{name: value})
    if (name, value) == ("max_position_embeddings", 2**40):
        pytest.skip("costs a model with RoPE nothing")
    refuse(folder, ".")


def test_a_tokenizer_with_more_tokens_than_the_embedding(folder: Path) -> None:
    definition = json.loads(train_tokenizer())
    definition["model"]["vocab"]["new"] = 320
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    refuse(folder, "the tokenizer has 321 tokens, but the model's embedding only 320 rows")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}'])
def test_a_damaged_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    refuse(folder, r"tokenizer\.json|library tokenizers")


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\x03\x0a\x01a"])
def test_a_damaged_sentencepiece_file(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    refuse(folder, "SentencePiece|is not a BPE")


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<I", 1),
        GGUF + struct.pack("<QQ", 2**63, 0),
        GGUF + struct.pack("<QQ", 0, 2**63),
        GGUF + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62),
        GGUF + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 0, 2**62),
        GGUF + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 9, 1) + bytes(40),
        GGUF + struct.pack("<QQQ1sI", 0, 1, 1, b"a", 99) + bytes(40),
        GGUF + struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"w", 2, 2**40, 2**40, 0, 0) + bytes(64),
        GGUF + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"w", 1, 32, 0, 2**60) + bytes(64),
        GGUF + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"w", 1, 32, 9999, 0) + bytes(64),
        GGUF + struct.pack("<QQQ1sI", 1, 0, 1, b"w", 2**31) + bytes(64),
    ],
    ids="magic version tensors entries key array nested type shape offset quantisation dimensions".split(),
)
def test_a_gguf_file_of_absurd_claims(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    refuse(tmp_path / "model.gguf", "is not a valid GGUF file")


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    key = b"general.architecture"
    entry = struct.pack(f"<Q{len(key)}sIQ5s", len(key), key, 8, 5, b"mamba")
    (tmp_path / "model.gguf").write_bytes(GGUF + struct.pack("<QQ", 0, 1) + entry)
    refuse(tmp_path / "model.gguf", "is of architecture 'mamba', and gptmill reads gpt2, llama, qwen3, qwen3moe")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "there is no"),
        ("model.safetensors", "give its folder"),
        ("pytorch_model.bin", "is a pickle"),
        ("notes.txt", "of no format that gptmill knows"),
        ("empty", "has no config.json"),
    ],
)
def test_what_is_no_model(tmp_path: Path, name: str, said: str) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    elif name != "absent":
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    refuse(tmp_path / name, said)


def test_an_import_that_fails_late_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gptmill.inference.importing.run_writer.link_tiers", fail)
    with pytest.raises(OSError, match="No space left"):
        import_model(folder, folder.with_name("imported"))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_gpt2_whose_columns_are_transposed(tmp_path: Path) -> None:
    """As nanoGPT's weights are, saved under the name of GPT-2."""
    build_published("gpt2").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(train_tokenizer(), encoding="utf-8")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file({name: x.t().contiguous() if ".c_" in name and x.ndim == 2 else x for name, x in weights.items()}, file)
    refuse(tmp_path / "model", "is 96 x 32, but by their config it has 96 rows")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file; give a Hugging Face folder"):
        import_model(tmp_path / "pipe", "never", logdir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]

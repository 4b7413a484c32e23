"""Folders that `transformers` saved, imported: the same logits, and the model's own tokenizer and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published import (
    BOS,
    CONFIGS,
    EOS,
    VOCAB,
    build_published,
    compute_logits,
    edit_json,
    make_ids,
    save_published,
    train_tokenizer,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gptmill import UserError, import_model
from gptmill.data.tokenizers import build_tokenizer
from gptmill.data.tokenizers.byte_level import encode_byte_level
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer, _read_table
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.inference.model import Model
from gptmill.runs.checkpoints.manifest import read_manifest


def run_import(source: Path, **options: Any) -> Model:
    """The model of the run that is made of a source."""
    return import_model(source, source.with_name("imported"), **options).load(device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_published("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", CONFIGS)
def test_its_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In shards, as large models are."""
    theirs = save_published(name, tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    ours = run_import(tmp_path / "model")
    torch.testing.assert_close(ours(make_ids()), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_half_precision_become_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_published("llama", tmp_path / "model", dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = run_import(tmp_path / "model")
    assert {parameter.dtype for parameter in ours.module.parameters()} == {torch.float32}
    torch.testing.assert_close(ours(make_ids()), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("has_extras", [True, False])
def test_gpt2_is_read_under_all_its_names(has_prefix: bool, has_extras: bool, tmp_path: Path) -> None:
    """OpenAI's weights have no prefix; older files hold the causal mask and the tied head too."""
    theirs = save_published("gpt2", tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    weights = {(name if has_prefix else name.removeprefix("transformer.")): x for name, x in load_file(file).items()}
    prefix = "transformer." if has_prefix else ""
    if has_extras:
        weights["lm_head.weight"] = weights[f"{prefix}wte.weight"].clone()
        weights[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
        weights[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, file)
    ours = run_import(tmp_path / "gpt2")
    torch.testing.assert_close(ours(make_ids()), compute_logits(theirs, make_ids()), atol=1e-4, rtol=1e-4)


def test_its_origin_is_recorded(folder: Path) -> None:
    run = import_model(folder, folder.with_name("imported"))
    assert run.state == "model only"
    (checkpoint,) = run.checkpoints
    imported = read_manifest(checkpoint.path).values["imported"]
    assert (imported["source"], imported["format"], imported["layout"]) == (str(folder), "Hugging Face", "llama")
    assert len(imported["sha256"]) == 64
    assert checkpoint.tiers == ("latest",)


def test_a_document_begins_and_ends_as_the_model_was_trained(folder: Path) -> None:
    """`transformers` encodes a text with <s> before it, and stops at </s>."""
    model = run_import(folder)
    assert model.encode_document("bal") == [0, *model.encode("bal")]
    assert model.tokenizer.end_of_text == 1
    assert model.decode([0, *model.encode("bal dem"), 1]) == "bal dem"


def test_a_corpus_prepared_with_its_tokenizer_fits_it(folder: Path) -> None:
    """The corpus has end_of_text between documents, and the same ids otherwise."""
    model = run_import(folder)
    for place in (folder, folder.with_name("imported")):
        tokenizer = build_tokenizer(str(place), ())
        assert make_fingerprint(tokenizer) == make_fingerprint(model.tokenizer)
        assert getattr(tokenizer, "begin_of_text") == tokenizer.end_of_text == 1  # noqa: B009


@pytest.mark.parametrize(
    ("file", "content", "end", "start"),
    [
        ("tokenizer_config.json", {"eos_token": BOS}, 0, 0),
        ("tokenizer_config.json", {"eos_token": {"content": "b"}}, "b", 0),
        ("tokenizer_config.json", {"bos_token": BOS, "add_bos_token": False}, 1, 1),
        ("tokenizer_config.json", {"bos_token": "b", "add_bos_token": True}, 1, "b"),
        ("special_tokens_map.json", {"eos_token": "d"}, "d", 0),
        ("generation_config.json", {"eos_token_id": [5, 6]}, 5, 0),
        ("generation_config.json", {"eos_token_id": 10**30}, 1, 0),
        ("tokenizer_config.json", {"eos_token": "absent"}, 1, 0),
        ("tokenizer_config.json", [[]], 1, 0),
    ],
)
def test_the_files_beside_it_name_its_special_tokens(
    file: str, content: Any, end: int | str, start: int | str, folder: Path
) -> None:
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    if file != "generation_config.json":
        (folder / "generation_config.json").unlink()
    model = run_import(folder)
    ids = json.loads(train_tokenizer())["model"]["vocab"]
    expected = [ids[token] if isinstance(token, str) else token for token in (end, start)]
    assert [model.tokenizer.end_of_text, model.encode_document("")[0]] == expected


def test_gpt2s_own_files_are_the_tokenizer_gpt2(tmp_path: Path) -> None:
    """So that a corpus prepared with gpt2 fits the model."""
    folder = tmp_path / "gpt2"
    build_published("gpt2", vocab_size=50_257, n_layer=1, n_embd=8, n_head=1).save_pretrained(folder)
    edit_json(folder / "config.json", eos_token_id=50_256)
    (folder / "generation_config.json").unlink()
    vocabulary = {encode_byte_level(token): rank for token, rank in Gpt2Tokenizer().bpe.ranks.items()} | {
        "<|endoftext|>": 50_256
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(_read_table(), encoding="utf-8")
    assert isinstance(run_import(folder).tokenizer, Gpt2Tokenizer)


def test_another_vocabulary_in_gpt2s_files_is_read_too(folder: Path) -> None:
    definition = json.loads(train_tokenizer())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(definition["model"]["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in definition["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    edit_json(folder / "config.json", eos_token_id=1)
    text = "bal dem, kor!\n"
    ours, expected = run_import(folder).tokenizer, Tokenizer.from_str(train_tokenizer())
    assert (ours.vocab_size, ours.end_of_text) == (VOCAB, 1)
    assert ours.encode(text).tolist() == expected.encode(text, add_special_tokens=False).ids
    assert bytes(ours.decode_bytes(ours.encode(text).tolist())) == text.encode()


def test_a_tokenizer_can_be_given_by_hand(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder.with_name("tokenizer.json"))
    with pytest.raises(UserError, match=r"has no tokenizer\.json; add it, or name the model's tokenizer with --tokeni"):
        run_import(folder)
    model = run_import(folder, tokenizer=folder.with_name("tokenizer.json"))
    assert model.encode_document("")[0] == 0
    assert model.tokenizer.end_of_text == json.loads(train_tokenizer())["model"]["vocab"][EOS]


def test_a_run_is_replaced_only_when_asked(folder: Path) -> None:
    target = folder.with_name("imported")
    import_model(folder, target)
    before = sorted(path.name for path in target.parent.iterdir())
    with pytest.raises(UserError, match="exists; choose another --out, or add --overwrite"):
        import_model(folder, target)
    (target / "mark").touch()
    import_model(folder, target, overwrite=True)
    assert not (target / "mark").exists()
    assert sorted(path.name for path in target.parent.iterdir()) == before
    with pytest.raises(UserError, match="is not a run; choose another --out"):
        import_model(folder, folder, overwrite=True)

"""What is exported loads in transformers with no code of ours, gives the same logits and ids, and comes back."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT, GptMill
from gguf import GGUFReader

import gptmill as package
from gptmill.config.errors import UserError
from gptmill.config.export_request import ExportDtype, ExportRequest
from gptmill.config.model import Llama3Scaling, ModelConfig, Moe, RmsNorm, Rope, SwiGlu
from gptmill.config.run import ExportFormat
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.inference.export.exporting import write_export
from gptmill.inference.export.gguf_tensors import interleave_halves
from gptmill.inference.export.gguf_tokenizer import make_gguf_tokenizer
from gptmill.inference.export.passes import Report, stay_silent
from gptmill.inference.export.source import ExportSource
from gptmill.models.gpt import build_gpt, pad_vocab
from gptmill.models.rotary import apply_rope, make_rope

sys.path.append(str(PROJECT / "tests" / "models"))
from compositions import ROPE, TINY

LLAMA = replace(TINY, embd_size=32, norm=RmsNorm(), bias=False, positions=ROPE, num_kv_heads=2, feed_forward=SwiGlu(64))
MODELS = {
    "gpt2": replace(TINY, embd_size=32),
    "llama": replace(LLAMA, tied_head=False, mtp_heads=1),
    "llama with biases": replace(LLAMA, bias=True),
    "llama3": replace(LLAMA, positions=replace(ROPE, rope_scaling=Llama3Scaling(4.0, 40))),
    "qwen3": replace(LLAMA, qk_norm=True, head_size=10),
    "qwen3_moe": replace(LLAMA, qk_norm=True, feed_forward=Moe(4, 2, ffn_size=32)),
}
NASTY = ("", " ", "a  b\n\n\tc  ", "naïve 漢字 🙂‍↔️ e\u0301", "I'll 1234567 ''s", "\x00\x7f\u200b\ufeff", "x" * 500)


def make_source(config: ModelConfig, tokenizer: Tokenizer | None = None) -> ExportSource:
    """A model with large weights and a padded vocabulary."""
    tokenizer = tokenizer or build_tokenizer("byte", ())
    model = build_gpt(config, pad_vocab(tokenizer.vocab_size), seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return ExportSource("tiny", model, tokenizer, 7, "raw", None)


def write(source: ExportSource, path: Path, **options: Any) -> Path:
    return write_export(source, ExportRequest(out=str(path), **options), stay_silent).path


@pytest.mark.parametrize(("to", "dtype"), [("hf", "bf16"), ("gguf", "q8_0"), ("onnx", "f32")])
def test_writing_and_comparing_report_how_far_they_are(to: ExportFormat, dtype: ExportDtype, tmp_path: Path) -> None:
    stages: dict[str, list[int]] = {}
    source = make_source(MODELS["llama with biases"])

    def show(stage: str) -> nullcontext[Report]:
        reported = stages.setdefault(stage.split()[0], [])

        def report(done: int, total: int) -> None:
            assert total == source.parameters
            reported.append(done)

        return nullcontext(report)

    out = tmp_path / ("model.gguf" if to == "gguf" else "out")
    write_export(source, ExportRequest(to=to, dtype=dtype, out=str(out)), show)
    assert list(stages) == ["writing", "comparing"]
    for stage, reported in stages.items():
        assert reported == sorted(reported)
        # What only pads the vocabulary is not written; ONNX Runtime tells nothing while it reads.
        assert (stage, to) == ("comparing", "onnx") or 0.8 * source.parameters < reported[-1] <= source.parameters


def draw(source: ExportSource) -> torch.Tensor:
    return torch.randint(source.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_with_our_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_source(MODELS[name])
    folder = write(source, tmp_path / "out", shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = draw(source)
    expected = source.logits(tokens)
    torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(package.load(folder, device="cpu")(tokens), expected, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in NASTY:
        assert tokenizer(text)["input_ids"] == source.tokenizer.encode(text).tolist()
    ids = theirs.generate(torch.tensor([[tokenizer.bos_token_id, 97]]), max_new_tokens=4, do_sample=False)
    assert len(ids[0]) <= 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for(dtype: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write(make_source(MODELS["gpt2"]), tmp_path / "out", dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{dtype}"}
    assert (
        json.loads((folder / "config.json").read_text())["vocab_size"] == 257 == len(weights["transformer.wte.weight"])
    )
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_value_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    source = make_source(MODELS["gpt2"])
    with torch.no_grad():
        source.model.final_norm.weight[0] = 1e6
    with pytest.raises(UserError, match="too large for float16; use --dtype bfloat16 or float32"):
        write(source, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_llamas_heads_are_in_the_order_that_llama_cpp_rotates() -> None:
    """It rotates channels 2i and 2i + 1 by the angle by which we rotate i and i + D/2."""
    cos, sin = make_rope(torch.arange(5), MODELS["llama"]) or ()
    x_BTHD = torch.randn(1, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    ours = apply_rope(x_BTHD, (cos, sin))

    def reorder(x: torch.Tensor) -> torch.Tensor:
        return interleave_halves(x.permute(2, 3, 0, 1).flatten(0, 1), 3).unflatten(0, (3, 8)).permute(2, 3, 0, 1)

    even, odd = reorder(x_BTHD)[..., ::2], reorder(x_BTHD)[..., 1::2]
    c, s = cos[:, None, :4], sin[:, None, :4]
    theirs = torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)
    torch.testing.assert_close(theirs, reorder(ours))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_gguf_verifies_in_every_type(name: str, dtype: str, tmp_path: Path) -> None:
    source = make_source(MODELS[name])
    path = write(source, tmp_path / "model.gguf", to="gguf", dtype=dtype)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["token_embd.weight"] == dtype.upper()
    assert kinds["output_norm.weight"] == kinds.get("position_embd.weight", "F32") == "F32"
    assert ("rope_freqs.weight" in kinds) == (name == "llama3")
    assert ("output.weight" in kinds) != source.config.tied_head


def test_characters_are_merges_of_their_bytes() -> None:
    found = make_gguf_tokenizer(CharTokenizer("aé漢"))
    assert found.tokens[:2] == ["a", "Ã©"]
    assert len(found.tokens) == 4
    assert found.merges == ["Ã ©", "æ ¼", "æ¼ ¢"]


@pytest.mark.parametrize(
    ("config", "to", "said"),
    [
        (replace(MODELS["qwen3"], attention_windows="4"), "gguf", "train with --attention_windows none"),
        (
            replace(MODELS["qwen3"], positions=Rope(50.0, Llama3Scaling(4.0, 40))),
            "gguf",
            "train with --no_qk_norm or --rope_scaling linear",
        ),
        (replace(LLAMA, value_embeddings=1), "hf", "trained with --value_embeddings 0 can be exported"),
    ],
)
def test_what_a_format_cannot_hold_gets_the_flags_to_change(config: ModelConfig, to: Any, said: str) -> None:
    from gptmill.inference.export.exporting import check_exportable

    with pytest.raises(UserError, match=said):
        check_exportable(config, to)


def test_a_wrong_export_is_noticed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptmill.inference.export import gguf_tensors

    monkeypatch.setattr(gguf_tensors, "interleave_halves", lambda rows, _heads: rows.flip(0))
    with pytest.raises(UserError, match="the export is wrong: logits read back by gguf differ"):
        write(make_source(MODELS["llama"]), tmp_path / "model.gguf", to="gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_out_and_comes_back(straight: Path, gptmill: GptMill) -> None:
    """Export, continue from the export and from the run: the first loss is the same."""
    output = gptmill("export", "straight", "--to", "onnx").stdout
    assert "verified: logits read back by onnxruntime equal ours" in output
    assert "done: exports/straight-onnx (" in output
    folder = package.export_model(straight, "hf", out=straight.parent / "hf", license="mit", device="cpu")
    card = (folder / "README.md").read_text()
    for fact in (
        'license: "mit"',
        "| Steps | 40 |",
        "| Tokens seen | 5,120 |",
        "Best validation loss",
        "gptmill train",
    ):
        assert fact in card
    flags = "--data_dir words --max_steps 1 --num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 ".split()
    flags += "--total_batch_size 128 --mini_batch_size 4 --eval_tokens 64 --sample_tokens 0 --device cpu".split()
    losses = []
    for name, source in (("a", folder), ("b", straight)):
        gptmill("train", *flags, "--run_name", name, "--init_from", source)
        losses.append(package.open_run(straight.parent / name).metrics["loss"][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_hugging_face_folder_needs_no_library_but_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    folder = write(make_source(MODELS["gpt2"]), tmp_path / "plain")
    assert (folder / "tokenizer.json").is_file()

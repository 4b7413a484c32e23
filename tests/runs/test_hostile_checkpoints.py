"""A stranger's checkpoint, whose checksums all fit: refused with one sentence, or opened; never worse than that.

Nothing here may end in a traceback, wait for ever, need memory without bound, leave the folder or write to it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.run import ModelConfig, RunConfig
from gptmill.config.schema import list_values
from gptmill.data.tokenizers import restore_tokenizer
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.inference.loading import load_model
from gptmill.models.gpt import build_gpt, pad_vocab
from gptmill.runs.checkpoints.content import Checkpoint, check_tensors
from gptmill.runs.checkpoints.storage import find_damage, load_checkpoint, read_info, save_checkpoint

CPU = torch.device("cpu")
TINY = ModelConfig(num_layers=1, embd_size=8, num_heads=2, context_length=4)
TENSORS = "model.safetensors"
SHA256 = "0" * 64


def make_honest() -> Checkpoint:
    tokenizer = ByteTokenizer()
    model = build_gpt(TINY, pad_vocab(tokenizer.vocab_size), seed=0)
    values = {
        "config": list_values(replace(RunConfig(), model=TINY)),
        "tokenizer": tokenizer.spec(),
        "tokenizer_fingerprint": make_fingerprint(tokenizer),
    }
    return Checkpoint(3, {"model": dict(model.state_dict())}, values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound checkpoint that a model can be loaded from."""
    path = save_checkpoint(tmp_path / "checkpoints", make_honest()).path
    assert load_model(path, CPU).step == 3
    return path


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and makes its checksum fit."""
    file = path / "checkpoint.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def forge_tensors(path: Path, content: bytes) -> None:
    """Puts any bytes in the place of the tensors, with checksums that fit."""
    (path / TENSORS).write_bytes(content)
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    forge(path, lambda manifest: manifest.update(files={TENSORS: entry}))


def make_tensor_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def list_all(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(file), file.lstat().st_mtime_ns, file.lstat().st_size) for file in folder.parent.rglob("*"))


def refuse(path: Path) -> str:
    """How `load_checkpoint` says no: in one line, without having written anything."""
    before = list_all(path)
    with pytest.raises(UserError) as error:
        load_checkpoint(path, ("model",))
    assert list_all(path) == before
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 700 + 2 * len(str(path))
    return message


# The manifest


def set_(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(values)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "step is text": (set_(step="3"), "step"),
    "step is true": (set_(step=True), "step"),
    "step is negative": (set_(step=-1), "step"),
    "step is a fraction": (set_(step=3.0), "step"),
    "step is huge": (set_(step=10**30), "step"),
    "step is null": (set_(step=None), "step"),
    "step is missing": (lambda manifest: manifest.pop("step"), "step"),
    "saved_at is text": (set_(saved_at="now"), "saved_at"),
    "saved_at is true": (set_(saved_at=True), "saved_at"),
    "saved_at is before all time": (set_(saved_at=-1e300), "saved_at"),
    "saved_at is after all time": (set_(saved_at=1e300), "saved_at"),
    "saved_at is no float": (set_(saved_at=10**400), "checkpoint.json"),
    "files are a list": (set_(files=[]), "files"),
    "files are null": (set_(files=None), "files"),
    "files are missing": (lambda manifest: manifest.pop("files"), "files"),
    "values are a list": (set_(values=[1]), "values"),
    "values are missing": (lambda manifest: manifest.pop("values"), "values"),
    "val_loss is text": (set_(values={"val_loss": "low"}), "val_loss"),
    "train_loss is a list": (set_(values={"train_loss": []}), "train_loss"),
    "version is another": (set_(version=3), "version 3"),
    "format is a list": (set_(format=["\x1b[31m"] * 1000), "reads gptmill-checkpoint"),
    "a file is null": (set_(files={TENSORS: None}), TENSORS),
    "a file is text": (set_(files={TENSORS: "x"}), TENSORS),
    "a checksum is missing": (set_(files={TENSORS: {"bytes": 3}}), "sha256"),
    "a checksum is a number": (set_(files={TENSORS: {"sha256": 3, "bytes": 3}}), "sha256"),
    "a checksum is too short": (set_(files={TENSORS: {"sha256": "ab", "bytes": 3}}), "sha256"),
    "a size is missing": (set_(files={TENSORS: {"sha256": SHA256}}), "bytes"),
    "a size is negative": (set_(files={TENSORS: {"sha256": SHA256, "bytes": -1}}), "bytes"),
    "a size is true": (set_(files={TENSORS: {"sha256": SHA256, "bytes": True}}), "bytes"),
    "a size is text": (set_(files={TENSORS: {"sha256": SHA256, "bytes": "3"}}), "bytes"),
    "a size is not the file's": (set_(files={TENSORS: {"sha256": SHA256, "bytes": 2**62}}), TENSORS),
    "no such file is listed": (set_(files={}), f"no {TENSORS}"),
}
PATHS = [
    "../model.safetensors",
    "/etc/passwd",
    "/etc/x.safetensors",
    "..",
    "",
    ".safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "model.safetensors\n",
    "model\0.safetensors",
    "..safetensors",
    "model.pt",
    "checkpoint.json",
    "x" * 5000 + ".safetensors",
    "\x1b[31m.safetensors",
]


@pytest.mark.parametrize(("change", "named"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_forged_manifest(path: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    forge(path, change)
    message = refuse(path)
    assert str(path) in message
    assert named in message
    assert find_damage(path, thorough=False) or named == f"no {TENSORS}"


@pytest.mark.parametrize("name", PATHS, ids=lambda name: ascii(name[:30]))
def test_a_file_that_is_named_like_a_path_or_worse(path: Path, name: str) -> None:
    forge(path, lambda manifest: manifest["files"].update({name: {"sha256": SHA256, "bytes": 3}}))
    assert "is not a plain NAME.safetensors" in refuse(path)
    with pytest.raises(UserError, match="not a plain NAME"):
        read_info(path)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b"9" * 1_000_000,
        b'{"format": "gptmill-checkpoint", "version": ' + b"9" * 4000 + b"}",
        b'{"format": "gptmill-checkpoint", "version": 1, "sha256": NaN}',
        b'{"format": "gptmill-checkpoint", "version": 1, "sha256": "", "values": {"x": 1e999}}',
        b'{"format": "gptmill-checkpoint", "version": 1, "values": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\x80\x04\x95\x00",
        b"\0" * 100,
    ],
    ids=["deep list", "deep object", "digits", "version", "nan", "infinite", "rather deep", "pickle", "zeros"],
)
def test_a_manifest_that_is_hard_to_read(path: Path, text: bytes) -> None:
    (path / "checkpoint.json").write_bytes(text)
    assert "checkpoint.json" in refuse(path)


def test_a_manifest_that_would_fill_the_memory(path: Path) -> None:
    os.truncate(path / "checkpoint.json", 1 << 40)  # takes no room on the disk
    assert "more than 64 MB" in refuse(path)


def test_a_name_that_stands_twice_in_a_manifest(path: Path) -> None:
    file = path / "checkpoint.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"step": 3', '"step": 3,\n "step": 3'), encoding="utf-8")
    assert "damaged" in refuse(path)


# Files that are none


def put_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to("../elsewhere")


def put_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["checkpoint.json", TENSORS])
@pytest.mark.parametrize("put", [put_link, put_folder, put_pipe, put_device], ids="link folder pipe device".split())
def test_what_is_no_plain_file_is_not_opened(path: Path, name: str, put: Callable[[Path], None]) -> None:
    put(path / name)
    message = refuse(path)
    assert f"{path / name} is a " in message
    assert find_damage(path, thorough=True) == find_damage(path, thorough=False) == message


def test_the_checkpoint_s_own_folder_may_be_a_link(path: Path) -> None:
    tier = path.with_name("latest")
    tier.symlink_to(path.name)
    assert load_model(tier, CPU).step == 3


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt"])
def test_a_pickle_is_not_opened(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    torch.save({"weight": torch.zeros(3)}, file)
    assert f"{file} is a pickle, which can execute code; gptmill does not load pickles" in refuse(file)
    assert f"{file} is a pickle" in refuse(tmp_path)


def test_a_file_or_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    assert "a gptmill checkpoint is a folder" in refuse(tmp_path / "notes.txt")
    assert "cannot read checkpoint" in refuse(tmp_path)
    assert "cannot read checkpoint" in refuse(tmp_path / "nothing")
    assert "cannot read checkpoint" in refuse(tmp_path / "notes.txt" / "inside")
    with pytest.raises(UserError, match="cannot read checkpoint"):
        load_checkpoint(tmp_path / ("x" * 300), ())
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot read checkpoint"):
        load_checkpoint(tmp_path / "loop", ())


# Tensor files

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
F6 = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
TENSOR_FILES = {
    "empty": b"",
    "too short for a length": b"\x08\0\0",
    "a length alone": (8).to_bytes(8, "little"),
    "a length beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "a huge length": (2**63).to_bytes(8, "little") + b"{}",
    "the largest length": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "a header just too large": ((32 << 20) + 8).to_bytes(8, "little") + b"{}",
    "no JSON": make_tensor_file(b"hello!!!"),
    "no text": make_tensor_file(b"\xff" * 8),
    "a list": make_tensor_file([]),
    "a number": make_tensor_file(b"5       "),
    "deep": make_tensor_file(b'{"a":' * 100_000),
    "an entry is null": make_tensor_file({"w": None}),
    "an entry is a list": make_tensor_file({"w": [1]}),
    "an entry is empty": make_tensor_file({"w": {}}),
    "metadata is a number": make_tensor_file({"__metadata__": 5}),
    "an unknown type": make_tensor_file({"w": {**F32, "dtype": "F31"}}, bytes(8)),
    "a type as a number": make_tensor_file({"w": {**F32, "dtype": 5}}, bytes(8)),
    "a type that torch has not": make_tensor_file({"w": F6}, bytes(3)),
    "a negative shape": make_tensor_file({"w": {**F32, "shape": [-2]}}, bytes(8)),
    "a shape that overflows": make_tensor_file({"w": {**F32, "shape": [2**62, 2**62]}}, bytes(8)),
    "a shape beyond 64 bits": make_tensor_file({"w": {**F32, "shape": [2**70]}}, bytes(8)),
    "a shape that does not fit": make_tensor_file({"w": {**F32, "shape": [3]}}, bytes(8)),
    "offsets beyond the file": make_tensor_file({"w": {**F32, "shape": [1000], "data_offsets": [0, 4000]}}, bytes(8)),
    "offsets backwards": make_tensor_file({"w": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
    "negative offsets": make_tensor_file({"w": {**F32, "data_offsets": [-8, 0]}}, bytes(8)),
    "offsets that overlap": make_tensor_file({"v": F32, "w": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "the same bytes twice": make_tensor_file({"v": F32, "w": F32}, bytes(8)),
    "a hole": make_tensor_file({"w": {**F32, "data_offsets": [8, 16]}}, bytes(16)),
    "bytes of no tensor": make_tensor_file({"w": F32}, bytes(16)),
    "a name twice": make_tensor_file(b'{"w":%b,"w":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(8)),
    "a pickle": pickle.dumps({"w": [1.0] * 100}, protocol=4),
}


@pytest.mark.parametrize("content", TENSOR_FILES.values(), ids=TENSOR_FILES.keys())
def test_a_forged_tensor_file(path: Path, content: bytes) -> None:
    forge_tensors(path, content)
    assert find_damage(path, thorough=True) == ""  # its checksums fit
    assert str(path / TENSORS) in refuse(path)


def test_a_saved_pickle_in_the_place_of_tensors_is_called_that(path: Path, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights")
    forge_tensors(path, (tmp_path / "weights").read_bytes())
    assert f"{path / TENSORS} is a pickle" in refuse(path)


def test_a_tensor_file_whose_length_looks_like_a_pickle_is_opened(path: Path) -> None:
    header = json.dumps({"w": F32}).encode().ljust(0x0280)  # begins with the bytes 80 02
    forge_tensors(path, make_tensor_file(header, bytes(8)))
    assert load_checkpoint(path, ("model",)).tensors["model"]["w"].equal(torch.zeros(2))


# The model


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def replace_tensor(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    tensors[name] = tensor


MODELS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a tensor is missing": (lambda tensors: tensors.pop("final_norm.bias"), r"missing: final_norm\.bias"),
    "a tensor too many": (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected: 'extra'"),
    "another name": (lambda tensors: rename(tensors, "final_norm.bias", "\x1b[31mx"), r"unexpected: '\\x1b\[31mx'"),
    "another shape": (
        lambda tensors: replace_tensor(tensors, "blocks.0.mlp.up.bias", torch.zeros(31)),
        r"different shape: blocks\.0\.mlp\.up\.bias is 31, not 32",
    ),
    "another type": (
        lambda tensors: replace_tensor(tensors, "final_norm.bias", torch.zeros(8, dtype=torch.int64)),
        r"different dtype: final_norm\.bias is torch\.int64, not torch\.float32",
    ),
    "no tensors at all": (lambda tensors: tensors.clear(), "fewer or smaller"),
    "another embedding": (
        lambda tensors: replace_tensor(tensors, "token_embedding.weight", torch.zeros(64, 8)),
        "fewer or smaller",
    ),
}


@pytest.mark.parametrize(("change", "message"), MODELS.values(), ids=MODELS.keys())
def test_tensors_that_are_not_the_model_s(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    checkpoint = make_honest()
    change(checkpoint.tensors["model"])
    path = save_checkpoint(tmp_path, checkpoint).path
    with pytest.raises(UserError, match=message) as error:
        load_model(path, CPU)
    assert str(path) in str(error.value)


def test_many_wrong_tensors_are_told_in_one_sentence() -> None:
    found = {f"found.{number}": torch.zeros(1) for number in range(1000)}
    expected = {f"expected.{number}": torch.zeros(1) for number in range(500)}
    with pytest.raises(UserError, match=r"somewhere.* 497 more.* 997 more") as error:
        check_tensors(found, expected, "somewhere")
    assert len(str(error.value)) < 500
    check_tensors(found, dict(found), "somewhere")


VALUES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no config": lambda values: values.pop("config"),
    "a config that is a list": lambda values: values.update(config=[]),
    "a config that is null": lambda values: values.update(config=None),
    "an unknown field": lambda values: values["config"].update(num_wings=8),
    "a hostile field": lambda values: values["config"].update({"\x1b[31m" * 1000: 8}),
    "text for a number": lambda values: values["config"].update(num_layers="many"),
    "a list for a number": lambda values: values["config"].update(embd_size=[8]),
    "null for a number": lambda values: values["config"].update(embd_size=None),
    "true for a number": lambda values: values["config"].update(num_heads=True),
    "a fraction for a number": lambda values: values["config"].update(num_heads=2.0),
    "no layers": lambda values: values["config"].update(num_layers=0),
    "less than none": lambda values: values["config"].update(num_layers=-1),
    "no heads": lambda values: values["config"].update(num_heads=0),
    "heads that do not fit": lambda values: values["config"].update(num_heads=3),
    "too many layers to build": lambda values: values["config"].update(num_layers=10**12),
    "too wide to build": lambda values: values["config"].update(embd_size=10**18, num_heads=1),
    "too wide for a number": lambda values: values["config"].update(embd_size=10**300, num_heads=7),
    "too long to build": lambda values: values["config"].update(context_length=2**62),
    "a dropout that drops all": lambda values: values["config"].update(dropout=1.0),
    "a dropout beyond numbers": lambda values: values["config"].update(dropout=10**400),
    "another size": lambda values: values["config"].update(context_length=5),
    "no tokenizer": lambda values: values.pop("tokenizer"),
    "a tokenizer that is a list": lambda values: values.update(tokenizer=[]),
    "a tokenizer that is null": lambda values: values.update(tokenizer=None),
    "another tokenizer": lambda values: values.update(tokenizer={"name": "char", "alphabet": "abc"}),
    "no fingerprint": lambda values: values.pop("tokenizer_fingerprint"),
    "another fingerprint": lambda values: values.update(tokenizer_fingerprint=["\n"] * 1000),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES.keys())
def test_values_that_no_run_has_saved(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    forge(path, lambda manifest: change(manifest["values"]))
    with pytest.raises(UserError) as error:
        load_model(path, CPU)
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700 + len(str(path))


# The tokenizer


def pack(definition: bytes) -> dict[str, Any]:
    return {
        "name": "tokenizer.json",
        "sha256": hashlib.sha256(definition).hexdigest(),
        "json_zlib_base64": base64.b64encode(zlib.compress(definition)).decode("ascii"),
    }


END = {"id": 2, "content": "</s>", "special": True}
END |= dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
DEFINITION = {"version": "1.0", "added_tokens": [END], "model": MODEL}
SPECS: dict[str, Any] = {
    "a list": [],
    "null": None,
    "text": "gpt2",
    "empty": {},
    "a name that is a list": {"name": []},
    "a name that is unknown": {"name": "\x1b[31m" * 1000},
    "no alphabet": {"name": "char"},
    "an alphabet that is a number": {"name": "char", "alphabet": 5},
    "an alphabet that is a list": {"name": "char", "alphabet": ["a", "b"]},
    "an alphabet out of order": {"name": "char", "alphabet": "ba"},
    "an alphabet with a letter twice": {"name": "char", "alphabet": "aa"},
    "an alphabet with half a character": {"name": "char", "alphabet": "\ud800"},
    "no definition": {"name": "tokenizer.json"},
    "a definition that is a number": {"name": "tokenizer.json", "sha256": "", "json_zlib_base64": 5},
    "a definition that is no base64": {"name": "tokenizer.json", "sha256": "", "json_zlib_base64": "é"},
    "a definition that is no zlib": {"name": "tokenizer.json", "sha256": "", "json_zlib_base64": "AAAA"},
    "a definition that is no text": pack(b"\xff" * 100_000),
    "a definition that is no JSON": pack(b"hello"),
    "a definition that is deep": pack(b"[" * 100_000),
    "a definition without a model": pack(b"{}"),
    "a definition without an end": pack(json.dumps({**DEFINITION, "added_tokens": []}).encode()),
    "a definition with negative ids": pack(json.dumps({**DEFINITION, "model": {**MODEL, "vocab": {"a": -1}}}).encode()),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_tokenizer_that_is_none(spec: Any) -> None:
    if isinstance(spec, dict) and "json_zlib_base64" in spec:
        pytest.importorskip("tokenizers")
    with pytest.raises(UserError) as error:
        restore_tokenizer(spec, "somewhere")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700


def test_a_tokenizer_that_unpacks_to_more_than_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.data.tokenizers.tokenizer_json.MAX_BYTES", 1000)
    with pytest.raises(UserError, match="corrupt"):
        restore_tokenizer(pack(json.dumps(DEFINITION).encode() + b" " * 2000), "somewhere")


def test_a_tokenizer_whose_library_panics(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(UserError, match="cannot read"):
        restore_tokenizer(pack(json.dumps({**DEFINITION, "normalizer": normalizer}).encode()), "somewhere")
    capfd.readouterr()  # what the library itself has to say


def test_a_tokenizer_that_would_pad_or_cut_texts_does_not() -> None:
    pytest.importorskip("tokenizers")
    padding = {"strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    definition = {**DEFINITION, "padding": padding, "truncation": truncation}
    assert restore_tokenizer(pack(json.dumps(definition).encode()), "somewhere").encode("abba").tolist() == [0, 1, 1, 0]


def test_a_tokenizer_that_cannot_encode_a_text_says_so() -> None:
    pytest.importorskip("tokenizers")
    words = {"type": "WordPiece", "vocab": {"</s>": 2}, "unk_token": "?", "continuing_subword_prefix": "##"}
    definition = {**DEFINITION, "model": {**words, "max_input_chars_per_word": 9}}
    tokenizer = restore_tokenizer(pack(json.dumps(definition).encode()), "somewhere")
    with pytest.raises(UserError, match="failed to encode"):
        tokenizer.encode("hello")

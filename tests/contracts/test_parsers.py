"""Whatever is in a file, its reader returns, or says in one sentence what is wrong, at once and in little memory.

One module parses each format. A fuzzer damages small valid files and gives them to it, and to the verbs that read them:
a few cases in every test run, thousands behind the marker `torture`. GPTMILL_FUZZ=17:18 repeats case 17 alone.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gptmill
from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_json
from gptmill.config.recipes import load_recipe
from gptmill.config.requests import LoadingOptions, ReadingOptions
from gptmill.data.shards.arrays import find_array
from gptmill.data.shards.opening import open_shards
from gptmill.data.shards.scores import read_scores, score_by_length, write_scores
from gptmill.data.shards.verification import verify_corpus
from gptmill.data.sources import open_documents, resolve_source
from gptmill.data.tokenizers import build_tokenizer
from gptmill.evals.task import load_task_file
from gptmill.inference.huggingface_folder import read_hf_folder
from gptmill.inference.importing.gguf_model import read_gguf
from gptmill.inference.opening import open_model
from gptmill.runs.checkpoints import tensor_files
from gptmill.runs.checkpoints.saved_tensors import open_tensors
from gptmill.runs.checkpoints.tensor_files import load_tensors, write_tensors

SOURCE = Path(gptmill.__file__).parent
# What parses, and the modules that may use it.
PARSERS = {
    "tomllib": "config/toml_text.py",
    "json.load": "",
    "json.loads": "config/json_text.py",
    "json.JSONDecoder": "",
    "np.load": "",
    "np.lib.format.read_magic": "",
    "np.lib.format.open_memmap": "",
    "np.memmap": "inference/importing/gguf_file.py",
    "np.fromfile": "data/shards/verification.py inference/importing/llmc_file.py",
    "mmap.mmap": "data/shards/arrays.py",
    "safe_open": "runs/checkpoints/saved_tensors.py",
    "load_file": "runs/checkpoints/tensor_files.py",
    "pyarrow.parquet.ParquetFile": "data/sources/formats/parquet.py",
    "GGUFReader": "inference/export/gguf_reading.py",  # of what was exported just now
    "torch.load": "inference/importing/nanogpt_file.py",  # of weights only
    "pickle.load": "",
    "pickle.loads": "",
}
VALUE = re.compile(rb"-?[0-9]{1,20}(?:\.[0-9]{1,20})?|\"[^\"\n]{0,80}\"|true|false|null")
MAX_CASE_BYTES = 1 << 18
STEP = "runs/straight/checkpoints/step_000040"
CPU_SECONDS = 2.0
REPEAT = "repeat it with GPTMILL_FUZZ={}:{} pytest -m torture"
MEMORY_BYTES = 1 << 30
TASK = 'title = "t"\nkind = "last_word"\ntext = "{text}"\nfile = "data.jsonl"\nmetrics = ["acc"]\n'
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}  # fmt: skip
HOSTILE = (
    b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000, b"-1", b"1e999", b"nan", b"9223372036854775808", b"null", b"''",
    b'""', b"[" * 5000, b"[" * 70 + b"]" * 70, b'{"a":' * 2000, b"{a=" * 2000, b"[[" * 2000, b"a." * 2000, b'"""',
    b"\\", b'"', b"\xff\xfe", b"\xf0\x9f", b"\0" * 16, b"\x1b]0;x\x07\x1b[2J", "\u2028\x85".encode(), b"\r",
    b"\n" * 300, b"#", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\xff\xff\xff\x7f", (1 << 40).to_bytes(8, "little"),
    b"__metadata__",
)  # fmt: skip


VALUES = (
    b"-1",
    b"0",
    b"1.5",
    b"1e999",
    b"9223372036854775807",
    b"9" * 400,
    b"true",
    b'""',
    b'"x"',
    b"[]",
    b"{}",
    b"[1]",
)


def test_only_the_gates_parse() -> None:
    sign = re.compile("|".join([*map(re.escape, PARSERS), "from (json|numpy|mmap|pickle|pyarrow) import"]))
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
        if not sign.search(text):
            continue
        used: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{each.name}" for each in node.names} | {each.name for each in node.names}
            elif isinstance(node, ast.Import):
                used |= {each.name for each in node.names}
            elif isinstance(node, ast.Attribute):
                used.add(ast.unparse(node))
        for parser, allowed in PARSERS.items():
            assert parser not in used or name in allowed.split(), f"{name} uses {parser}, not {allowed or 'a gate'}"


def mutate(data: bytes, numbers: random.Random) -> bytes:
    """Damages a file in one place or several, often near its start or end, where headers are."""
    for _ in range(numbers.choice((1, 1, 1, 2, 5))):
        far = numbers.randrange(numbers.choice((12, 400, len(data) + 1)))
        start = max(0, min(far, len(data) - 1 if numbers.random() < 0.7 else len(data) - far))
        stop = start + numbers.choice((1, 1, 4, 8, 60))
        chunk, word = data[start:stop], numbers.choice(HOSTILE)
        new = numbers.choice((
            bytes(byte ^ 1 << numbers.randrange(8) for byte in chunk[:1]) + chunk[1:], bytes(len(chunk)), b"",
            chunk * 2, chunk * 2000, word, word + chunk,
        ))  # fmt: skip
        choice = numbers.randrange(6)
        if choice == 0:
            data = data[:start]
        elif choice <= 2 and (spans := [match.span() for match in VALUE.finditer(data)]):
            begin, end = numbers.choice(spans)
            data = data[:begin] + numbers.choice((word, *VALUES)) + data[end:]
        elif choice == 3 and (lines := data.split(b"\n"))[1:]:
            line = numbers.randrange(len(lines))
            times = min(numbers.choice((0, 2, 3000)), MAX_CASE_BYTES // (len(lines[line]) + 1))
            data = b"\n".join([*lines[:line], *[lines[line]] * times, *lines[line + 1 :]])
        else:
            data = data[:start] + new + data[stop:]
    return data[:MAX_CASE_BYTES]


def forge(folder: Path) -> None:
    """Makes the checksums of a checkpoint fit what was damaged, as whoever sends one can."""
    path = folder / STEP / "checkpoint.json"
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        content = json.loads(path.read_bytes())
        for name, entry in content["files"].items():
            file = (folder / STEP / name).read_bytes()
            entry |= {"sha256": hashlib.sha256(file).hexdigest(), "bytes": len(file)}
        del content["sha256"]
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_tensor_file(path: Path) -> None:
    with contextlib.suppress(UserError):
        for tensor in open_tensors([path]).values():
            tensor.read()
    load_tensors(path)


def read_documents(path: Path) -> None:
    for file in resolve_source([str(path)], ReadingOptions()).files:
        with contextlib.suppress(UserError), open_documents(file, ReadingOptions()) as documents:
            list(documents)
        with open_documents(file, ReadingOptions(on_error="skip")) as documents:
            list(documents)


def verify(path: Path) -> None:
    open_shards(path)
    assert isinstance(verify_corpus(path, lambda _done, _total: None), list)


def call(*arguments: str) -> Callable[[Path], None]:
    """A command line, in process; what it says must be a sentence."""

    def run(folder: Path) -> None:
        with contextlib.chdir(folder):
            said = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                code = run_guarded(list(arguments))
        assert code in (0, 1, 2), code
        if code == 2:
            assert said.getvalue().startswith("gptmill: ")

    return run


CPU = LoadingOptions(device="cpu")
RUN_VERBS = [
    call("runs", "list"),
    call("runs", "compare", "straight", "whole"),
    call("checkpoints", "list", "straight"),
    call("checkpoints", "history", "straight"),
    call("report", "straight", "--format", "json", "--out", "-"),
    call("data", "show", "--run", "straight", "--step", "3"),
]
DATA_VERBS = [call("data", "info", "words"), call("data", "show", "words"), call("data", "verify", "words")]
# Each kind of file, with its readers: at each damage, the first, which is the gate or close to it, and one other.
KINDS: dict[str, tuple[str, list[Callable[[Path], object]]]] = {
    "config": ("runs/straight/config.toml", [
        lambda folder: load_recipe(str(folder / "runs/straight/config.toml")), *RUN_VERBS,
        call("config", "show", "runs/straight/config.toml"),
    ]),
    "task": ("task.toml", [lambda folder: load_task_file(folder / "task.toml")]),
    "manifest": ("words/manifest.json", [lambda folder: verify(folder / "words"), *DATA_VERBS]),
    "shard": ("words/train_000000.npy", [lambda folder: verify(folder / "words"), *DATA_VERBS]),
    "starts": ("words/documents/train_000000.npy", [lambda folder: verify(folder / "words"), *DATA_VERBS]),
    "origins": ("words/origins/train_000000.npy", [call("data", "show", "words")]),
    "scores": ("words/scores/length.npy", [lambda folder: read_scores(open_shards(folder / "words"), "length")]),
    "json": ("a.json", [lambda folder: read_documents(folder / "a.json")]),
    "jsonl": ("a.jsonl", [lambda folder: read_documents(folder / "a.jsonl")]),
    "parquet": ("a.parquet", [lambda folder: read_documents(folder / "a.parquet")]),
    "events": ("runs/straight/events.jsonl", RUN_VERBS),
    "ledger": ("runs/straight/ledger.jsonl", RUN_VERBS),
    "checkpoint": (f"{STEP}/checkpoint.json", [
        lambda folder: open_model(str(folder / STEP), CPU), *RUN_VERBS, call("checkpoints", "verify", "straight"),
    ]),
    "safetensors": (f"{STEP}/model.safetensors", [
        lambda folder: read_tensor_file(folder / STEP / "model.safetensors"),
        lambda folder: open_model(str(folder / STEP), CPU), call("checkpoints", "compare", "straight", "40", "32"),
    ]),
    "gguf": ("model.gguf", [lambda folder: read_gguf(folder / "model.gguf").build_tokenizer()]),
    "tokenizer": ("hf/tokenizer.json", [lambda folder: build_tokenizer(str(folder / "hf"), ()).encode("abba")]),
    "hf": ("hf/config.json", [lambda folder: read_hf_folder(folder / "hf")]),
    "index": ("hf/model.safetensors.index.json", [lambda folder: read_hf_folder(folder / "hf")]),
}  # fmt: skip


@pytest.fixture
def home(straight: Path, tmp_path: Path) -> Path:
    """A small valid file of every kind."""
    shutil.copytree(straight, tmp_path / "runs/whole", symlinks=True)
    write_scores(tmp_path / "words", "length", score_by_length(open_shards(tmp_path / "words")))
    (tmp_path / "task.toml").write_text(TASK, encoding="utf-8")
    records = [{"id": number, "text": f"text {number}", "meta": {"a": [1.5, None]}} for number in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    # pyarrow ends the process where its newest statistics, those of sizes, are damaged.
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=8, write_statistics=False)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for add, value in (("context_length", 16), ("embedding_length", 32), ("block_count", 1), ("head_count", 2),
                       ("feed_forward_length", 32), ("layer_norm_rms_eps", 1e-5), ("vocab_size", 4),
                       ("tokenizer_model", "gpt2"), ("tokenizer_pre", "gpt-2"), ("token_merges", ["a b"]),
                       ("token_list", ["a", "b", "ab", "<|endoftext|>"]), ("eos_token_id", 3)):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    (tmp_path / "hf").mkdir()
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 4,
        "intermediate_size": 8,
    }
    config = {"model_type": "llama", **sizes, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    (tmp_path / "hf/config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    index = {"metadata": {}, "weight_map": {"w": "w.safetensors"}}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tensors(tmp_path / "hf/w.safetensors", {"w": torch.zeros(2)})
    for _path, readers in KINDS.values():
        readers[0](tmp_path)
    return tmp_path


def fuzz(home: Path, kind: str, cases: range) -> None:
    name, readers = KINDS[kind]
    path = home / name
    whole, manifest = path.read_bytes(), (home / STEP / "checkpoint.json").read_bytes()
    for case in cases:
        numbers = random.Random(f"{kind} {case}")
        path.write_bytes(mutate(whole, numbers))
        if STEP in name and numbers.random() < 0.9:
            forge(home)
        for read in {readers[0], numbers.choice(readers)}:
            started = time.process_time()
            try:
                read(home)
            except UserError as error:
                is_sentence = all(line.startswith("  - ") for line in str(error).split("\n")[1:])
            except OSError as error:
                is_sentence = error.errno is not None  # else it is a parser's
            except BaseException as error:
                pytest.fail(f"{kind} {case}: {error!r}; {REPEAT.format(case, case + 1)} -k {kind}")
            else:
                is_sentence = True
            assert is_sentence, f"{kind} {case}"
            seconds = time.process_time() - started
            assert seconds < CPU_SECONDS, f"{kind} {case} took {seconds:.1f} s"
        (home / STEP / "checkpoint.json").write_bytes(manifest)
    path.write_bytes(whole)


def test_a_few_damages_of_each_kind(home: Path) -> None:
    for kind in KINDS:
        fuzz(home, kind, range(2))


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damages(kind: str, home: Path) -> None:
    first, last = map(int, os.environ.get("GPTMILL_FUZZ", "0:800").split(":"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(home, kind, range(first, last))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY_BYTES


HARD_TOML = {
    "a long integer": "seed = " + "9" * 100_000,
    "a long hexadecimal integer": "[model]\nnum_layers = 0x" + "f" * 100_000,
    "an integer of 400 digits": f"[model]\nnum_layers = {10**400}",
    "brackets": "seed = " + "[" * 100_000,
    "braces": "seed = " + "{a=" * 50_000,
    "long keys": f"[{'a.' * 60_000}a]\n" + "".join(f"k{number} = 1\n" for number in range(10_000)),
    "long quoted keys": "[" + '"]".' * 30_000 + "a]\n" + "".join(f"k{number} = 1\n" for number in range(10_000)),
    "deep tables": f"{'.'.join(['a'] * 15)} = {'{b.c=' * 40}1{'}' * 40}",
    "many keys": "[model]\n" + "".join(f"num_layer{number} = 1\n" for number in range(15_000)),
    "many megabytes": "# " + "x" * (1 << 22),
    "quotes": '"""' * 80_000,
    "escapes": "'''\\\"\"\"" * 30_000,
}


@pytest.mark.parametrize("case", HARD_TOML)
def test_toml_that_is_hard_to_parse(case: str, tmp_path: Path) -> None:
    for name, read in (("config.toml", lambda path: load_recipe(str(path))), ("task.toml", load_task_file)):
        (tmp_path / name).write_text(HARD_TOML[case], encoding="utf-8")
        started = time.process_time()
        with pytest.raises(UserError, match=re.escape(str(tmp_path / name))) as refused:
            read(tmp_path / name)
        assert time.process_time() - started < CPU_SECONDS
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["9" * 5000, str(2**64), '{"a": [' + str(-(10**30)) + "]}", "[" * 65 + "]" * 65])
def test_json_that_is_hard_to_use(text: str) -> None:
    with pytest.raises(ValueError, match=r"too many digits|more than 64 bits|nested too deeply"):
        parse_json(text)
    assert parse_json(f"[{2**64 - 1}, {'[' * 60}{']' * 60}]")[0] == 2**64 - 1


def test_every_damaged_byte_of_an_npy_header_is_a_sentence(tmp_path: Path) -> None:
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    np.save(path, np.arange(7, dtype=np.uint16))
    whole = path.read_bytes()
    assert find_array(path).map().tolist() == list(range(7))
    for start in range(128):
        for damage in (b"\0", b"\0" * 16, b"\xff", b"9", b"("):
            other.write_bytes(whole[:start] + damage + whole[start + len(damage) :])
            with contextlib.suppress(ValueError):  # the padding may be anything
                assert find_array(other).length == 7
    for dtype in ("O", "V8", "<U3", "<M8[s]"):
        np.save(path, np.zeros(3, dtype), allow_pickle=True)
        with pytest.raises(ValueError, match="does not describe an array of numbers"):
            find_array(path)


def test_a_parquet_file_with_two_text_columns(tmp_path: Path) -> None:
    column = pa.array(["one"])
    pq.write_table(pa.Table.from_arrays([column, column], ["text", "text"]), tmp_path / "a.parquet")
    (file,) = resolve_source([str(tmp_path / "a.parquet")], ReadingOptions()).files
    said = r"a\.parquet has 2 columns 'text'; write it again with one of them"
    with pytest.raises(UserError, match=said), open_documents(file, ReadingOptions()) as documents:
        list(documents)


def test_a_safetensors_file_of_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MAX_TENSORS", 10)
    write_tensors(tmp_path / "model.safetensors", {str(number): torch.zeros(0) for number in range(11)})
    for read in (lambda path: open_tensors([path]), load_tensors):
        with pytest.raises(UserError, match="it has more than 10 tensors"):
            read(tmp_path / "model.safetensors")


def test_shards_by_the_thousand_are_compared_in_linear_time(tmp_path: Path) -> None:
    count = 4000  # compared each with each, they take half a minute
    parts = [[[0, number], [0, number], [1, 1]] for number in range(count)]
    shards = json.dumps({"w": [[1, count], parts]})
    entries = {
        "__metadata__": {"shards": shards},
        "w": {"dtype": "U8", "shape": [1, count], "data_offsets": [0, count]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(count))
    started = time.process_time()
    assert open_tensors([tmp_path / "w.safetensors"])["w"].shape == (1, count)
    assert time.process_time() - started < CPU_SECONDS


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def put_digits(path: Path) -> None:
    path.write_bytes(b"seed = " + b"9" * 100_000)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("put", [put_pipe, put_device, put_endless, Path.mkdir, put_digits])
def test_one_damaged_run_leaves_the_others_listed(
    put: Callable[[Path], None],
    straight: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever lies in place of one of its files, or of all of them."""
    monkeypatch.chdir(tmp_path)
    step = Path(STEP).relative_to("runs/straight")
    names = ["config.toml", "events.jsonl", "ledger.jsonl", "log.txt", ".lock", "checkpoints/latest",
             f"{step}/checkpoint.json", f"{step}/model.safetensors", "heartbeat/rank_00000.json"]  # fmt: skip
    for number, chosen in enumerate([[name] for name in names] + [names]):
        run = tmp_path / f"runs/damaged_{number}"
        shutil.copytree(straight, run, symlinks=True)
        for name in chosen:
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).unlink(missing_ok=True)
            put(run / name)
    assert run_guarded(["runs", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[2:-1]].count("straight") == 1
    assert len([line for line in listed if line.startswith("damaged_")]) == len(names) + 1
    for command in ("checkpoints list", "checkpoints history", "checkpoints prune", "runs compare straight"):
        assert run_guarded([*command.split(), f"damaged_{len(names)}"]) in (0, 2)
    assert max(map(len, capsys.readouterr().err.splitlines()), default=0) < 1000


def test_a_checkpoint_with_a_number_that_no_model_has(straight: Path) -> None:
    home = straight.parent.parent
    path = home / STEP / "checkpoint.json"
    text = path.read_text(encoding="utf-8")
    for number in (10**400, 10**30, 2**62):
        path.write_text(re.sub(r'"num_layers": \d+', f'"num_layers": {number}', text), encoding="utf-8")
        forge(home)
        with pytest.raises(UserError, match=r"num_layers|layers"):
            open_model(str(home / STEP), CPU)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["events.jsonl", "ledger.jsonl", "log.txt", "train.log", ".lock"])
def test_a_resume_never_waits_for_a_pipe(
    name: str, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (straight / name).unlink(missing_ok=True)
    put_pipe(straight / name)
    code = run_guarded(["train", "--run_name", "straight", "--resume", "latest", "--max_steps", "41"])
    printed = capsys.readouterr().err
    assert code in (0, 2), printed
    assert name == ".lock" or name in printed  # which is locked as it is
    assert "Traceback" not in printed

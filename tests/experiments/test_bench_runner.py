"""What gptmill bench measures: its rows, its data, its table, and what becomes of rows that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptmill.config.errors import UserError
from gptmill.config.plugins import load_plugins
from gptmill.config.recipes import make_config
from gptmill.config.requests import BenchRequest
from gptmill.config.validation import find_problems
from gptmill.data.shards.opening import open_shards
from gptmill.experiments import child_run
from gptmill.experiments.bench import runner as bench_module
from gptmill.experiments.bench.ablations import (
    ALL,
    BF16_KEY,
    CUDA,
    FP8,
    MIXED,
    NAIVE,
    NAIVE_KEY,
    PLAIN,
    ROWS,
    Row,
    choose_rows,
)
from gptmill.experiments.bench.environment import read_clocks
from gptmill.experiments.bench.measurement import Measurement, RowResult
from gptmill.experiments.bench.random_corpus import write_random_corpus
from gptmill.experiments.bench.result_table import describe_measurement, make_table
from gptmill.experiments.bench.runner import adapt_precision, list_capabilities, run_bench
from gptmill.models.gpt import build_gpt

BASES = {row.key: row.flags for row in ROWS}
NAMED = {row.key: row for row in ROWS}

# A training in name alone: it logs some steps, each of which it says took as long as its flags tell, and waits.
TRAINING = """
import json, sys, time
from pathlib import Path

from gptmill.runs.events import RunStarted, StepLogged, to_json

options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:] if word.startswith("--"))
name, run = options["run_name"], Path(options["logdir"]) / options["run_name"]
with (Path(sys.argv[1]) / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(options) + "\\n")
if int(options["mini_batch_size"]) > 2:
    sys.exit("gptmill: out of memory on cuda:0: one micro-batch does not fit")
if "compile" in options:
    sys.exit("RuntimeError: no compiler")
run.mkdir()
tokens = int(options["total_batch_size"])
events = [RunStarted(0, "r", 1, tokens, 1, "a device", options["precision"], 1, "c", "t", "0", "2", None, code="c0de")]
for step in range(1, 9):
    seconds = 9.0 if step < 3 else 0.5 if options["precision"] == "bf16" else 1.0
    events.append(StepLogged(step, 0.0, 2.0, 0.1, 1.0, tokens / seconds, 0.0, data_wait=0.25, seconds=seconds,
                             memory_gb=2.0, mfu=0.5))
(run / "events.jsonl").write_text("".join(to_json(event) + "\\n" for event in events))
time.sleep(300)
"""


def make_measurement(tokens_per_second: float, memory_gb: float = 4.0, **more: Any) -> Measurement:
    return Measurement(tokens_per_second, 0.1, memory_gb, 0.001, 12.5, **more)


def test_every_row_differs_from_what_it_is_compared_with() -> None:
    assert len(NAMED) == len(ROWS)
    for row in ROWS[1:]:
        assert row.baseline in NAMED
        base = NAMED[row.baseline]
        assert (row.flags, row.micro_batches) != (base.flags, base.micro_batches), row.key


def test_all_together_holds_what_is_measured_alone_and_lacks_what_is_taken_away() -> None:
    for row in ROWS:
        changed = {
            name: value for name, value in row.flags.items() if row.baseline and value != BASES[row.baseline].get(name)
        }
        if row.key.startswith("no-"):
            (name,) = changed
            assert row.flags[name] == NAIVE[name]
            assert any(alone.flags[name] == ALL[name] for alone in ROWS if alone.baseline in (NAIVE_KEY, BF16_KEY))


@pytest.mark.usefixtures("no_new_parts")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_every_row_is_a_training_that_can_be_done(row: Row) -> None:
    load_plugins(row.flags.get("plugin"))
    config = make_config("gpt2-124m", {**row.flags, "mini_batch_size": 32 // row.micro_batches})
    assert find_problems(config) == []


@pytest.mark.usefixtures("no_new_parts")
def test_separate_projections_compute_what_the_packed_one_does() -> None:
    load_plugins(PLAIN["plugin"])
    tiny = {"num_layers": 1, "embd_size": 16, "num_heads": 4, "num_kv_heads": 2, "positions": "rope", "qk_norm": True}
    packed, separate = (
        build_gpt(make_config(None, {**tiny, "attention": attention}).model, 64, seed=0)
        for attention in ("softmax", "separate_qkv")
    )
    weights = packed.state_dict()
    for name in ("weight", "bias"):
        parts = weights.pop(f"blocks.0.attention.qkv.{name}").split((16, 8, 8))
        weights |= {
            f"blocks.0.attention.{part}.{name}": value
            for part, value in zip(("query", "key", "value"), parts, strict=True)
        }
    separate.load_state_dict(weights)
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(separate(tokens), packed(tokens))


def test_rows_that_the_machine_cannot_do_are_skipped_by_name() -> None:
    rows, skipped = choose_rows(None, set())
    assert {row.key for row in rows} == {row.key for row in ROWS if not row.requires}
    assert skipped == [
        "skipped, since they need an NVIDIA GPU: graphs, head, kernels, no-kernels, all+resident",
        "skipped, since they need an NVIDIA GPU with fp8 tensor cores: fp8, all+fp8",
        "skipped, since they need a CPU with bf16 instructions (every row is fp32): bf16, no-bf16",
    ]
    assert choose_rows(None, {CUDA, FP8, MIXED}) == (list(ROWS), [])


def test_rows_are_chosen_by_their_keys() -> None:
    rows, skipped = choose_rows("all, naive,fp8", {CUDA})
    assert [row.key for row in rows] == ["naive", "all"]
    assert skipped == ["skipped, since they need an NVIDIA GPU with fp8 tensor cores: fp8"]
    with pytest.raises(UserError, match=r"there is no row 'complie' \(did you mean compile\?\)"):
        choose_rows("naive,complie", set())


def test_the_table_compares_each_row_with_its_own_base() -> None:
    results = [
        RowResult(NAMED["naive"], make_measurement(1000, 10.0, mfu=0.101)),
        RowResult(NAMED["bf16"], make_measurement(1500, 5.0)),
        RowResult(NAMED["compile"], None, "out of memory"),
        RowResult(NAMED["head"], make_measurement(3000, 4.0)),
        RowResult(NAMED["all"], make_measurement(12_000, 2.0, mfu=0.6)),
        RowResult(NAMED["no-bf16"], make_measurement(3000, 3.0)),
        RowResult(NAMED["no-data"], make_measurement(12_000, 1.999)),
        RowResult(NAMED["all+accumulate"], make_measurement(9000, 1.0)),
    ]
    assert make_table(results) == [
        "                                tokens/s       speed   memory GB      memory         MFU",
        "naive                              1,000           -       10.00           -       10.1%",
        "each alone, against naive",
        "  mixed precision                  1,500       1.50x        5.00        -50%           -",
        "  compile                     out of memory",
        "with mixed precision, against mixed precision alone",
        "  fused linear cross-entropy       3,000       2.00x        4.00        -20%           -",
        "all together                      12,000      12.00x        2.00        -80%       60.0%",
        "one removed or added, against all together",
        "  without mixed precision          3,000       0.25x        3.00        +50%           -",
        "  without data prefetching        12,000       1.00x        2.00         +0%           -",
        "  with 4 micro-batches             9,000       0.75x        1.00        -50%           -",
    ]


def test_without_its_base_a_row_stands_for_itself() -> None:
    base = RowResult(NAMED["naive"], None, "out of memory")
    (line,) = [line for line in make_table([base, RowResult(NAMED["bf16"], make_measurement(1500))]) if "mixed" in line]
    assert line.split() == ["mixed", "precision", "1,500", "-", "4.00", "-", "-"]


def test_steps_that_vary_are_warned_of() -> None:
    quiet, noisy = make_measurement(10, spread=0.02), make_measurement(10, spread=0.33)
    assert len(make_table([RowResult(NAMED["naive"], quiet)])) == 2
    assert "up to 33%" in make_table([RowResult(NAMED["naive"], noisy)])[-1]


def test_one_measurement_is_told_in_full() -> None:
    clocks = {"sm_mhz": 1980.0, "max_sm_mhz": 1980.0, "watts": 640.4}
    measured = make_measurement(
        583_210, mfu=0.621, tflops=490.5, tokens_per_step=524_288, precision="bf16, compiled", clocks=clocks
    )
    assert describe_measurement(measured, 30, 10) == [
        "tokens/s              583,210 (median of 30 steps of 524,288 tokens, after 10 warm-up steps)",
        "step                  100.0 ms",
        "MFU                   62.1% (490 TFLOP/s)",
        "peak memory           4.00 GB",
        "start to first step   12.5 s, compile cache hit",
        "waiting for data      0.10% of the time",
        "clocks                1,980 MHz, of max 1,980, 640 W",
    ]


def test_clocks_are_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1830, 1980, [N/A], 512.25, 60'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_clocks() == {"sm_mhz": 1830.0, "max_sm_mhz": 1980.0, "watts": 512.25, "celsius": 60.0}
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert read_clocks() == {}


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_a_random_corpus_opens_as_any_other(tmp_path: Path, tokenizer: str) -> None:
    for name in ("one", "two"):
        write_random_corpus(tmp_path / name, tokenizer, 50_000, 300)
    shards, again = open_shards(tmp_path / "one", tokenizer), open_shards(tmp_path / "two")
    tokens, vocab_size = np.concatenate(shards.train[:]), shards.tokenizer.vocab_size
    assert shards.manifest.corpus_sha256 == again.manifest.corpus_sha256
    assert (shards.manifest.train.tokens, shards.manifest.val.tokens, len(tokens)) == (50_000, 300, 50_000)
    assert tokens.max() < vocab_size
    assert len(np.unique(tokens)) > min(vocab_size, 5_000) // 2
    assert np.all(tokens[shards.train_starts[0]] == shards.tokenizer.end_of_text)


class Trained:
    """A bench whose trainings are in name alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.said: list[str] = []
        (folder / "training.py").write_text(TRAINING, encoding="utf-8")
        monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, str(folder / "training.py"), str(folder)))
        monkeypatch.setattr(bench_module, "is_slow", lambda _precision, _device: False)  # whatever CPU this is
        monkeypatch.chdir(folder)

    def run(self, flags: dict[str, Any] | None = None, **request: Any) -> bool:
        return run_bench("demo", {"device": "cpu", **(flags or {})}, BenchRequest(**request), self.said.append)

    @property
    def calls(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return Trained(tmp_path, monkeypatch)


def test_what_does_not_fit_or_fails_is_a_row_and_the_bench_goes_on(trained: Trained) -> None:
    assert trained.run(ablate=True, rows="naive,bf16,compile,accumulate", steps=4, json="out.json")
    record = json.loads(Path("out.json").read_text(encoding="utf-8"))
    naive, mixed, compiled, accumulated = record["rows"]
    assert [call["mini_batch_size"] for call in trained.calls] == ["8", "4", "2", "2", "2"]  # halved until it fits
    assert {call["total_batch_size"] for call in trained.calls[2:]} == {str(2 * 96)}
    assert (naive["tokens_per_second"], mixed["tokens_per_second"]) == (2 * 96, 2 * 96 / 0.5)  # without the warm-up
    assert (naive["memory_gb"], naive["mfu"], naive["data_wait"], naive["spread"]) == (2.0, 0.5, 0.25, 0.0)
    assert "RuntimeError: no compiler" in compiled["problem"]
    assert accumulated["problem"] == "needs a mini_batch_size divisible by 4, not 2"
    assert (record["mini_batch_size"], record["total_batch_size"], record["steps"]) == (2, 2 * 96, 4)
    assert any("2.00x" in line for line in trained.said)
    assert not Path("runs").exists()


def test_a_step_as_large_as_the_user_says_stays_so(trained: Trained) -> None:
    assert trained.run({"total_batch_size": 1536}, ablate=True, rows="naive", steps=4)
    assert {call["total_batch_size"] for call in trained.calls} == {"1536"}


def test_a_bench_of_which_nothing_can_be_measured_says_so(trained: Trained) -> None:
    assert not trained.run(ablate=True, rows="compile", steps=4)
    with pytest.raises(UserError, match="out of memory"):
        trained.run(steps=4)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flags", "request_", "message"),
    [
        ({"max_steps": 5}, {}, "--max_steps is set by the bench itself"),
        ({"compile": True}, {"ablate": True}, "--compile is varied by the rows of --ablate"),
        ({}, {"rows": "naive"}, "--rows selects rows of --ablate"),
        ({}, {"steps": 0}, "must be at least 1"),
        ({}, {"json": "nowhere/out.json"}, "cannot write this file"),
    ],
)
def test_what_a_bench_cannot_do_is_said_at_once(
    trained: Trained, flags: dict[str, Any], request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        trained.run(flags, **request_)


def test_mixed_precision_is_one_that_the_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    for capability, precision, abilities in (
        ((7, 5), "fp16", {CUDA, MIXED}),
        ((8, 0), "bf16", {CUDA, MIXED}),
        ((9, 0), "bf16", {CUDA, FP8, MIXED}),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert adapt_precision(ALL, gpu)["precision"] == precision
        assert list_capabilities(gpu) == abilities
    assert adapt_precision(NAIVE, gpu) == NAIVE


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_cpu_that_only_emulates_bf16_is_measured_in_fp32(monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(bench_module, "is_slow", lambda _precision, _device: is_slow)
    assert adapt_precision(ALL, cpu) == (ALL | {"precision": "fp32"} if is_slow else ALL)
    assert list_capabilities(cpu) == (set() if is_slow else {MIXED})

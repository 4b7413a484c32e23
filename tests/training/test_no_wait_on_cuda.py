"""On a GPU, nothing in a training step waits for the device, and Metrics waits for the previous step only."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_config, make_reader, make_shards

from gptmill.config.run import GuardConfig
from gptmill.data.batches.data_loader import open_data_loader
from gptmill.data.batches.samplers import build_sampler
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards
from gptmill.models.fused.fp8_layers import Fp8Linear
from gptmill.models.fused.fused_gpt import FusedGPT
from gptmill.runs.events import Event, StepLogged
from gptmill.runtime.precision import FP8_CAPABILITY, set_matmul_precision
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.timing import DeviceTimestamp
from gptmill.runtime.world import World
from gptmill.training.metrics import Metrics
from gptmill.training.plan import make_plan
from gptmill.training.skip_ranges import make_starts
from gptmill.training.spike_detector import SpikeDetector
from gptmill.training.state import TrainState, build_state
from gptmill.training.step import train_step
from gptmill.training.step_stats import StepStats

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="no GPU with bf16"
)
WARM_STEPS = 2  # libraries wait when they start, and memory is allocated for the first time
LAST_STEP = 8
FIELDS: dict[str, Any] = {
    "device": "cuda",
    "precision": "bf16",
    "num_layers": 2,
    "embd_size": 64,
    "num_heads": 2,
    "context_length": 256,
    "total_batch_size": 8192,
    "mini_batch_size": 16,  # more tokens than the embedding's backward has its small kernel for
    "max_steps": LAST_STEP,
    "max_lr": 3e-3,
}
MODERN: dict[str, Any] = {
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rope",
    "num_kv_heads": 1,
    "qk_norm": True,
    "feed_forward": "swiglu",
}
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY, reason="no GPU with fp8"
)


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


@pytest.fixture(autouse=True)
def _keep_settings() -> Iterator[None]:
    """fp32 matmuls as they were before, and nothing compiled for another test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.compiler.reset()


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """An error for every operation that makes the host wait, of all threads: the feed's and autograd's too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is noticed
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(shards: TokenShards, **fields: Any) -> tuple[TrainState, list[Event]]:
    """A training as the loop does it, forbidden to wait once it is warm; its state, and what was logged of it."""
    config, corpora = make_config(**{**FIELDS, **fields}), Corpora((shards,))
    world = World(0, 1, torch.device("cuda", torch.cuda.current_device()))
    sampler = build_sampler(config, corpora)
    plan = make_plan(config, sampler, corpora.tokenizer, world)
    set_matmul_precision(plan.precision)
    state = build_state(config, plan, world)
    logged: list[Event] = []
    metrics = Metrics(plan, 1, state.spike_detector, logged.append)
    starts = make_starts([], 0, 0, plan, 0, 1, sampler.samples_per_batch)
    with open_data_loader(sampler, make_reader(corpora), world.device, starts) as loader:
        while state.step < LAST_STEP:
            with forbid_waiting() if state.step >= WARM_STEPS else nullcontext():
                stats = train_step(state, loader, config, plan, world, StopFlag())
            metrics.push(stats)
        metrics.flush()
    return state, logged


def assert_trained(logged: list[Event]) -> None:
    losses = [event.loss for event in logged if isinstance(event, StepLogged)]
    assert len(losses) == LAST_STEP
    assert losses[-1] < losses[0]


def test_the_check_notices_a_wait() -> None:
    values = torch.ones(2, device="cuda")
    with forbid_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        values.sum().item()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"guard": "off"}, id="adamw without a guard"),
        pytest.param({"ema_decay": 0.9, "dropout": 0.1, "z_loss": 1e-4}, id="all that a step may do beside"),
        pytest.param({"loss_chunk": 100, "gradient_checkpointing": "full"}, id="saving memory"),
        pytest.param({"optimizer": "lion"}, id="lion"),
        pytest.param({"optimizer": "muon"}, id="muon"),
        pytest.param({"optimizer": "muon", **MODERN}, id="muon, modern"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"precision": "tf32"}, id="tf32"),
        pytest.param({**MODERN, "feed_forward": "moe", "num_experts": 4}, id="moe"),
    ],
)
def test_no_step_waits_for_the_device(shards: TokenShards, fields: dict[str, Any]) -> None:
    _, logged = train(shards, **fields)
    assert_trained(logged)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=needs_fp8)])
def test_no_step_with_all_kernels_waits_for_the_device(
    shards: TokenShards, precision: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptmill.models.fused.dispatch.LEAST_WORK", 0)
    state, logged = train(shards, precision=precision, compile=compile)
    assert isinstance(state.model, FusedGPT)
    assert_trained(logged)


@needs_fp8
def test_no_step_in_fp8_waits_for_the_device(shards: TokenShards) -> None:
    state, logged = train(shards, precision="fp8", optimizer="muon")
    assert any(isinstance(module, Fp8Linear) for module in state.model.modules())
    assert_trained(logged)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"precision": "fp8"}, id="fp8", marks=needs_fp8),
        pytest.param({"optimizer": "muon", **MODERN}, id="muon, modern"),
    ],
)
def test_no_compiled_step_waits_for_the_device(shards: TokenShards, fields: dict[str, Any]) -> None:
    _, logged = train(shards, compile=True, **fields)
    assert_trained(logged)


def test_the_host_is_at_most_one_step_ahead_and_reads_without_waiting_for_the_newest(shards: TokenShards) -> None:
    """Behind every step the device is kept busy for a while: Metrics must read the previous step meanwhile."""
    config, corpora = make_config(**FIELDS), Corpora((shards,))
    plan = make_plan(config, build_sampler(config, corpora), corpora.tokenizer, World(0, 1, torch.device("cuda")))
    logged: list[Event] = []
    metrics, device = Metrics(plan, 1, SpikeDetector(GuardConfig()), logged.append), torch.device("cuda")
    for step in range(1, 5):
        started = DeviceTimestamp(device)
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so
        values = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0])
        newest = StepStats(step, 0.1, 8192, 1e-3, values, started, DeviceTimestamp(device))
        metrics.push(newest)
        assert [event.step for event in logged] == list(range(1, step))
        assert newest.arrived._event is not None
        assert not newest.arrived._event.query(), "the newest step was waited for"
    metrics.flush()
    assert [event.step for event in logged] == [1, 2, 3, 4]


@pytest.mark.parametrize("log_freq", [1, 3])
def test_the_speed_logged_is_that_of_the_device(shards: TokenShards, log_freq: int) -> None:
    """Whose work the host only hands over: its own clock would show next to nothing."""
    config, corpora = make_config(**FIELDS), Corpora((shards,))
    device = torch.device("cuda")
    plan = make_plan(config, build_sampler(config, corpora), corpora.tokenizer, World(0, 1, device))
    logged: list[StepLogged] = []
    metrics = Metrics(plan, log_freq, SpikeDetector(GuardConfig()), logged.append)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(1, LAST_STEP + 1):
        started = DeviceTimestamp(device)
        torch.cuda._sleep(40_000_000)
        values = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0])
        metrics.push(StepStats(step, 0.1, 8192, 1e-3, values, started, DeviceTimestamp(device)))
    metrics.flush()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    seconds = sum(event.seconds for event in logged)
    assert [event.step for event in logged][-1] == LAST_STEP
    assert 0.5 * elapsed <= seconds <= 1.01 * elapsed
    assert pytest.approx(sum(event.tokens_per_second * event.seconds for event in logged)) == 8192 * LAST_STEP

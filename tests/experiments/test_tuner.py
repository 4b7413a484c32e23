"""gptmill tune: the order of its trials, what it takes for the best, and what becomes of trials that fail."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import replace_sleep

from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import TuneRequest
from gptmill.experiments import child_run
from gptmill.experiments.trial_plan import plan_trial
from gptmill.experiments.trials import TrialError
from gptmill.experiments.tune import tuner as tuning_module
from gptmill.experiments.tune.search import (
    BudgetExhaustedError,
    Search,
    SearchSpace,
    Setting,
    TrialResult,
    list_divisors,
    make_ladder,
)
from gptmill.experiments.tune.tuner import Tuning, make_search_space, tune

CUDA, CPU = "NVIDIA H200 (cuda:0)", "CPU, 8 threads"
EAGER = Setting(32, None)
SIZES = list_divisors(512)


def search(scope: SearchSpace, speed: Callable[[Setting], float | str], device: str = CUDA) -> Search:
    """A search in which a setting has a speed, or a note that says how it failed."""

    def measure(setting: Setting, left: int) -> TrialResult:
        assert left >= 0
        found = speed(setting)
        if isinstance(found, str):
            return TrialResult(setting, note=found, is_out_of_memory=found == "out of memory")
        return TrialResult(setting, found, device=device)

    searched = Search(scope, measure)
    searched.run()
    return searched


def list_tried(searched: Search) -> list[int]:
    return [result.setting.mini_batch_size for result in searched.results]


def find_best(searched: Search) -> Setting:
    assert searched.best is not None
    return searched.best.setting


def test_sizes_are_divisors_and_each_rung_at_least_doubles() -> None:
    assert list_divisors(12) == (1, 2, 3, 4, 6, 12)
    assert make_ladder(list_divisors(12)) == (1, 2, 4, 12)
    assert make_ladder(list_divisors(512)) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert make_ladder((7,)) == (7,)


def test_speed_that_grows_is_followed_to_the_largest_batch() -> None:
    searched = search(SearchSpace(SIZES, EAGER, tries_compile_modes=False), lambda s: 100.0 * s.mini_batch_size)
    assert list_tried(searched) == [8, 16, 32, 64, 128, 256, 512]
    assert find_best(searched).mini_batch_size == 512


def test_a_peak_ends_the_climb_after_two_sizes_without_a_gain() -> None:
    speeds = {8: 50.0, 16: 80.0, 32: 100.0, 64: 99.0, 128: 90.0}
    searched = search(SearchSpace(SIZES, EAGER, tries_compile_modes=False), lambda s: speeds[s.mini_batch_size])
    assert list_tried(searched) == [8, 16, 32, 64, 128]
    assert find_best(searched).mini_batch_size == 32


def test_one_dip_on_the_way_up_does_not_end_the_climb() -> None:
    speeds = {8: 50.0, 16: 49.0, 32: 100.0, 64: 99.0, 128: 99.0}
    searched = search(SearchSpace(SIZES, EAGER, tries_compile_modes=False), lambda s: speeds[s.mini_batch_size])
    assert find_best(searched).mini_batch_size == 32


def test_of_equal_speeds_the_smaller_batch_is_taken_down_to_below_the_start() -> None:
    speeds = {1: 70.0, 2: 99.5}
    searched = search(
        SearchSpace(SIZES, EAGER, tries_compile_modes=False), lambda s: speeds.get(s.mini_batch_size, 100.0)
    )
    assert list_tried(searched) == [8, 16, 32, 4, 2, 1]
    assert find_best(searched).mini_batch_size == 2


def test_out_of_memory_at_the_start_goes_down_until_something_fits() -> None:
    searched = search(
        SearchSpace(SIZES, EAGER, tries_compile_modes=False),
        lambda s: "out of memory" if s.mini_batch_size > 2 else 100.0 * s.mini_batch_size,
    )
    assert list_tried(searched) == [8, 4, 2, 1]
    assert find_best(searched).mini_batch_size == 2


def test_out_of_memory_on_the_way_up_looks_at_the_divisors_between() -> None:
    searched = search(
        SearchSpace(list_divisors(480), EAGER, tries_compile_modes=False),
        lambda s: "out of memory" if s.mini_batch_size > 50 else 100.0 * s.mini_batch_size,
    )
    assert find_best(searched).mini_batch_size == 48
    assert len(searched.results) <= 8


def test_nothing_fits() -> None:
    searched = search(SearchSpace(SIZES, EAGER), lambda _: "out of memory")
    assert searched.best is None
    assert list_tried(searched) == [8, 4, 2, 1]


def test_compile_modes_are_tried_at_the_best_batch_and_the_winner_climbs_on() -> None:
    def speed(setting: Setting) -> float | str:
        if setting.compile_mode == "max-autotune-no-cudagraphs":
            return "failed: no triton"
        if setting.compile_mode is None:
            return min(setting.mini_batch_size, 32) * 1.0
        return min(setting.mini_batch_size, 64) * (2.0 if setting.compile_mode == "reduce-overhead" else 1.5)

    searched = search(SearchSpace(SIZES, EAGER), speed)
    assert find_best(searched) == Setting(64, "reduce-overhead")
    failed = [result for result in searched.results if not result.has_succeeded]
    assert [result.note for result in failed] == ["failed: no triton"]
    assert len({result.setting for result in searched.results}) == len(searched.results), "one was tried twice"


def test_within_a_hundredth_what_compiles_less_is_taken() -> None:
    speeds = {None: 90.0, "default": 99.5, "reduce-overhead": 100.0, "max-autotune-no-cudagraphs": 100.2}
    searched = search(SearchSpace((8,), Setting(8, None)), lambda s: speeds[s.compile_mode])
    assert find_best(searched).compile_mode == "default"


def test_a_recipe_whose_own_compiling_fails_is_tuned_without() -> None:
    searched = search(
        SearchSpace((1, 2), Setting(2, "default")), lambda s: "failed: no compiler" if s.compile_mode else 10.0, CPU
    )
    assert find_best(searched) == Setting(1, None)


def test_precision_and_threads_are_for_the_cpu_alone() -> None:
    scope = SearchSpace((8,), Setting(8, None), tries_precision=True, tries_threads=True)

    def speed(setting: Setting) -> float:
        return (
            100.0 + 50 * (setting.precision == "bf16") + 20 * (setting.threads == 4) - 50 * bool(setting.compile_mode)
        )

    searched = search(scope, speed, CPU)
    assert find_best(searched) == Setting(8, None, "bf16", 4)
    assert {result.setting.threads for result in searched.results} == {None, 4, 1}
    on_cuda = search(scope, speed, CUDA)
    assert {(result.setting.precision, result.setting.threads) for result in on_cuda.results} == {(None, None)}


def test_a_number_of_trials_or_the_end_of_the_time_is_enough() -> None:
    searched = search(SearchSpace(SIZES, EAGER, max_trials=2), lambda s: 1.0 * s.mini_batch_size)
    assert list_tried(searched) == [8, 16]
    assert find_best(searched).mini_batch_size == 16

    def give_up(_setting: Setting, _left: int) -> TrialResult:
        raise BudgetExhaustedError

    assert not Search(SearchSpace(SIZES, EAGER), give_up).run()


def test_only_batches_that_divide_every_stage_and_rank_are_tried() -> None:
    config = make_config(None, {"total_batch_size": 2048 * 12, "batch_size_warmup": "4096:10", "context_length": 1024})
    assert make_search_space(config, set(), TuneRequest()).sizes == (1, 2, 4)
    assert make_search_space(config, set(), TuneRequest(ranks=2)).sizes == (1, 2)
    with pytest.raises(UserError, match="total_batch_size = 24576: is not a multiple of"):
        make_search_space(config, set(), TuneRequest(ranks=5))


def test_what_a_flag_gives_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = make_config(None, {"mini_batch_size": 8, "compile": True})
    scope = make_search_space(config, {"mini_batch_size", "compile", "precision"}, TuneRequest())
    assert (scope.sizes, scope.initial) == ((8,), Setting(8, "default"))
    assert not scope.tries_compile_modes
    assert not scope.tries_precision
    assert scope.tries_threads
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not make_search_space(config, set(), TuneRequest()).tries_threads


@pytest.mark.parametrize("is_slow", [True, False])
def test_bf16_is_not_tried_on_a_cpu_that_only_emulates_it(monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
    """A trial of it would take a hundred times as long as the others."""
    monkeypatch.setattr(tuning_module, "is_slow", lambda _precision, _device: is_slow)
    assert make_search_space(make_config(None, {}), set(), TuneRequest()).tries_precision == (not is_slow)


def test_steps_that_differ_much_are_called_uneven() -> None:
    config = make_config(None, {"total_batch_size": 1024 * 4, "context_length": 1024})
    plan = plan_trial(config, 4, ranks=1, steps=4)
    even = dict(zip(range(1, 10), [9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.01, 1.02, 1.0], strict=True))
    assert not plan.is_noisy(even)
    assert plan.is_noisy({**even, 7: 2.0, 8: 3.0})


def test_the_speed_of_many_micro_batches_follows_from_few() -> None:
    config = make_config(None, {"total_batch_size": 1024 * 64, "context_length": 1024})
    plan = plan_trial(config, 2, ranks=1, steps=3)
    flags = plan.list_flags()
    assert (flags["total_batch_size"], flags["batch_size_warmup"]) == (3 * 2048, "2048:8")
    assert flags["max_steps"] > plan.last_step == 16
    # 0.1 s for a micro-batch and 0.05 s for the update; what comes before the counted steps is slow.
    seconds = dict.fromkeys((*range(1, 6), *range(9, 14)), 9.0)
    seconds |= {6: 0.15, 7: 0.15, 8: 0.15, 14: 0.35, 15: 0.35, 16: 0.35}
    assert plan.estimate_speed(seconds) == pytest.approx(1024 * 64 / (32 * 0.1 + 0.05))
    assert plan_trial(config, 32, ranks=1, steps=3).list_flags()["batch_size_warmup"] is None


def test_uneven_steps_do_not_promise_more_than_they_showed() -> None:
    """On a busy machine steps of one micro-batch may seem to take as long as those of three."""
    config = make_config(None, {"total_batch_size": 1024 * 64, "context_length": 1024})
    plan = plan_trial(config, 2, ranks=1, steps=4)
    seconds = dict.fromkeys(range(1, plan.last_step + 1), 0.3)
    assert plan.estimate_speed(seconds) > 1.5 * 3 * 2048 / 0.3
    seconds |= {6: 0.1, 7: 0.2, 8: 0.4, 9: 0.5}
    assert plan.is_noisy(seconds)
    assert plan.estimate_speed(seconds) == pytest.approx(3 * 2048 / 0.3)


# A training in name alone, as fast as its batch: for a large one the memory is too small.
TRAINING = """
import os, sys, time
from pathlib import Path

from gptmill.runs.event_json import to_json
from gptmill.runs.events import RunStarted, StepLogged

here = Path(sys.argv[1])
way = (here / "way").read_text()
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:] if word.startswith("--"))
run = Path(options["logdir"]) / options["run_name"]
run.mkdir()
(here / "pid").write_text(str(os.getpid()))
size, total = int(options["mini_batch_size"]), int(options["total_batch_size"])
with (here / "sizes").open("a") as sizes:
    sizes.write(f"{size}\\n")
if way == "no data":
    sys.stderr.write("gptmill: data/x does not exist; make it\\n")
    sys.exit(2)
if size > 8:
    sys.stderr.write("noise\\ngptmill: out of memory on cpu: one micro-batch does not fit; --mini_batch_size 8 does\\n")
    sys.exit(2)
if "compile" in options:
    sys.stderr.write("Traceback\\ntorch._inductor.exc.InductorError: no compiler\\n\\nSet TORCHDYNAMO_VERBOSE=1\\n")
    sys.exit(1)
if way == "slow" and size > 4:
    time.sleep(300)
started = RunStarted(0, "r", 1, 1, 1, "CPU, 1 threads", "fp32", 1, "c", "t", "0", "2", None)
lines = [to_json(started)]
first, _, until = options["batch_size_warmup"].partition(":")
for step in range(1, 40):
    tokens = int(first) if until and step <= int(until) else total
    lines.append(to_json(StepLogged(step, 0.0, 2.0, 0.1, 1.0, 1.0, 0.0, seconds=tokens / size / 1000, memory_gb=size)))
(run / "events.jsonl").write_text("\\n".join(lines) + "\\n")
time.sleep(300)  # it is not its own end that ends it
"""


class Bench:
    """Tuning with trainings in name alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.said: list[str] = []
        (folder / "training.py").write_text(TRAINING, encoding="utf-8")
        monkeypatch.setattr(child_run, "PROGRAM", (sys.executable, str(folder / "training.py"), str(folder)))
        monkeypatch.chdir(folder)

    def tune(self, way: str = "fine", request: TuneRequest | None = None, **flags: Any) -> Tuning:
        (self.folder / "way").write_text(way, encoding="utf-8")
        values = {"corpus": "x.txt", "context_length": 16, "total_batch_size": 1024, "precision": "fp32", **flags}
        wanted = request or TuneRequest(steps=3)
        return tune(None, {"mini_batch_size": 16, **values}, set(flags), wanted, self.said.append)

    def check_nothing_is_left(self) -> None:
        assert not (self.folder / "runs").exists()
        with pytest.raises(ProcessLookupError):
            os.kill(int((self.folder / "pid").read_text(encoding="utf-8")), 0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_trials_that_run_out_of_memory_or_fail_are_rows_and_the_rest_goes_on(bench: Bench) -> None:
    tuning = bench.tune()
    rows = [(result.setting.mini_batch_size, result.setting.compile_mode, result.note) for result in tuning.results]
    assert [row[:2] for row in rows] == [(4, None), (8, None), (16, None), (8, "default")]
    assert rows[2][2] == "out of memory"
    assert rows[3][2] == "failed: torch._inductor.exc.InductorError: no compiler"
    assert tuning.best is not None
    assert tuning.best.tokens_per_second == pytest.approx(8000)
    assert tuning.best.memory_gb == 8
    assert tuning.list_flags(make_config(None, {"compile": True})) == {"mini_batch_size": 8, "compile": False}
    assert any("at most" in line for line in bench.said)
    bench.check_nothing_is_left()


def test_what_prevents_every_training_is_said_in_its_own_words(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"^data/x does not exist; make it$"):
        bench.tune("no data")
    assert (bench.folder / "sizes").read_text(encoding="utf-8") == "4\n"
    bench.check_nothing_is_left()


def test_out_of_memory_in_every_trial_is_one_sentence(bench: Bench) -> None:
    with pytest.raises(UserError, match="out of memory in every trial, down to a mini_batch_size of 32"):
        bench.tune(mini_batch_size=32)


def test_ctrl_c_keeps_what_is_known_and_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        if (bench.folder / "sizes").exists() and len((bench.folder / "sizes").read_text().split()) == 2:
            raise KeyboardInterrupt
        time.sleep(seconds)

    replace_sleep(monkeypatch, child_run, interrupt)
    tuning = bench.tune("slow")
    assert tuning.is_interrupted
    assert tuning.best is not None
    assert tuning.best.setting == Setting(4, None)
    bench.check_nothing_is_left()


def test_the_time_limit_ends_a_trial_under_way(bench: Bench) -> None:
    with pytest.raises(UserError, match="was reached during the first trial"):
        bench.tune("slow", TuneRequest(time_limit="2s"), mini_batch_size=8)
    bench.check_nothing_is_left()


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (TuneRequest(steps=0), "--steps 0: must be at least 1"),
        (TuneRequest(ranks=0), "--ranks 0: must be at least 1"),
        (TuneRequest(max_trials=0), "--max_trials 0: must be at least 1"),
        (TuneRequest(time_limit="20"), "--time_limit 20: has no unit"),
        (TuneRequest(write="tuned"), r"must end in \.toml"),
        (TuneRequest(write="none/tuned.toml"), "folder none does not exist"),
        (TuneRequest(write="mine.toml"), "exists; choose another file, or add --overwrite"),
        (TuneRequest(ranks=3), "total_batch_size = 1024: is not a multiple of"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_first_trial(
    bench: Bench, request_: TuneRequest, complaint: str
) -> None:
    (bench.folder / "mine.toml").write_text("# mine\n", encoding="utf-8")
    with pytest.raises(UserError, match=complaint):
        bench.tune(request=request_)
    assert not (bench.folder / "sizes").exists()


def test_under_torchrun_it_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        bench.tune()


@pytest.mark.parametrize(
    ("exit_code", "said", "is_out_of_memory"),
    [
        (2, "gptmill: out of memory on cuda:0: one micro-batch ... does not fit", True),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes", True),
        (-9, "", True),
        (1, "autotuning: out of memory in one choice\nRuntimeError: something else", False),
        (2, "gptmill: no such file", False),
        (1, "RuntimeError: out of memory\ngptmill: 2 problems:\n  - one\n  - another", False),
    ],
)
def test_what_running_out_of_memory_looks_like(exit_code: int, said: str, is_out_of_memory: bool) -> None:
    assert TrialError("trial", exit_code, said).is_out_of_memory == is_out_of_memory


def test_trials_log_every_step_and_do_nothing_else(bench: Bench) -> None:
    training = bench.folder / "training.py"
    saving = 'import json, sys; open(sys.argv[1] + "/arguments", "w").write(json.dumps(sys.argv[2:]))\n'
    training.write_text(saving + TRAINING, encoding="utf-8")
    options = {"mirror_to": "s3://bucket/runs", "init_from": "base", "log_freq": 10, "early_stop_patience": 1}
    bench.tune(**options, mini_batch_size=8, compile=False)
    arguments = json.loads((bench.folder / "arguments").read_text(encoding="utf-8"))
    last = {word.partition("=")[0]: word.partition("=")[2] for word in arguments}
    expected = {"--mirror_to": "none", "--init_from": "none", "--log_freq": "1", "--early_stop_patience": "none"}
    expected |= {"--eval_tokens": "16"}
    assert {name: last[name] for name in expected} == expected
    assert int(last["--checkpoint_freq"]) == int(last["--eval_freq"]) == int(last["--max_steps"])


def test_settings_are_described_in_full() -> None:
    assert replace(EAGER, threads=1).describe() == "mini_batch_size 32, not compiled, 1 thread"
    assert Setting(4, "default", "bf16").describe() == "mini_batch_size 4, compiled: default, bf16"

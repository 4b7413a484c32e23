"""The guard lets healthy training be, sees what is wrong, and decides the same whenever it is asked again."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.run import GuardConfig
from gptmill.training.spike_detector import Entry, SpikeDetector, Verdict

WINDOW = 32
CONFIG = GuardConfig(guard="rollback", guard_window=WINDOW, spike_threshold=6.0, max_skips=3, max_rollbacks=3)
NAN = math.nan


def make_entry(step: int, loss: float = 3.0, grad_norm: float = 1.0, *, is_overflow: bool = False) -> Entry:
    return Entry(step, loss, grad_norm, (8 * (step - 1), 8 * step), is_overflow)


def make_course(steps: int, noise: float, seed: int, warmup: int = 100) -> Iterator[Entry]:
    """A run as it should be: the loss falls from 10 to 3, norms rise and fall in warm-up, both are noisy."""
    generator = random.Random(seed)
    for step in range(1, steps + 1):
        loss = 3.0 + 7.0 * math.exp(-step / 60) + generator.gauss(0, noise)
        slow = 3.0 * math.sin(min(step / warmup, 1.0) * math.pi)
        yield make_entry(step, loss, math.exp(slow + generator.gauss(0, 0.3)))


def make_guard(steps: int = 200, noise: float = 0.05, **fields: Any) -> SpikeDetector:
    """A guard that has seen a healthy run."""
    guard = SpikeDetector(replace(CONFIG, **fields))
    for entry in make_course(steps, noise, seed=0):
        assert guard.judge(entry) == Verdict("fine")
    return guard


def go_back(guard: SpikeDetector, verdict: Verdict, from_step: int, state: dict[str, Any]) -> None:
    """What the loop does: the guard of an older time, told that it is one."""
    guard.load_state_dict(state)
    guard.note_rollback(verdict, from_step)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05, 0.2])
@pytest.mark.parametrize("window", [16, 32, 128])
def test_a_healthy_run_is_let_be(noise: float, window: int) -> None:
    for seed in range(3):
        guard = SpikeDetector(replace(CONFIG, guard_window=window, spike_threshold=8.0))
        verdicts = [guard.judge(entry) for entry in make_course(600, noise, seed)]
        assert [verdict for verdict in verdicts if verdict != Verdict("fine")] == []


@pytest.mark.parametrize("steps", [80, 200, 600])
@pytest.mark.parametrize(
    ("rise", "factor", "seen"), [(1.5, 1.0, "loss"), (0.0, 100.0, "gradient norm"), (0.3, 5.0, "")]
)
def test_a_spike_is_told_from_a_rise(steps: int, rise: float, factor: float, seen: str) -> None:
    guard = make_guard(steps)
    *_, usual = make_course(steps + 1, 0.05, seed=0)
    verdict = guard.judge(replace(usual, loss=usual.loss + rise, grad_norm=usual.grad_norm * factor))
    assert verdict.kind == ("go_back" if seen else "fine")
    assert verdict.reason.startswith(seen)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "kind"),
    [(3.29, 1.0, "fine"), (3.31, 1.0, "go_back"), (3.0, 19.0, "fine"), (3.0, 21.0, "go_back")],
)
def test_without_noise_what_counts_is_a_visible_rise(loss: float, grad_norm: float, kind: str) -> None:
    guard = SpikeDetector(CONFIG)
    for step in range(1, 101):
        guard.judge(make_entry(step, 3.0 + step % 2 * 1e-6, 1.0 + step % 2 * 1e-6))
    assert guard.judge(make_entry(101, loss, grad_norm)).kind == kind


def test_nothing_is_judged_before_the_band_is_known() -> None:
    guard = SpikeDetector(CONFIG)
    for step in range(1, WINDOW // 2 + 1):
        assert guard.judge(make_entry(step, loss=3.0 if step % 2 else 30.0)).kind == "fine"
    steady = SpikeDetector(CONFIG)
    for step in range(1, WINDOW // 2 + 1):
        steady.judge(make_entry(step))
    assert steady.judge(make_entry(WINDOW // 2 + 1, loss=30.0)).kind == "go_back"


def test_a_spike_leaves_out_its_own_data_and_that_of_the_step_before() -> None:
    verdict = make_guard().judge(make_entry(201, loss=9.0))
    assert (verdict.kind, verdict.first_step, verdict.windows) == ("go_back", 200, (8 * 199, 8 * 201))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (3.0, NAN), (3.0, math.inf), (math.inf, 1.0)])
def test_what_is_not_finite_is_skipped_and_counted(loss: float, norm: float) -> None:
    guard = make_guard()
    for step in (201, 202, 204, 205):
        assert guard.judge(make_entry(step, loss, norm)).kind == "skipped"
        if step == 202:
            assert guard.judge(make_entry(203)) == Verdict("fine")
    assert guard.skipped == 4
    verdict = guard.judge(make_entry(206, loss, norm))
    assert (verdict.kind, verdict.first_step, verdict.windows) == ("go_back", 204, (8 * 203, 8 * 206))
    assert "3 updates in a row" in verdict.reason
    assert guard.skipped == 5


def test_an_overflow_of_fp16_is_counted_and_never_goes_back() -> None:
    guard = SpikeDetector(CONFIG)
    for step in range(1, 20):
        assert guard.judge(make_entry(step, 10.0, math.inf, is_overflow=True)).kind == "skipped"
    assert guard.skipped == 19
    kinds = [guard.judge(make_entry(step, 10.0, math.inf)).kind for step in range(20, 23)]
    assert kinds == ["skipped", "skipped", "go_back"]


def test_skips_stay_out_of_the_band() -> None:
    guard = make_guard(max_skips=1000)
    for step in range(201, 201 + WINDOW):
        guard.judge(make_entry(step, NAN, NAN))
    assert guard.judge(make_entry(300, loss=9.0)).kind == "fine"  # the band has been forgotten


def test_off_sees_nothing_and_warn_goes_on() -> None:
    off = make_guard(guard="off")
    assert off.judge(make_entry(201, NAN, NAN)) == Verdict("fine")
    assert off.skipped == 0
    warn = make_guard(guard="warn")
    verdict = warn.judge(make_entry(201, loss=9.0))
    assert verdict.kind == "fine"
    assert verdict.reason.startswith("step 201: loss 9.0000 where ")
    kinds = {warn.judge(make_entry(step, NAN, NAN)).kind for step in range(202, 220)}
    assert kinds == {"skipped"}


def test_a_new_level_is_told_once_and_becomes_the_usual() -> None:
    guard = make_guard(guard="warn")
    reasons = [guard.judge(make_entry(step, loss=6.0 + step % 2 / 10)).reason for step in range(201, 300)]
    assert [bool(reason) for reason in reasons] == [True] + [False] * 98
    assert guard.judge(make_entry(300, loss=9.0)).reason


def test_data_in_its_own_order_may_get_harder() -> None:
    guard = SpikeDetector(CONFIG, is_shuffled=False)
    for step in range(1, 101):
        guard.judge(make_entry(step))
    harder = guard.judge(make_entry(101, loss=9.0))
    assert harder.kind == "fine"
    assert "loss 9.0000" in harder.reason
    assert guard.judge(make_entry(102, loss=9.0, grad_norm=1e4)).kind == "go_back"


def test_every_time_in_a_row_more_is_left_out_until_the_guard_gives_up() -> None:
    guard = make_guard(150)
    state = guard.state_dict()
    for reach in (2, 4, 8):
        for step in range(151, 160):
            assert guard.judge(make_entry(step)).kind == "fine"
        verdict = guard.judge(make_entry(160, loss=9.0))
        assert (verdict.kind, verdict.first_step) == ("go_back", 161 - reach)
        go_back(guard, verdict, 160, state)
    assert guard.rollbacks == 3
    verdict = guard.judge(make_entry(151, loss=9.0))
    assert verdict.kind == "give_up"
    for words in ("step 151: loss 9.0000", "3 times in a row", "max_lr", "--resume STEP", "gptmill data show", "warn"):
        assert words in verdict.reason


def test_what_is_left_out_is_at_most_what_is_remembered() -> None:
    guard = SpikeDetector(replace(CONFIG, max_skips=2, max_rollbacks=99))
    fresh = guard.state_dict()
    for _ in range(6):
        guard.judge(make_entry(1, NAN, NAN))
        verdict = guard.judge(make_entry(2, NAN, NAN))
        assert (verdict.kind, verdict.first_step, verdict.windows) == ("go_back", 1, (0, 16))
        go_back(guard, verdict, 2, fresh)
    assert guard.skipped == 12


def test_the_count_starts_anew_once_the_run_is_past_the_trouble() -> None:
    guard = make_guard(150)
    state = guard.state_dict()
    for spike_at in (190, 155):  # the second comes earlier; the highest one counts
        for step in range(151, spike_at):
            guard.judge(make_entry(step))
        go_back(guard, guard.judge(make_entry(spike_at, loss=9.0)), spike_at, state)
    for step in range(151, 190 + WINDOW + 1):
        assert guard.rollbacks == 2
        guard.judge(make_entry(step))
    guard.judge(make_entry(190 + WINDOW + 1))
    assert guard.rollbacks == 0
    assert guard.judge(make_entry(190 + WINDOW + 2, loss=9.0)).first_step == 190 + WINDOW + 1


def test_no_rollbacks_allowed_means_giving_up_at_once() -> None:
    verdict = make_guard(max_rollbacks=0).judge(make_entry(201, loss=9.0))
    assert verdict.kind == "give_up"
    assert "max_rollbacks is 0" in verdict.reason


@pytest.mark.parametrize("window", [1, 2])
def test_the_smallest_windows_work(window: int) -> None:
    guard = SpikeDetector(replace(CONFIG, guard_window=window))
    assert guard.judge(make_entry(1, 3.0, 0.0)).kind == "fine"
    assert guard.judge(make_entry(2, 3.0, 0.0)).kind == "fine"
    assert guard.judge(make_entry(3, 9.0, 0.0)).kind == "go_back"


def test_a_resumed_guard_decides_the_same() -> None:
    generator = random.Random(1)
    entries = [
        replace(entry, loss=generator.choice([NAN, 30.0, entry.loss])) if generator.random() < 0.2 else entry
        for entry in make_course(300, 0.05, seed=1)
    ]
    entries[200:205] = [make_entry(step, NAN, NAN) for step in range(201, 206)]
    straight = SpikeDetector(replace(CONFIG, guard="warn"))
    expected = [straight.judge(entry) for entry in entries]
    assert {verdict.kind for verdict in expected} == {"fine", "skipped"}
    assert any(verdict.kind == "fine" and verdict.reason for verdict in expected)
    resumed = SpikeDetector(replace(CONFIG, guard="warn"))
    for number, entry in enumerate(entries):
        assert resumed.judge(entry) == expected[number]
        saved = json.dumps(resumed.state_dict(), allow_nan=False)
        resumed = SpikeDetector(replace(CONFIG, guard="warn"))
        resumed.load_state_dict(json.loads(saved))
    assert resumed.state_dict() == straight.state_dict()


def test_a_checkpoint_from_before_has_nothing_to_say() -> None:
    guard = make_guard()
    guard.load_state_dict({})
    assert guard.state_dict() == SpikeDetector(CONFIG).state_dict()


def test_a_norm_that_clipping_takes_care_of_is_no_spike() -> None:
    for norm, kind in ((9.9, "fine"), (10.1, "go_back")):
        guard = SpikeDetector(CONFIG, grad_clip=1.0)
        for step in range(1, 200):
            assert guard.judge(make_entry(step, grad_norm=0.05)).kind == "fine"
        assert guard.judge(make_entry(200, grad_norm=norm)).kind == kind

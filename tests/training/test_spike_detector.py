"""The spike detector ignores healthy training, finds spikes, and gives the same verdicts after a resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gptmill.config.run import GuardConfig
from gptmill.training.spike_detector import Observation, SpikeDetector, Verdict

WINDOW = 32
CONFIG = GuardConfig(guard="rollback", guard_window=WINDOW, spike_threshold=6.0, max_skips=3, max_rollbacks=3)
NAN = math.nan


def make_observation(step: int, loss: float = 3.0, grad_norm: float = 1.0, *, is_overflow: bool = False) -> Observation:
    return Observation(step, loss, grad_norm, (8 * (step - 1), 8 * step), is_overflow)


def make_course(steps: int, noise: float, seed: int, warmup: int = 100) -> Iterator[Observation]:
    """A run as it should be: the loss falls from 10 to 3, norms rise and fall in warm-up, both are noisy."""
    generator = random.Random(seed)
    for step in range(1, steps + 1):
        loss = 3.0 + 7.0 * math.exp(-step / 60) + generator.gauss(0, noise)
        slow = 3.0 * math.sin(min(step / warmup, 1.0) * math.pi)
        yield make_observation(step, loss, math.exp(slow + generator.gauss(0, 0.3)))


def make_detector(steps: int = 200, noise: float = 0.05, **fields: Any) -> SpikeDetector:
    """A detector that has seen a healthy run."""
    detector = SpikeDetector(replace(CONFIG, **fields))
    for observation in make_course(steps, noise, seed=0):
        assert detector.check(observation) == Verdict("fine")
    return detector


def roll_back(detector: SpikeDetector, verdict: Verdict, from_step: int, state: dict[str, Any]) -> None:
    """What the loop does: the detector of an older time, told that it is one."""
    detector.load_state_dict(state)
    detector.note_rollback(verdict, from_step)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05, 0.2])
@pytest.mark.parametrize("window", [16, 32, 128])
def test_a_healthy_run_is_let_be(noise: float, window: int) -> None:
    for seed in range(3):
        detector = SpikeDetector(replace(CONFIG, guard_window=window, spike_threshold=8.0))
        verdicts = [detector.check(observation) for observation in make_course(600, noise, seed)]
        assert [verdict for verdict in verdicts if verdict != Verdict("fine")] == []


@pytest.mark.parametrize("steps", [80, 200, 600])
@pytest.mark.parametrize(
    ("rise", "factor", "seen"), [(1.5, 1.0, "loss"), (0.0, 100.0, "gradient norm"), (0.3, 5.0, "")]
)
def test_a_spike_is_told_from_a_rise(steps: int, rise: float, factor: float, seen: str) -> None:
    detector = make_detector(steps)
    *_, usual = make_course(steps + 1, 0.05, seed=0)
    verdict = detector.check(replace(usual, loss=usual.loss + rise, grad_norm=usual.grad_norm * factor))
    assert verdict.kind == ("rollback" if seen else "fine")
    assert verdict.reason.startswith(seen)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "kind"),
    [(3.29, 1.0, "fine"), (3.31, 1.0, "rollback"), (3.0, 19.0, "fine"), (3.0, 21.0, "rollback")],
)
def test_without_noise_what_counts_is_a_visible_rise(loss: float, grad_norm: float, kind: str) -> None:
    detector = SpikeDetector(CONFIG)
    for step in range(1, 101):
        detector.check(make_observation(step, 3.0 + step % 2 * 1e-6, 1.0 + step % 2 * 1e-6))
    assert detector.check(make_observation(101, loss, grad_norm)).kind == kind


def test_nothing_is_judged_before_the_band_is_known() -> None:
    detector = SpikeDetector(CONFIG)
    for step in range(1, WINDOW // 2 + 1):
        assert detector.check(make_observation(step, loss=3.0 if step % 2 else 30.0)).kind == "fine"
    steady = SpikeDetector(CONFIG)
    for step in range(1, WINDOW // 2 + 1):
        steady.check(make_observation(step))
    assert steady.check(make_observation(WINDOW // 2 + 1, loss=30.0)).kind == "rollback"


def test_a_spike_leaves_out_its_own_data_and_that_of_the_step_before() -> None:
    verdict = make_detector().check(make_observation(201, loss=9.0))
    assert (verdict.kind, verdict.first_step, verdict.windows) == ("rollback", 200, (8 * 199, 8 * 201))


@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (3.0, NAN), (3.0, math.inf), (math.inf, 1.0)])
def test_what_is_not_finite_is_skipped_and_counted(loss: float, norm: float) -> None:
    detector = make_detector()
    for step in (201, 202, 204, 205):
        assert detector.check(make_observation(step, loss, norm)).kind == "skipped"
        if step == 202:
            assert detector.check(make_observation(203)) == Verdict("fine")
    assert detector.skipped == 4
    verdict = detector.check(make_observation(206, loss, norm))
    assert (verdict.kind, verdict.first_step, verdict.windows) == ("rollback", 204, (8 * 203, 8 * 206))
    assert "3 updates in a row" in verdict.reason
    assert detector.skipped == 5


def test_an_overflow_of_fp16_is_counted_and_never_goes_back() -> None:
    detector = SpikeDetector(CONFIG)
    for step in range(1, 20):
        assert detector.check(make_observation(step, 10.0, math.inf, is_overflow=True)).kind == "skipped"
    assert detector.skipped == 19
    kinds = [detector.check(make_observation(step, 10.0, math.inf)).kind for step in range(20, 23)]
    assert kinds == ["skipped", "skipped", "rollback"]


def test_skips_stay_out_of_the_band() -> None:
    detector = make_detector(max_skips=1000)
    for step in range(201, 201 + WINDOW):
        detector.check(make_observation(step, NAN, NAN))
    assert detector.check(make_observation(300, loss=9.0)).kind == "fine"  # the band has been forgotten


def test_off_sees_nothing_and_warn_goes_on() -> None:
    off = make_detector(guard="off")
    assert off.check(make_observation(201, NAN, NAN)) == Verdict("fine")
    assert off.skipped == 0
    warn = make_detector(guard="warn")
    verdict = warn.check(make_observation(201, loss=9.0))
    assert verdict.kind == "fine"
    assert verdict.reason.startswith("step 201: loss 9.0000 above the limit of ")
    kinds = {warn.check(make_observation(step, NAN, NAN)).kind for step in range(202, 220)}
    assert kinds == {"skipped"}


def test_a_new_level_is_told_once_and_becomes_the_usual() -> None:
    detector = make_detector(guard="warn")
    reasons = [detector.check(make_observation(step, loss=6.0 + step % 2 / 10)).reason for step in range(201, 300)]
    assert [bool(reason) for reason in reasons] == [True] + [False] * 98
    assert detector.check(make_observation(300, loss=9.0)).reason


def test_data_in_its_own_order_may_get_harder() -> None:
    detector = SpikeDetector(CONFIG, is_shuffled=False)
    for step in range(1, 101):
        detector.check(make_observation(step))
    harder = detector.check(make_observation(101, loss=9.0))
    assert harder.kind == "fine"
    assert "loss 9.0000" in harder.reason
    assert detector.check(make_observation(102, loss=9.0, grad_norm=1e4)).kind == "rollback"


def test_every_time_in_a_row_more_is_left_out_until_the_guard_gives_up() -> None:
    detector = make_detector(150)
    state = detector.state_dict()
    for reach in (2, 4, 8):
        for step in range(151, 160):
            assert detector.check(make_observation(step)).kind == "fine"
        verdict = detector.check(make_observation(160, loss=9.0))
        assert (verdict.kind, verdict.first_step) == ("rollback", 161 - reach)
        roll_back(detector, verdict, 160, state)
    assert detector.rollbacks == 3
    verdict = detector.check(make_observation(151, loss=9.0))
    assert verdict.kind == "give_up"
    for words in ("step 151: loss 9.0000", "rolling back and skipping data 3 times in a row did not help"):
        assert words in verdict.reason


def test_what_is_left_out_is_at_most_what_is_remembered() -> None:
    detector = SpikeDetector(replace(CONFIG, max_skips=2, max_rollbacks=99))
    fresh = detector.state_dict()
    for _ in range(6):
        detector.check(make_observation(1, NAN, NAN))
        verdict = detector.check(make_observation(2, NAN, NAN))
        assert (verdict.kind, verdict.first_step, verdict.windows) == ("rollback", 1, (0, 16))
        roll_back(detector, verdict, 2, fresh)
    assert detector.skipped == 12


def test_the_count_starts_anew_once_the_run_is_past_the_trouble() -> None:
    detector = make_detector(150)
    state = detector.state_dict()
    for spike_at in (190, 155):  # the second comes earlier; the highest one counts
        for step in range(151, spike_at):
            detector.check(make_observation(step))
        roll_back(detector, detector.check(make_observation(spike_at, loss=9.0)), spike_at, state)
    for step in range(151, 190 + WINDOW + 1):
        assert detector.rollbacks == 2
        detector.check(make_observation(step))
    detector.check(make_observation(190 + WINDOW + 1))
    assert detector.rollbacks == 0
    assert detector.check(make_observation(190 + WINDOW + 2, loss=9.0)).first_step == 190 + WINDOW + 1


def test_no_rollbacks_allowed_means_giving_up_at_once() -> None:
    verdict = make_detector(max_rollbacks=0).check(make_observation(201, loss=9.0))
    assert verdict.kind == "give_up"
    assert "max_rollbacks is 0" in verdict.reason


@pytest.mark.parametrize("window", [1, 2])
def test_the_smallest_windows_work(window: int) -> None:
    detector = SpikeDetector(replace(CONFIG, guard_window=window))
    assert detector.check(make_observation(1, 3.0, 0.0)).kind == "fine"
    assert detector.check(make_observation(2, 3.0, 0.0)).kind == "fine"
    assert detector.check(make_observation(3, 9.0, 0.0)).kind == "rollback"


def test_a_resumed_guard_decides_the_same() -> None:
    generator = random.Random(1)
    observations = [
        replace(step, loss=generator.choice([NAN, 30.0, step.loss])) if generator.random() < 0.2 else step
        for step in make_course(300, 0.05, seed=1)
    ]
    observations[200:205] = [make_observation(step, NAN, NAN) for step in range(201, 206)]
    straight = SpikeDetector(replace(CONFIG, guard="warn"))
    expected = [straight.check(observation) for observation in observations]
    assert {verdict.kind for verdict in expected} == {"fine", "skipped"}
    assert any(verdict.kind == "fine" and verdict.reason for verdict in expected)
    resumed = SpikeDetector(replace(CONFIG, guard="warn"))
    for number, observation in enumerate(observations):
        assert resumed.check(observation) == expected[number]
        saved = json.dumps(resumed.state_dict(), allow_nan=False)
        resumed = SpikeDetector(replace(CONFIG, guard="warn"))
        resumed.load_state_dict(json.loads(saved))
    assert resumed.state_dict() == straight.state_dict()


def test_a_checkpoint_from_before_has_nothing_to_say() -> None:
    detector = make_detector()
    detector.load_state_dict({})
    assert detector.state_dict() == SpikeDetector(CONFIG).state_dict()


def test_a_norm_that_clipping_takes_care_of_is_no_spike() -> None:
    for norm, kind in ((9.9, "fine"), (10.1, "rollback")):
        detector = SpikeDetector(CONFIG, grad_clip=1.0)
        for step in range(1, 200):
            assert detector.check(make_observation(step, grad_norm=0.05)).kind == "fine"
        assert detector.check(make_observation(200, grad_norm=norm)).kind == kind

"""Ranks exchange values through a store; one that fails, or never comes, ends the waits of the others by a sentence.

The ranks are threads that share a store in memory.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gptmill.config import exit_codes
from gptmill.config.errors import UserError
from gptmill.runtime import rank_store, rank_watch
from gptmill.runtime.rank_meeting import meet
from gptmill.runtime.rank_store import Failure, RankFailedError, RankStore
from gptmill.runtime.rank_watch import RankBeat, RankWatch
from gptmill.runtime.ranks import Ranks, describe_failure, is_collective_error
from gptmill.runtime.signals import StopFlag
from gptmill.runtime.world import check_devices
from gptmill.training.launch import check_same, check_same_data
from gptmill.training.stop_agreement import agree_on_stop

WAIT_SECONDS = 30.0


def call_as_ranks(call: Callable[[Ranks], Any], size: int = 3) -> list[Any]:
    """What the call returns or raises on each rank."""
    store = HashStore()
    stores = [RankStore(store, rank, size) for rank in range(size)]

    def run(ranks: Ranks) -> Any:
        try:
            return call(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, Ranks(each, RankWatch(each))) for each in stores]
        return [future.result(WAIT_SECONDS) for future in futures]


def test_all_ranks_get_the_value_of_rank_0_and_the_values_of_all() -> None:
    def exchange(ranks: Ranks) -> Any:
        first = ranks.store.share("name", lambda: f"made by {ranks.store.rank}")
        return first, ranks.store.gather("numbers", ranks.store.rank**2)

    assert call_as_ranks(exchange) == [("made by 0", [0, 1, 4])] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_a_user_error_of_one_rank_is_that_of_all(failing: int) -> None:
    def check(ranks: Ranks) -> None:
        with ranks.store.together("checks"):
            if ranks.store.rank == failing:
                raise UserError("there is no disk")

    errors = call_as_ranks(check)
    assert {str(error) for error in errors} == {"there is no disk"}
    assert {error.exit_code for error in errors} == {exit_codes.USER_ERROR}
    assert [isinstance(error, RankFailedError) for error in errors] == [rank != failing for rank in range(3)]


def test_only_one_rank_reports_and_rank_0_if_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "REPORT_SECONDS", 5.0)
    assert call_as_ranks(lambda ranks: ranks.store.takes_report()) == [True, False, False]
    monkeypatch.setattr(rank_store, "REPORT_SECONDS", 0.0)
    reports = call_as_ranks(lambda ranks: ranks.store.rank > 0 and ranks.store.takes_report())
    assert sorted(reports) == [False, False, True]


def test_the_first_failure_is_the_one_that_counts_and_names_its_rank() -> None:
    store = RankStore(HashStore(), 1, 2)
    lost = Failure(3, "rank 3 is lost", exit_codes.RANK_LOST, is_lost=True)
    assert store.find_failure() is None
    assert store.publish(lost, is_own=False) == lost
    assert store.publish(Failure(1, "later")) == lost == store.find_failure()
    assert str(lost) == "gptmill: rank 3 is lost"
    assert str(Failure(1, "no such file")) == "gptmill (rank 1): no such file"
    assert str(Failure(0, "no such file")) == "gptmill: no such file"


def test_a_hang_is_announced_unless_a_failure_explains_it() -> None:
    store = HashStore()
    one, two = (Ranks(each, RankWatch(each)) for each in (RankStore(store, 0, 3), RankStore(store, 1, 3)))
    assert not one.is_ending()
    assert one.announce_hang("rank 0 hangs")
    assert not two.announce_hang("rank 1 hangs too")
    assert two.is_ending()
    two.store.has_noticed_failure = True  # its main thread ends it, unless that hangs
    assert not two.is_ending()


def test_a_rank_that_never_starts_is_named() -> None:
    with pytest.raises(UserError, match=r"3 of 4 ranks did not start within 600 s: 0, 2, 3; see"):
        meet(HashStore(), 1, 4, time.monotonic())
    with pytest.raises(UserError, match=r"1 of 2 ranks did not start within 600 s: 1; see"):
        meet(HashStore(), 0, 2, time.monotonic())


def test_restarted_ranks_meet_only_each_other_in_the_store_of_the_ones_before() -> None:
    """torchrun keeps its store: what the earlier ranks have written, a failure among it, is still there."""
    store, everyone = HashStore(), threading.Barrier(3)

    def start(rank: int) -> tuple[bool, list[int]]:
        ranks = meet(store, rank, 3, time.monotonic() + WAIT_SECONDS)
        had_failed = ranks.find_failure() is not None
        found = ranks.gather("number", rank)
        everyone.wait(WAIT_SECONDS)  # a failure is for those that still wait, too
        ranks.publish(Failure(rank, "the end"))
        return had_failed, found

    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(start, range(3), timeout=WAIT_SECONDS))
        assert results == [(False, [0, 1, 2])] * 3


def test_a_silent_rank_is_lost_and_one_that_beats_is_not() -> None:
    store = HashStore()
    zero, one = (RankWatch(RankStore(store, rank, 2)) for rank in (0, 1))
    one.make_beat = lambda: RankBeat(12, "computing")
    zero.silent_seconds = 60.0
    for second in range(0, 100, 10):
        one._beat()
        zero._listen(time.monotonic() - 100 + second)
    assert zero.find_lost() is None
    assert zero.watched_beats[1].step == 12
    zero.silent_seconds = 5.0
    failure = zero.find_lost()
    assert failure is not None
    assert failure.is_lost
    assert "it was last seen computing after step 12" in failure.text
    one._ranks.leave()  # in good order: rank 0 may still write the last checkpoint
    assert zero.find_lost() is None


def test_a_process_on_the_same_machine_that_has_ended_is_lost_at_once() -> None:
    store = HashStore()
    zero, one = (RankWatch(RankStore(store, rank, 2)) for rank in (0, 1))
    ended = subprocess.Popen(["true"])
    ended.wait(WAIT_SECONDS)
    one._identity["pid"] = ended.pid
    one._beat()
    zero._listen(time.monotonic())
    failure = zero.find_lost()
    assert failure is not None
    assert f"its process {ended.pid} on {socket.gethostname()} has ended without a word" in failure.text
    one._identity["machine"] = "another one"
    one._beat()
    zero._listen(time.monotonic())
    assert zero.find_lost() is None


def test_a_blocked_process_is_ended_and_one_that_noticed_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(rank_store, "LEAVE_SECONDS", 0.0)
    ended: list[int] = []
    recorded: list[Failure] = []
    failure = Failure(1, "rank 1 failed", exit_codes.RANK_LOST)
    watch = RankWatch(store := RankStore(HashStore(), 0, 2), ended.append)
    watch.record = recorded.append
    store.publish(failure, is_own=False)
    store.has_noticed_failure = True
    watch._end(failure)
    assert (ended, recorded) == ([], [])
    store.has_noticed_failure = False
    watch._end(failure)
    assert (ended, recorded) == ([exit_codes.RANK_LOST], [failure])
    assert capfd.readouterr().err == "gptmill: rank 1 failed\n"


def test_a_store_that_never_answers_ends_the_process_and_names_rank_0(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a machine whose network is cut."""
    monkeypatch.setattr(rank_watch, "POLL_SECONDS", 0.01)
    store = HashStore()
    zero = RankWatch(RankStore(store, 0, 2))
    zero.make_beat = lambda: RankBeat(7, "computing")
    zero._beat()
    ended, cut = threading.Event(), threading.Event()
    one = RankWatch(RankStore(store, 1, 2), lambda code: ended.set() if code == exit_codes.RANK_LOST else None)
    one.silent_seconds = 0.3
    one._listen(time.monotonic())
    monkeypatch.setattr(one, "_beat", lambda: cut.wait(WAIT_SECONDS))
    for thread in one._threads:
        thread.start()
    assert ended.wait(WAIT_SECONDS)
    one._closed.set()
    cut.set()
    for thread in one._threads:
        thread.join(WAIT_SECONDS)
    assert "rank 0 is lost: its process" in (said := capfd.readouterr().err)
    assert "last seen computing after step 7" in said


@pytest.mark.parametrize(
    ("numbers", "is_time_up", "code"),
    [((0, 0, 10), (), 138), ((0, 0, 0), (1,), exit_codes.TIME_UP), ((0, 15, 2), (), 143)],
    ids=["signal", "time limit", "two signals"],
)
def test_all_ranks_stop_for_the_reason_of_the_first_that_has_one(
    numbers: tuple[int, ...], is_time_up: tuple[int, ...], code: int
) -> None:
    def stop(ranks: Ranks) -> int:
        deadline = 0.0 if ranks.store.rank in is_time_up else None
        agree_on_stop(flag := StopFlag(numbers[ranks.store.rank], deadline), ranks)
        return flag.exit_code

    assert call_as_ranks(stop) == [code] * 3


GIVEN, SOFTWARE = {"RECIPE": "demo", "max_lr": "0.001"}, {"gptmill": "1.0, code ab", "torch": "2.13"}


@pytest.mark.parametrize(
    ("given", "software", "sentence"),
    [
        (
            {"max_lr": "0.1"},
            {},
            "rank 2 was started with --max_lr 0.1, but rank 0 with --max_lr 0.001; start all ranks",
        ),
        ({"seed": "1"}, {}, "rank 2 was started with --seed 1, but rank 0 with no --seed; start all ranks"),
        ({"RECIPE": "x.toml"}, {}, "rank 2 was started with the recipe x.toml, but rank 0 with the recipe demo"),
        ({}, {"torch": "2.9"}, "rank 2 runs torch 2.9, but rank 0 torch 2.13; install the same version"),
        ({}, {"gptmill": "1.0, code cd"}, "rank 2 runs gptmill 1.0, code cd, but rank 0 gptmill 1.0, code ab"),
    ],
    ids=["value", "flag", "recipe", "torch", "gptmill"],
)
def test_ranks_with_another_command_line_or_other_software_are_named(
    given: dict[str, str], software: dict[str, str], sentence: str
) -> None:
    def check(ranks: Ranks) -> None:
        is_odd = ranks.store.rank == 2
        check_same(ranks, GIVEN | (given if is_odd else {}), SOFTWARE | (software if is_odd else {}))

    errors = call_as_ranks(check)
    assert {str(error)[: len(sentence)] for error in errors} == {sentence}


def test_ranks_with_other_tokens_or_another_device_are_named() -> None:
    errors = call_as_ranks(lambda ranks: check_same_data(ranks, "ab" if ranks.store.rank < 2 else "cd", "data/x"))
    assert {str(error)[:52] for error in errors} == {"rank 2 reads other tokens from data/x than rank 0; c"}
    with pytest.raises(UserError, match="rank 1 would train on cpu, but rank 0 on cuda"):
        check_devices(["cuda", "cpu"])
    check_devices(["cpu", "cpu"])


@pytest.mark.parametrize(
    ("error", "is_collective"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_errors_of_collectives(error: Exception, is_collective: bool) -> None:
    assert is_collective_error(error) == is_collective


def test_what_the_others_say_of_an_error() -> None:
    crash = describe_failure(3, ZeroDivisionError("a\n b"), " after step 7")
    assert crash == Failure(3, "rank 3 failed after step 7: ZeroDivisionError: a b", exit_codes.RANK_LOST)
    assert describe_failure(3, UserError("x")) == Failure(3, "x", exit_codes.USER_ERROR)
    assert describe_failure(3, KeyboardInterrupt()).exit_code == exit_codes.INTERRUPTED

"""Asking a run to stop, in a real process that really gets the signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gptmill.runtime.signals import StopFlag

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")

CHILD = """
import os, signal, sys
from gptmill.runtime.signals import listen_for_stop

before = [signal.getsignal(number) for number in signal.valid_signals()]
try:
    with listen_for_stop() as flag:
        print(bool(flag))
        for name in sys.argv[1:]:
            signal.raise_signal(getattr(signal, name))
            print(name, flag.signal_number)
        print(bool(flag))
except KeyboardInterrupt:
    print("interrupted")
after = [signal.getsignal(number) for number in signal.valid_signals()]
print("restored" if after == before else "changed")
"""


def send(*signals: str) -> list[str]:
    """What a process that listens says while it gets these signals, one after the other."""
    process = subprocess.run(
        [sys.executable, "-c", CHILD, *signals], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_without_a_signal_nothing_is_asked() -> None:
    assert send() == ["False", "False", "restored"]


NUMBERS = {name: int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")}


@pytest.mark.parametrize(("name", "number"), NUMBERS.items())
def test_one_signal_sets_the_flag_and_interrupts_nothing(name: str, number: int) -> None:
    assert send(name) == ["False", f"{name} {number}", "True", "restored"]


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    assert send("SIGINT", "SIGINT") == ["False", "SIGINT 2", "interrupted", "restored"]


def test_the_sigterm_that_follows_a_ctrl_c_under_torchrun_does_not_interrupt() -> None:
    assert send("SIGINT", "SIGTERM") == ["False", "SIGINT 2", "SIGTERM 2", "True", "restored"]


def test_many_sigterms_do_not_interrupt() -> None:
    assert send("SIGTERM", "SIGTERM", "SIGTERM")[-3:] == ["SIGTERM 15", "True", "restored"]


def test_a_ctrl_c_after_a_sigterm_does_not_interrupt_but_the_next_does() -> None:
    assert send("SIGTERM", "SIGINT") == ["False", "SIGTERM 15", "SIGINT 15", "True", "restored"]
    assert send("SIGTERM", "SIGINT", "SIGINT") == ["False", "SIGTERM 15", "SIGINT 15", "interrupted", "restored"]


def test_a_ctrl_c_after_both_interrupts() -> None:
    assert send("SIGINT", "SIGTERM", "SIGINT")[-2:] == ["interrupted", "restored"]


# A process in the middle of long work: the signal comes from outside, and the work is not broken off.
WORKING = """
import time
from gptmill.runtime.signals import listen_for_stop

with listen_for_stop() as flag:
    print("ready", flush=True)
    while not flag:
        time.sleep(0.01)
    print("stopping by", flag.signal_number)
"""


def test_a_signal_from_outside_ends_the_loop_in_order() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=60)[0] == "stopping by 15\n"
    assert process.returncode == 0


def test_a_run_that_nohup_started_outlives_its_terminal() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{CHILD}"
    process = subprocess.run(
        [sys.executable, "-c", ignoring, "SIGHUP"], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.splitlines() == ["False", "SIGHUP 0", "False", "restored"]


@pytest.mark.parametrize(("name", "number"), NUMBERS.items())
def test_a_signal_is_told_by_name_and_by_exit_code(name: str, number: int) -> None:
    flag = StopFlag(signal_number=number)
    assert (flag.describe(), flag.exit_code) == (f"by {name}", 128 + number)


def test_a_flag_that_nothing_has_set_says_so() -> None:
    flag = StopFlag(deadline=time.monotonic() + 1000)
    assert (bool(flag), flag.is_time_up, flag.describe(), flag.exit_code) == (False, False, "by SIGTERM", 143)


def test_the_time_limit_asks_once_only_the_margin_is_left() -> None:
    flag = StopFlag(deadline=time.monotonic() + 1000, margin_seconds=10)
    assert not flag
    flag.margin_seconds = 1001
    assert flag
    assert (flag.is_time_up, flag.describe(), flag.exit_code) == (True, "by its time limit", 75)


def test_the_flag_stays_set_when_saving_turns_out_to_be_faster() -> None:
    flag = StopFlag(deadline=time.monotonic() + 1000, margin_seconds=1001)
    assert flag
    flag.margin_seconds = 1
    assert flag


def test_what_asked_first_is_what_the_run_was_stopped_by() -> None:
    late_signal = StopFlag(deadline=time.monotonic())
    assert late_signal
    late_signal.signal_number = signal.SIGTERM
    assert late_signal.exit_code == 75
    late_deadline = StopFlag(signal_number=signal.SIGTERM, deadline=time.monotonic())
    assert late_deadline.exit_code == 143

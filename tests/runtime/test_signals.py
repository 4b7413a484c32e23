"""Asking a run to stop, in a real process that really gets the signals."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")

CHILD = """
import os, signal, sys
from gptmill.runtime.signals import listen_for_stop

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
try:
    with listen_for_stop() as flag:
        print(bool(flag))
        for name in sys.argv[1:]:
            signal.raise_signal(getattr(signal, name))
            print(name, flag.signal_number)
        print(bool(flag))
except KeyboardInterrupt:
    print("interrupted")
after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
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


@pytest.mark.parametrize(("name", "number"), [("SIGINT", 2), ("SIGTERM", 15)])
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

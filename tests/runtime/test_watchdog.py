"""A rank that stands still is found, explained and ended; one that only seems to is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptmill.config import exit_codes
from gptmill.runtime import watchdog as module
from gptmill.runtime.heartbeats import Heartbeat, describe_hang, read_heartbeat, write_heartbeat
from gptmill.runtime.watchdog import FIRST_STEP_SECONDS, Watchdog, open_watchdog

# A rank whose clock runs twenty times as fast. {body} is what it does once the usual step is known.
RANK = """
import ctypes, sys, time
from pathlib import Path
from gptmill.runtime import watchdog as module

module.POLL_SECONDS = 0.05
rank, world_size, min_seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def hang_here():
    time.sleep(300)

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)

with module.open_watchdog(Path("run"), rank, world_size, 2.0, min_seconds) as watchdog:
    watchdog.note_step_seconds(0.01)
    watchdog.beat(120, "computing")
    {body}
print("done")
"""


def start(
    folder: Path, body: str, rank: int = 0, world_size: int = 1, min_seconds: float = 0.3
) -> subprocess.Popen[str]:
    (folder / "run").mkdir(exist_ok=True)
    script = RANK.replace("{body}", body.replace("\n", "\n    "))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(rank), str(world_size), str(min_seconds)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal
    )


def wait_until_exists(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_a_hung_rank_ends_with_a_sentence_and_all_stacks(tmp_path: Path) -> None:
    process = start(tmp_path, 'watchdog.beat(120, "waiting for data")\nhang_here()')
    _, errors = process.communicate(timeout=60)
    assert process.returncode == exit_codes.HUNG
    (path,) = (tmp_path / "run").glob("hang_*")
    assert path.name == "hang_step_000120_rank_00000.txt"
    text = path.read_text()
    sentence = "gptmill: rank 0 has made no progress for 0 s: after step 120 it has been waiting for data"
    assert errors.strip() == sentence
    assert sentence in text
    assert "in hang_here" in text
    assert "Thread" in text


def test_a_rank_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    body = 'for batch in range(15):\n    time.sleep(0.1)\n    watchdog.beat(120, "evaluating")'
    process = start(tmp_path, body, min_seconds=1)
    assert process.communicate(timeout=60) == ("done\n", "")
    assert process.returncode == 0
    assert not list((tmp_path / "run").glob("hang_*"))


def test_stacks_go_to_standard_error_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    process = start(tmp_path, 'import shutil; shutil.rmtree("run")\nhang_here()')
    _, errors = process.communicate(timeout=60)
    assert process.returncode == exit_codes.HUNG
    assert "in hang_here" in errors
    assert not (tmp_path / "run").exists(), "a folder that was deleted must stay so"


def test_a_rank_that_slept_with_its_machine_is_not_ended_on_waking(tmp_path: Path) -> None:
    body = 'Path("ready").touch()\nwait_for("awake")\nwatchdog.beat(120, "computing")\nPath("seen").touch()'
    process = start(tmp_path, body, min_seconds=1)
    wait_until_exists(tmp_path / "ready")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than it may stand still
    process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    (tmp_path / "awake").touch()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "done\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="set on Linux alone")
def test_of_a_rank_in_c_code_that_holds_the_interpreter_the_stacks_are_written(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(0.2)\nctypes.PyDLL(None).sleep(300)")
    file = tmp_path / "run/heartbeat/rank_00000.stacks.txt"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (file.exists() and "Timeout" in file.read_text()):
        time.sleep(0.05)
    time.sleep(0.2)
    assert process.poll() is None, "it may only be asleep"
    process.kill()
    process.communicate()
    stacks = file.read_text()
    assert "Timeout" in stacks
    assert '"<string>"' in stacks


def test_of_two_hung_ranks_each_tells_its_view(tmp_path: Path) -> None:
    behind = start(tmp_path, 'watchdog.beat(120, "waiting for data")\nhang_here()', 1, 2, min_seconds=3)
    wait_until_exists(tmp_path / "run/heartbeat/rank_00001.json")
    time.sleep(0.5)
    waiting = start(tmp_path, 'watchdog.beat(120, "exchanging gradients")\nhang_here()', 0, 2, min_seconds=3)
    errors = [process.communicate(timeout=60)[1].strip() for process in (waiting, behind)]
    assert [waiting.returncode, behind.returncode] == [exit_codes.HUNG, exit_codes.HUNG]
    assert "it has been exchanging gradients; it waits for rank 1, waiting for data after step 120 for " in errors[0]
    assert errors[1].startswith("gptmill: rank 1 ")
    assert errors[1].endswith("it has been waiting for data; the other ranks wait for it")


def test_a_rank_that_waits_for_one_that_gets_on_does_not_hang(tmp_path: Path) -> None:
    busy = start(
        tmp_path,
        'while not Path("saved").exists():\n    time.sleep(0.03)\n    watchdog.beat(120, "saving")',
        0,
        2,
        min_seconds=1,
    )
    wait_until_exists(tmp_path / "run/heartbeat/rank_00000.json")
    waiting = start(tmp_path, 'wait_for("saved")', 1, 2, min_seconds=1)
    time.sleep(2)
    (tmp_path / "saved").touch()
    for process in (busy, waiting):
        assert process.communicate(timeout=60) == ("done\n", "")


def test_heartbeats_say_where_each_rank_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    ended: list[int] = []
    with open_watchdog(tmp_path, 3, 8, None, 0.0, ended.append) as watchdog:
        watchdog.note_step_seconds(0.001)
        watchdog.beat(7, "saving")
        deadline = time.monotonic() + 60
        while (heartbeat := read_heartbeat(tmp_path, 3)) is None or heartbeat.step != 7 or heartbeat.since < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (heartbeat.rank, heartbeat.doing, heartbeat.pid) == (3, "saving", os.getpid())
    assert heartbeat.host
    assert heartbeat.measure_silence(heartbeat.time + 5) == 5
    assert ended == [], "without a factor no rank is ended"
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank_00003.json"]


def test_after_the_run_nothing_is_written_and_nobody_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    ended: list[int] = []
    with open_watchdog(tmp_path, 0, 1, 2.0, 0.2, ended.append) as watchdog:
        watchdog.note_step_seconds(0.001)
        watchdog.beat(1, "computing")
    before = (tmp_path / "heartbeat/rank_00000.json").read_bytes()
    time.sleep(0.8)
    assert (tmp_path / "heartbeat/rank_00000.json").read_bytes() == before
    assert ended == []


def test_the_limit_follows_the_usual_step_and_never_falls_below_the_least() -> None:
    watchdog = Watchdog(factor=50.0, min_seconds=300.0)
    assert watchdog.limit_seconds == FIRST_STEP_SECONDS, "compiling comes first"
    for _ in range(50):
        watchdog.note_step_seconds(0.5)
    assert watchdog.limit_seconds == 300.0
    for seconds in [20.0] * 30 + [4000.0] * 3:  # some of them saved or evaluated
        watchdog.note_step_seconds(seconds)
    assert watchdog.limit_seconds == 50 * 20.0


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"rank": 1}', "\x00\xff", '{"rank": 1, "nonsense": 2}', "[" * 100_000]
)
def test_a_broken_heartbeat_is_none(tmp_path: Path, content: str) -> None:
    write_heartbeat(tmp_path, make_heartbeat(1))
    (tmp_path / "heartbeat/rank_00001.json").write_text(content, encoding="latin-1")
    assert read_heartbeat(tmp_path, 1) is None
    assert read_heartbeat(tmp_path, 2) is None


def test_a_heartbeat_whose_numbers_are_text_is_none(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, make_heartbeat(1))
    path = tmp_path / "heartbeat/rank_00001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "since": "long"}))
    assert read_heartbeat(tmp_path, 1) is None


def make_heartbeat(
    rank: int, *, step: int = 120, doing: str = "exchanging gradients", since: float = 310.0, silent: float = 0.5
) -> Heartbeat:
    return Heartbeat(rank, step, doing, since, 1_000_000.0 - silent, "node7", 4711)


def describe(own: Heartbeat, *others: Heartbeat | None) -> str:
    """What `own` says, without what it says of itself."""
    text = describe_hang(own, {number + 1: other for number, other in enumerate(others)})
    before, _, after = text.partition("; ")
    assert before.startswith(f"rank {own.rank} has made no progress for {own.since:.0f} s: after step {own.step} ")
    return after


def test_a_dead_process_is_named_before_all_others() -> None:
    own = make_heartbeat(0)
    dead = make_heartbeat(2, doing="waiting for data", since=3.0, silent=290)
    assert describe(own, make_heartbeat(1, since=400), dead) == (
        "it waits for rank 2 (no heartbeat for 290 s, its process 4711 on node7 may be dead), "
        "last seen waiting for data after step 120"
    )
    assert describe(own, None) == "it waits for rank 1, which has sent no heartbeat"


def test_the_rank_that_came_least_far_is_the_one_waited_for() -> None:
    own = make_heartbeat(0)
    earlier_step = make_heartbeat(2, step=119, doing="computing", since=305)
    assert describe(own, make_heartbeat(1), earlier_step) == "it waits for rank 2, computing after step 119 for 305 s"
    earlier = make_heartbeat(1, doing="waiting for data", since=330)
    assert describe(own, earlier, make_heartbeat(2)) == "it waits for rank 1, waiting for data after step 120 for 330 s"
    assert describe(make_heartbeat(0, since=330), make_heartbeat(1)) == "the other ranks wait for it"


def test_ranks_that_stand_in_one_place_blame_none_of_them() -> None:
    own = make_heartbeat(0)
    assert describe(own, make_heartbeat(1, since=309)) == "so have all 2 ranks: a collective hangs"


def test_of_many_dead_ranks_only_some_are_named() -> None:
    text = describe(make_heartbeat(0), *[None] * 63)
    assert text.count("has sent no heartbeat") == 4
    assert text.endswith("; and 59 more")

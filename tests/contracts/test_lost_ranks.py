"""Ranks start together and end together: what one finds wrong, and which one is lost, is said once, by all of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, Start, wait_for_text
from zygote import Process

from gptmill.config import exit_codes
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed, RunFinished, Warned
from gptmill.runs.history import read_history

FLAGS = [*TINY_FLAGS, *"--mini_batch_size 2 --eval_freq 100000 --sample_tokens 0 --checkpoint_freq 5".split()]
ENDLESS = [*FLAGS, "--max_steps", "100000", "--run_name", "two"]
WAIT_SECONDS = 60.0

# gptmill, after a patch that only rank 1 gets, and with clocks that run faster.
PATCHED = """
import os, sys, time
from gptmill.runtime import heartbeats, rank_store, rank_watch, ranks, watchdog
from gptmill.training import checkpointing, rank_failures
rank_watch.POLL_SECONDS, rank_watch.GRACE_SECONDS = 0.1, 0.5
rank_failures.SEARCH_SECONDS = ranks.SEARCH_SECONDS = rank_store.LEAVE_SECONDS = 1.0
checkpointing.PATIENCE_SECONDS = 2.0
watchdog.POLL_SECONDS, watchdog.SILENT_SECONDS, heartbeats.SILENT_SECONDS = 0.1, 0.5, 0.5
{everywhere}
if os.environ["RANK"] == "1":
    {patch}
from gptmill.cli.main import main
raise SystemExit(main())
"""
NOTHING = "pass"

# A machine that seems to have two GPUs, also to the processes that the supervisor starts.
TWO_GPUS_IN_CHILDREN = """
import sys
from gptmill.experiments import gpu_launcher, supervisor
gpu_launcher.count_gpus = lambda: 2
code = "from gptmill.experiments import gpu_launcher; gpu_launcher.count_gpus = lambda: 2; "
code += "from gptmill.cli.main import main; raise SystemExit(main())"
supervisor.supervise.__defaults__ = ((sys.executable, "-c", code, "train"),)
from gptmill.cli.main import main
raise SystemExit(main())
"""

StartRank = Callable[..., Process]


@pytest.fixture
def start_rank(start: Start, words: list[str]) -> StartRank:
    """Starts one of two ranks, whose options and folder may differ from the other's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def run(rank: int, *arguments: str, patch: str = NOTHING, everywhere: str = "") -> Process:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranked = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        code = PATCHED.replace("{patch}", patch.replace("\n", "\n    ")).replace("{everywhere}", everywhere)
        program = ("-c", code)
        return start("train", *words, *arguments, program=program, environment=ranked)

    return run


def finish(ranks: list[Process]) -> tuple[list[int | None], str]:
    """The exit codes, and what all of them said."""
    said = "".join(rank.communicate(timeout=WAIT_SECONDS)[0] for rank in ranks)
    return [rank.returncode for rank in ranks], said


def test_ranks_that_start_apart_name_the_run_once(tmp_path: Path, start_rank: StartRank) -> None:
    late = start_rank(1, *FLAGS, "--max_steps", "2", patch="time.sleep(1.2)")  # names hold the time in seconds
    codes, said = finish([start_rank(0, *FLAGS, "--max_steps", "2"), late])
    assert codes == [0, 0], said
    (run,) = (tmp_path / "runs").iterdir()
    assert "\n2 train" in (run / "log.txt").read_text()


def test_a_rank_that_does_not_see_the_run_takes_over_what_rank_0_resumes(tmp_path: Path, start_rank: StartRank) -> None:
    hidden = tmp_path / "elsewhere"
    hidden.mkdir()
    (hidden / "words").symlink_to(tmp_path / "words")
    flags = [*FLAGS, *"--parallel ddp --no_exact_ranks --run_name two --resume auto".split()]  # only rank 0 saves
    for steps in ("2", "4"):
        ranks = [start_rank(rank, *flags, "--max_steps", steps, patch=f"os.chdir({str(hidden)!r})") for rank in (0, 1)]
        codes, said = finish(ranks)
        assert codes == [0, 0], said
    assert "\n4 train" in (tmp_path / "runs/two/log.txt").read_text()
    assert not (hidden / "runs").exists()


@pytest.mark.parametrize(
    ("own", "patch", "sentence"),
    [
        (["--nonsense", "1"], NOTHING, "(rank 1): --nonsense: unknown flag"),
        ([], "os.chdir('/')", "(rank 1): cannot read words/manifest.json"),
    ],
    ids=["bad flag", "no corpus"],
)
def test_what_is_wrong_on_one_rank_is_said_once_and_ends_both(
    tmp_path: Path, start_rank: StartRank, own: list[str], patch: str, sentence: str
) -> None:
    ranks = [start_rank(0, *FLAGS), start_rank(1, *FLAGS, *own, patch=patch)]
    codes, said = finish(ranks)
    assert codes == [2, 2], said
    assert said.count("gptmill") == said.count(sentence) == 1, said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def read_crashes(run: Path) -> list[str]:
    return [event.reason for event in read_history(RunDirectory(run)) if isinstance(event, RunCrashed)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGSTOP, None)], ids=["killed", "hung"]
)
def test_a_rank_that_is_lost_is_named_and_ends_the_other(
    tmp_path: Path, start_rank: StartRank, number: signal.Signals, code: int | None
) -> None:
    ranks = [start_rank(rank, *ENDLESS, "--hang_seconds", "1.5") for rank in (0, 1)]
    run = tmp_path / "runs/two"
    wait_for_text(ranks[0], run / "log.txt", "\n6 train")
    os.kill(ranks[1].pid, number)
    said, _ = ranks[0].communicate(timeout=WAIT_SECONDS)
    assert ranks[0].returncode == exit_codes.RANK_LOST, said
    assert said.count("rank 1 is lost") == 1
    assert f"process {ranks[1].pid}" in said
    assert ranks[1].poll() == code
    assert any("rank 1 is lost" in reason for reason in read_crashes(run))
    assert len(list(run.glob("crash_*_rank_00001.txt"))) == 1
    if number == signal.SIGSTOP:
        last = pickle.loads((run / "flight_recorder_rank_0").read_bytes())["entries"][-1]
        assert "all" in last["profiling_name"]  # which waits for rank 1


# Rank 1 fails while it launches step 8; or its device does, and both ranks find that out where they read step 7.
AT_ONCE = """
from gptmill.training import step
make_lr = step.make_lr
def fail_late(number, *rest):
    if number == 7 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("boom")
    return make_lr(number, *rest)
step.make_lr = fail_late
"""
LATER = """
from gptmill.training.step_stats import StepStats
read = StepStats.read
def fail_late(stats):
    if stats.step == 7:
        raise ZeroDivisionError("boom") if os.environ["RANK"] == "1" else RuntimeError("NCCL communicator was aborted")
    return read(stats)
StepStats.read = fail_late
"""


@pytest.mark.parametrize("patch", [AT_ONCE, LATER], ids=["at once", "later"])
def test_a_rank_that_crashes_is_named_with_its_reason(tmp_path: Path, start_rank: StartRank, patch: str) -> None:
    ranks = [start_rank(rank, *ENDLESS, everywhere=patch) for rank in (0, 1)]
    said, failed = (rank.communicate(timeout=WAIT_SECONDS)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [exit_codes.RANK_LOST, 1], said + failed
    assert "rank 1 failed" in said
    assert "ZeroDivisionError: boom" in said
    assert "Traceback" not in said
    run = tmp_path / "runs/two"
    (file,) = run.glob("crash_step_000007_rank_00001.txt")
    assert "fail_late" in file.read_text()
    assert any("ZeroDivisionError: boom" in reason for reason in read_crashes(run))


def test_a_rank_that_loses_rank_0_says_so(tmp_path: Path, start_rank: StartRank) -> None:
    ranks = [start_rank(rank, *ENDLESS) for rank in (0, 1)]
    wait_for_text(ranks[0], tmp_path / "runs/two/log.txt", "\n6 train")
    ranks[0].kill()
    said, _ = ranks[1].communicate(timeout=WAIT_SECONDS)
    assert ranks[1].returncode == exit_codes.RANK_LOST, said
    assert said.count("rank 0 is lost") == 1


def test_a_slow_rank_is_named_in_the_log_and_in_the_history(tmp_path: Path, start_rank: StartRank) -> None:
    """It sleeps before each of its forward passes; what would last for 30 s is told at once."""
    slow = """
from gptmill.training import step
make_batch = step.make_batch
def make_slowly(*rest):
    time.sleep(0.01)
    return make_batch(*rest)
step.make_batch = make_slowly
""".strip()
    at_once = "from gptmill.training import straggler_check; straggler_check.MIN_SECONDS = 0.0\n"
    flags = [*FLAGS, "--max_steps", "24", "--run_name", "two"]
    ranks = [start_rank(0, *flags, everywhere=at_once), start_rank(1, *flags, patch=slow)]
    codes, said = finish(ranks)
    assert codes == [0, 0], said
    warnings = [event for event in read_history(RunDirectory(tmp_path / "runs/two")) if isinstance(event, Warned)]
    name = f"rank 1 on {socket.gethostname()} is a straggler"
    assert len([event for event in warnings if event.about == "straggler" and name in event.message]) == 1
    assert said.replace("\n", " ").count(name) == 1


def test_a_signal_to_one_rank_stops_both_with_its_exit_code(tmp_path: Path, start_rank: StartRank) -> None:
    ranks = [start_rank(rank, *ENDLESS) for rank in (0, 1)]
    wait_for_text(ranks[0], tmp_path / "runs/two/log.txt", "\n3 train")
    ranks[1].send_signal(signal.SIGUSR1)
    codes, said = finish(ranks)
    assert codes == [128 + signal.SIGUSR1] * 2, said
    assert "saved; resume with" in said
    ends = [event for event in read_history(RunDirectory(tmp_path / "runs/two")) if isinstance(event, RunFinished)]
    assert [event.reason for event in ends] == ["stopped by SIGUSR1"]
    assert not list((tmp_path / "runs/two").glob("crash_*"))


def test_ranks_stop_early_in_the_same_step(tmp_path: Path, start_rank: StartRank) -> None:
    early = "--eval_freq 2 --early_stop_patience 1 --early_stop_min_delta 100 --max_steps 100000 --run_name two".split()
    codes, said = finish([start_rank(rank, *FLAGS, *early) for rank in (0, 1)])
    assert codes == [0, 0], said
    assert "stopped early" in said
    assert (tmp_path / "runs/two/log.txt").read_text().splitlines()[-1].startswith("4 ")


def kill_rank_1(run: Path) -> int:
    """Kills it once it has trained some steps; returns its process number."""
    beat = run / "heartbeat/rank_00001.json"
    deadline = time.monotonic() + WAIT_SECONDS
    while not (run / "log.txt").exists() or "\n8 train" not in (run / "log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = int(json.loads(beat.read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


RESTARTED = [*FLAGS, "--max_steps", "300", "--run_name", "two", "--resume", "auto"]


@pytest.mark.torture
@pytest.mark.parametrize("way", ["torchrun", "supervised"])
def test_a_killed_rank_is_named_and_the_run_restarted(tmp_path: Path, start: Start, words: list[str], way: str) -> None:
    flags = ["train", *words, *RESTARTED]
    if way == "torchrun":
        launcher = "torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=2 -m gptmill".split()
        process = start(*flags, program=("-m", *launcher))
    else:
        flags = [flag for flag in flags if flag not in ("--device", "cpu")]
        process = start(*flags, "--gpus", "2", "--supervise", program=("-c", TWO_GPUS_IN_CHILDREN))
    pid = kill_rank_1(tmp_path / "runs/two")
    said, _ = process.communicate(timeout=5 * WAIT_SECONDS)
    assert process.returncode == 0, said
    assert "\n300 train" in (tmp_path / "runs/two/log.txt").read_text()
    crashes = read_crashes(tmp_path / "runs/two")
    assert any(f"process {pid}" in reason for reason in crashes), crashes
    assert f"process {pid}" in said

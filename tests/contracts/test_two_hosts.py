"""Several machines, on one: network namespaces as hosts, a cable between them, and the cable pulled."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, RunRanks, make_environment
from network_hosts import Host, open_hosts

import gptmill
from gptmill.runs.comparison import compare_checkpoints, describe_comparison
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunStarted
from gptmill.runs.history import read_history

LIMIT_SECONDS = 400
CUT_SECONDS = 5.0
STEPS = 40
FLAGS = [*TINY_FLAGS, *f"--data_dir words --max_steps {STEPS} --checkpoint_freq 8 --eval_freq 10 --dropout 0.1".split()]

# A run that outlives one of its hosts: torchrun starts the workers of those that are left again.
ELASTIC = "--nnodes=1:2 --rdzv_backend=c10d --rdzv_id=1 --max-restarts=3".split()
ENDLESS = [*TINY_FLAGS, *"--data_dir words --max_steps 1000000 --checkpoint_freq 4 --hang_seconds 15".split()]

StartOnHost = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with open_hosts() as pair:
            yield pair
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


@pytest.fixture
def torchrun(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[StartOnHost]:
    """Starts torchrun with gptmill on a host; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(number: int, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *words]
        started.append(hosts[number].start(command, tmp_path, make_environment()))
        return started[-1]

    yield start
    for process in started:
        for child in children(process.pid) if process.poll() is None else ():
            os.kill(child, signal.SIGKILL)  # torchrun's workers are in sessions of their own
        process.kill()
        process.communicate(timeout=60)


def children(pid: int) -> list[int]:
    """The numbers of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def wait_for_step(log: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and f"\n{step} train" in log.read_text(encoding="utf-8")):
        for process in processes:
            assert process.poll() is None, process.communicate(timeout=60)[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.torture
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.usefixtures("words")
def test_two_hosts_give_the_bits_of_one_though_their_cable_was_pulled(
    hosts: tuple[Host, Host], torchrun: StartOnHost, run_ranks: RunRanks, tmp_path: Path
) -> None:
    """The two-node command, as users write it; TCP sends again what was lost meanwhile."""
    place = ["--nnodes=2", f"--master_addr={hosts[0].address}", "--master_port=29500"]
    train = ["-m", "gptmill", "train", *FLAGS, "--run_name", "cut"]
    both = [torchrun(number, *place, f"--node_rank={number}", *train) for number in (0, 1)]
    log = tmp_path / "runs/cut/log.txt"
    wait_for_step(log, 5, *both)
    hosts[1].plug(is_in=False)
    time.sleep(0.5)  # a step that was being logged
    done = log.read_text(encoding="utf-8")
    time.sleep(CUT_SECONDS)
    assert log.read_text(encoding="utf-8") == done
    assert f"\n{STEPS} train" not in done
    hosts[1].plug(is_in=True)
    outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)

    run_ranks("train", *FLAGS, "--run_name", "whole")
    assert log.read_text(encoding="utf-8") == (tmp_path / "runs/whole/log.txt").read_text(encoding="utf-8")
    last = f"checkpoints/step_{STEPS:06}"
    found = compare_checkpoints(tmp_path / "runs/cut" / last, tmp_path / "runs/whole" / last)
    assert found.has_same_tensors, describe_comparison(found)


@pytest.mark.torture
@pytest.mark.timeout(3 * LIMIT_SECONDS)
@pytest.mark.usefixtures("words")
def test_a_host_that_is_cut_off_is_left_behind_and_joins_again(
    hosts: tuple[Host, Host], torchrun: StartOnHost, tmp_path: Path
) -> None:
    """Whoever is left names the lost rank and goes on from the checkpoint; so do both, once the cable is back."""
    place = [*ELASTIC, f"--rdzv_endpoint={hosts[0].address}:29500"]
    train = ["-m", "gptmill", "train", *ENDLESS, "--run_name", "left", "--resume", "auto"]

    def join(number: int) -> subprocess.Popen[str]:
        # By their names, which they share, neither host would know that it is the first.
        own = [f"--local_addr={hosts[number].address}", f"--rdzv_conf=last_call_timeout=2,is_host={number == 0}"]
        return torchrun(number, *place, *own, *train)

    both = [join(0), join(1)]
    run = RunDirectory(tmp_path / "runs/left")
    wait_for_step(run.path / "log.txt", 6, *both)
    hosts[1].plug(is_in=False)
    wait_for_starts(run, 2, both[0])
    hosts[1].plug(is_in=True)
    wait_for_starts(run, 3, both[0], lambda: both.append(join(1)) if both[-1].poll() is not None else None)
    for process in both:
        process.terminate()
    outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in both]
    assert re.search(r"gptmill: rank 1 is lost: its process \d+ on .+ has not been heard of for \d+ s", outputs[0])
    assert count_ranks(run) == [2, 1, 2], "\n".join(outputs)
    steps = gptmill.open_run("left", tmp_path / "runs").metrics["step"].tolist()
    assert steps == list(range(1, len(steps) + 1))


def wait_for_starts(
    run: RunDirectory, starts: int, first: subprocess.Popen[str], repair: Callable[[], None] = lambda: None
) -> None:
    """Returns once the run has been started so often; `repair` does what a scheduler would."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(count_ranks(run)) < starts:
        assert first.poll() is None, first.communicate(timeout=60)[0]
        assert time.monotonic() < deadline
        repair()
        time.sleep(0.2)


def count_ranks(run: RunDirectory) -> list[int]:
    """The number of ranks of each start."""
    return [event.ranks for event in read_history(run) if isinstance(event, RunStarted)]

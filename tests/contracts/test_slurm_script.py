"""examples/cluster/train.sbatch, run as it is, on a Slurm of four small scripts: it saves, queues again and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROJECT, TINY_FLAGS, make_environment

import gptmill

SCRIPT = PROJECT / "examples" / "cluster" / "train.sbatch"
STEPS = 30
LIMIT_SECONDS = 300
# Two nodes, both this machine; the process numbers of their tasks are where scancel finds them.
SRUN = """#!/bin/bash
shift
for node in 0 1; do setsid "$@" & echo $! >> step.pids; pids="$pids $!"; done
code=0
for pid in $pids; do while wait $pid; last=$?; kill -0 $pid 2>/dev/null; do :; done; [ $last -eq 0 ] || code=$last; done
exit $code
"""
# Slurm's documentation leaves open whether a signal reaches the tasks alone or all of their processes.
SCANCEL = '#!/bin/bash\necho "$@" > scancel.said\nfor pid in $(cat step.pids); do kill -USR1 -- WHOM$pid; done\n'
WHOM = {"tasks": "", "all-processes": "-"}
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo 127.0.0.1; echo 127.0.0.1; else echo "$@" > requeued; fi\n'


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture(params=WHOM, ids=str)
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with the programs of a cluster, where torchrun trains a tiny model on CPUs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    flags = " ".join([*TINY_FLAGS, "--data_dir words", f"--max_steps {STEPS}", "--precision fp32 --no_compile"])
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@" {flags}\n'
    for name, text in {
        "srun": SRUN,
        "scancel": SCANCEL.replace("WHOM", WHOM[request.param]),
        "scontrol": SCONTROL,
        "torchrun": torchrun,
    }.items():
        write_program(programs / name, text)
    return make_environment(
        PATH=f"{programs}:{os.environ['PATH']}",
        SLURM_JOB_ID="1",
        SLURM_JOB_NODELIST="a,b",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="1",
        RUN="tiny",
    )


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Jobs that are killed in the end, with all that they started."""
    jobs: list[subprocess.Popen[str]] = []
    yield jobs
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(60)


@pytest.mark.torture
@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_a_job_near_its_end_saves_is_queued_again_and_goes_on(
    words: list[str], slurm: dict[str, str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    assert words

    def submit(**environment: str) -> subprocess.Popen[str]:
        (tmp_path / "step.pids").unlink(missing_ok=True)
        started.append(
            subprocess.Popen(
                ["bash", SCRIPT],
                cwd=tmp_path,
                env={**slurm, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    log, requeued = tmp_path / "runs/tiny/log.txt", tmp_path / "requeued"
    first = submit()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and "\n3 train" in log.read_text(encoding="utf-8")):
        assert first.poll() is None, first.communicate(timeout=60)[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGUSR1)
    output = first.communicate(timeout=LIMIT_SECONDS)[0]
    assert first.returncode != 0, output
    assert (tmp_path / "scancel.said").read_text(encoding="utf-8") == "--signal=USR1 1\n"
    assert requeued.read_text(encoding="utf-8") == "requeue 1\n", output
    steps = gptmill.open_run("tiny", tmp_path / "runs").metrics["step"].tolist()
    assert 3 <= steps[-1] < STEPS
    requeued.unlink()

    second = submit(SLURM_RESTART_COUNT="1")
    output = second.communicate(timeout=LIMIT_SECONDS)[0]
    assert second.returncode == 0, output
    assert not requeued.exists()
    assert gptmill.open_run("tiny", tmp_path / "runs").metrics["step"].tolist() == list(range(1, STEPS + 1))


@pytest.mark.torture
@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_a_job_that_cannot_start_is_not_queued_again(
    slurm: dict[str, str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """There is no corpus."""
    job = subprocess.Popen(
        ["bash", SCRIPT],
        cwd=tmp_path,
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started.append(job)
    output = job.communicate(timeout=LIMIT_SECONDS)[0]
    assert job.returncode != 0, output
    assert not (tmp_path / "requeued").exists()

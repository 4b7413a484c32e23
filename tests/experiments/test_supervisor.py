"""A supervised run: real children that crash as told, real signals, a real terminal, and a real run killed with -9."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, Start

from gptmill.experiments import supervisor as supervision
from gptmill.experiments.supervisor import Crash, Crashes, make_restart_arguments, supervise
from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import RunCrashed
from gptmill.runs.history import read_history

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# A run that reaches a step and ends as plan.json tells it to, start by start.
CRASHING = """
import json, os, sys, time
from pathlib import Path

Path("run").mkdir(exist_ok=True)
with open("starts.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
number = len(open("starts.jsonl").readlines())
step, end, words = json.loads(Path("plan.json").read_text())[number - 1]
event = {"event": "Warned", "step": step, "time": time.time(), "about": "disk", "message": ""}
Path("run/events.jsonl").write_text(json.dumps(event) + "\\n")
if end == 77:
    Path(f"run/hang_step_{step:06d}_rank_00000.txt").write_text("stacks")
sys.stderr.write(words)
sys.stderr.flush()
os.kill(os.getpid(), -end) if end < 0 else os._exit(end)
"""


Plan = Callable[..., tuple[int, list[str], list[list[str]]]]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Supervises a run that ends as planned: the exit code, what was said, and the arguments of each start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.0)

    def follow(
        *plan: tuple[int, int, str], arguments: tuple[str, ...] = ("demo",), max_restarts: int = 10
    ) -> tuple[int, list[str], list[list[str]]]:
        Path("plan.json").write_text(json.dumps(plan))
        said: list[str] = []
        program = (sys.executable, "-c", CRASHING)
        code = supervise(list(arguments), RunDirectory(Path("run")), max_restarts, said.append, program)
        return code, said, [json.loads(line) for line in Path("starts.jsonl").read_text().splitlines()]

    return follow


@pytest.mark.parametrize("code", [0, 2, 74, 75, 76, 130, 143, 138, 140, 129])
def test_an_end_that_was_meant_is_passed_on(follow: Plan, code: int) -> None:
    assert follow((5, code, "")) == (code, [], [["demo"]])
    assert read_history(RunDirectory(Path("run"))) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_asked_to_stop_before_it_could_listen_is_not_started_again(follow: Plan, name: str) -> None:
    number = getattr(signal, name)
    assert follow((0, -number, "")) == (128 + number, [], [["demo"]])


@pytest.mark.parametrize(
    ("end", "words", "reason"),
    [
        (1, "Traceback …\nRuntimeError: no\n\n", "exit code 1: RuntimeError: no"),
        (3, "", "exit code 3"),
        (-signal.SIGKILL, "", "killed by SIGKILL (out of memory?)"),
        (-signal.SIGSEGV, "Fatal\n", "killed by SIGSEGV"),
        (77, "gptmill: rank 0 has made no progress for 9 s\nbye\n", "it hung: rank 0 has made no progress for 9 s"),
    ],
)
def test_a_crashed_run_goes_on_from_its_newest_checkpoint(follow: Plan, end: int, words: str, reason: str) -> None:
    code, said, starts = follow((812, end, words), (900, 0, ""), arguments=("demo", "--max_steps", "9"))
    assert code == 0
    assert starts == [["demo", "--max_steps", "9"], ["demo", "--max_steps", "9", "--resume", "auto"]]
    assert said == [
        f"the run crashed after step 812 ({reason}); restarting it in 0 s, restart 1 of at most 10",
    ]
    (crash,) = read_history(RunDirectory(Path("run")))
    assert isinstance(crash, RunCrashed)
    assert (crash.step, crash.reason) == (812, reason)


def test_a_crash_that_repeats_at_one_step_stops_with_a_diagnosis(follow: Plan) -> None:
    crash = (41, 1, "line one\nRuntimeError: bad window\n")
    code, said, starts = follow(crash, crash, crash, (99, 0, ""))
    assert (code, len(starts)) == (1, 3)
    diagnosis = said[-1]
    assert "crashed 3 times in a row after step 41 (exit code 1: RuntimeError: bad window)" in diagnosis
    assert "  line one\n  RuntimeError: bad window\n" in diagnosis
    assert "gptmill data show --run run --step 42" in diagnosis
    assert len(read_history(RunDirectory(Path("run")))) == 3


def test_the_diagnosis_of_a_hang_says_where_the_stacks_lie(follow: Plan) -> None:
    code, said, _ = follow(*[(41, 77, "gptmill: rank 0 has made no progress for 9 s\n")] * 3)
    assert code == 1
    assert "run/hang_step_000041_rank_00000.txt" in said[-1]


@pytest.mark.parametrize("steps", [(900, 800, 850, 820), (5, 6, 7, 8), (9, 9, 10, 10)])
def test_crashes_that_do_not_repeat_go_on_to_the_limit(follow: Plan, steps: tuple[int, ...]) -> None:
    plan = [(step, 1, "") for step in steps]
    code, said, starts = follow(*plan, max_restarts=3)
    assert (code, len(starts)) == (1, 4)
    assert said[-1] == f"the run crashed 4 times, last after step {steps[-1]} (exit code 1); it is not restarted"


def test_a_log_that_ends_a_step_sooner_does_not_hide_a_repetition(follow: Plan) -> None:
    code, _, starts = follow((41, 1, ""), (40, 1, ""), (41, 1, ""), (99, 0, ""))
    assert (code, len(starts)) == (1, 3)


def test_a_run_that_crashes_before_its_first_word_stops_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.0)
    said: list[str] = []
    program = (sys.executable, "-c", "import no_such_module")
    assert supervise([], RunDirectory(tmp_path / "run"), 10, said.append, program) == 1
    assert "No module named 'no_such_module'" in said[-1]
    assert not (tmp_path / "run").exists()


def test_pauses_double_up_to_a_minute_and_shrink_when_the_run_gets_on() -> None:
    crashes = Crashes()
    pauses = []
    for step in (5, 4, 3, 2, 1, 0, 1, 2, 6):
        crashes.add(Crash(step, "", [], None))
        pauses.append(crashes.pause_seconds)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 1]


@pytest.mark.parametrize(
    ("given", "has_saved", "restart"),
    [
        ("demo", False, "demo --resume auto"),
        ("demo --supervise --max_restarts 3", False, "demo --resume auto"),
        ("--max-restarts=3 demo --supervise=true --seed 4", False, "demo --seed 4 --resume auto"),
        ("--resume latest --run_name x", False, "--run_name x --resume auto"),
        ("--resume=latest --run_name x --allow_changes", False, "--run_name x --allow_changes --resume auto"),
        ("--resume 500 --run_name x", False, "--resume 500 --run_name x"),
        ("--resume 500 --run_name x", True, "--run_name x --resume auto"),
        ("--resume best --time_limit 3h", True, "--resume auto --time_limit 2h50m"),
        ("demo --time-limit=10m1s", False, "demo --resume auto --time_limit 1s"),
    ],
)
def test_a_restart_goes_on_and_has_what_is_left_of_its_time(given: str, has_saved: bool, restart: str) -> None:
    assert make_restart_arguments(given.split(), has_saved, 600) == restart.split()


def test_no_restart_once_the_time_is_up(follow: Plan) -> None:
    assert make_restart_arguments(["demo", "--time_limit", "10m"], True, 600) == []
    code, _, starts = follow((5, 1, ""), (9, 0, ""), arguments=("demo", "--time_limit", "0.5s"))
    assert (code, len(starts)) == (75, 1)


def test_a_run_set_back_stays_so_until_it_has_saved(follow: Plan) -> None:
    (Path("run/checkpoints/step_001000")).mkdir(parents=True)
    _, _, starts = follow((505, 1, ""), (700, 0, ""), arguments=("--resume", "500"))
    assert starts[1] == ["--resume", "500"]


# Supervises the script in child.py; what is said is printed.
PARENT = """
import sys
from pathlib import Path
from gptmill.runs.directory import RunDirectory
from gptmill.experiments import supervisor as supervision

supervision.FIRST_PAUSE_SECONDS = float(sys.argv[1])
say = lambda text: print(text, flush=True)
sys.exit(supervision.supervise([], RunDirectory(Path("run")), 3, say, (sys.executable, "child.py")))
"""

# A child that listens as a run does, counts what it gets for a moment after the first, and "saves".
LISTENING = """
import os, signal, sys, time
from gptmill.runtime.signals import list_stop_signals

got = []
for number in list_stop_signals():
    signal.signal(number, lambda number, frame: got.append(number))
group = "alone" if os.getpgrp() == os.getpid() else "shared"
print("ready", os.getpid(), group, sys.stdout.isatty(), flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.25)
print("got", *map(int, got), flush=True)
sys.exit(128 + got[0])
"""


def start_parent(folder: Path, child: str, pause_seconds: float = 0.0, **options: object) -> subprocess.Popen[str]:
    (folder / "child.py").write_text(child)
    (folder / "run").mkdir(exist_ok=True)
    settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-c", PARENT, str(pause_seconds)]
    return subprocess.Popen(command, cwd=folder, text=True, **settings)  # type: ignore[call-overload, no-any-return]


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_the_parent_alone_reaches_the_child_once(tmp_path: Path, name: str) -> None:
    number = int(getattr(signal, name))
    process = start_parent(tmp_path, LISTENING)
    assert read_line(process).startswith("ready")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (output, errors, process.returncode) == (f"got {number}\n", "", 128 + number)


class Terminal:
    """A parent on a terminal of its own, which stops what writes in the background if asked to."""

    def __init__(self, folder: Path, child: str, *, stops_writers: bool = False) -> None:
        self._master, slave = pty.openpty()
        if stops_writers:
            settings = termios.tcgetattr(slave)
            settings[3] |= termios.TOSTOP
            termios.tcsetattr(slave, termios.TCSANOW, settings)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = start_parent(folder, child, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal)
        os.close(slave)
        self.shown = ""

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 4096).decode()

    def wait_for_end(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self._master)
        return code


def test_ctrl_c_on_a_terminal_reaches_the_child_once(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, LISTENING, stops_writers=True)
    terminal.wait_for("True\r\n")
    terminal.press("\x03")
    terminal.wait_for("got 2\r\n")
    assert terminal.wait_for_end() == 130
    # Two that come within a moment may be seen as one: only a child in a group of its own is sure to get one.
    assert re.search(r"ready \d+ alone", terminal.shown), terminal.shown
    assert re.search(r"ready \d+ \w+ True", terminal.shown), "the child must see the terminal, for its live display"
    assert terminal.shown.endswith("got 2\r\n")


STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_a_third_ctrl_c_ends_a_child_that_does_not_listen(tmp_path: Path) -> None:
    process = start_parent(tmp_path, STUBBORN)
    assert read_line(process) == "ready"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "no"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 128 + signal.SIGKILL
    (crash,) = read_history(RunDirectory(tmp_path / "run"))
    assert isinstance(crash, RunCrashed)
    assert crash.reason == "killed by SIGKILL after it was asked to stop"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_the_pause_before_a_restart_ends_at_once(tmp_path: Path, name: str, code: int) -> None:
    process = start_parent(tmp_path, "raise SystemExit(1)", pause_seconds=1000)
    assert "restarting it in 1000 s" in read_line(process)
    process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == code


@linux_only
def test_a_child_whose_parent_is_killed_is_asked_to_stop(tmp_path: Path) -> None:
    process = start_parent(tmp_path, LISTENING)
    assert process.stdout is not None
    child = int(read_line(process).split()[1])
    process.kill()
    try:
        assert select.select([process.stdout], [], [], 60)[0], "the child goes on"
        assert set(read_line(process).split()) == {"got", str(int(signal.SIGTERM))}  # more than once, for all it knows
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        process.communicate(timeout=60)


def read_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@linux_only
def test_ctrl_z_stops_the_child_with_its_parent_and_both_go_on(tmp_path: Path) -> None:
    process = start_parent(tmp_path, LISTENING)
    child = int(read_line(process).split()[1])
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: read_state(process.pid) == read_state(child) == "T")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: read_state(child) != "T")
    process.terminate()
    assert process.communicate(timeout=60)[0] == f"got {int(signal.SIGTERM)}\n"


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


LEAVING = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)"],
                          stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
os._exit(2)
"""


@linux_only
def test_workers_that_a_child_left_behind_are_ended(tmp_path: Path) -> None:
    process = start_parent(tmp_path, LEAVING)
    worker = int(read_line(process))
    process.communicate(timeout=60)
    assert process.returncode == 2
    wait_until(lambda: not Path(f"/proc/{worker}").exists() or read_state(worker) == "Z")


def test_what_the_child_complains_of_is_shown_and_its_output_left_alone(tmp_path: Path) -> None:
    child = 'import sys; print("to people"); sys.stderr.write("warning\\nhalf a line"); sys.exit(2)'
    process = start_parent(tmp_path, child)
    assert process.communicate(timeout=60) == ("to people\n", "warning\nhalf a line")


def test_the_supervisor_needs_no_torch() -> None:
    code = "import sys, gptmill.experiments.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# gptmill train, which kills itself with -9 at its first start once its log has come to the step.
KILLED_ONCE = """
import os, signal, sys, threading, time
from pathlib import Path
from gptmill.cli.main import main

def kill_at(text):
    log = Path("runs/watched/log.txt")
    while not (log.exists() and text in log.read_text()):
        time.sleep(0.002)
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)

if not Path("killed").exists():
    threading.Thread(target=kill_at, args=("\\n12 train",), daemon=True).start()
sys.argv = ["gptmill", "train", *sys.argv[1:]]
sys.exit(main())
"""


WATCHING = f"""
import sys
from pathlib import Path
from gptmill.experiments.supervisor import supervise
from gptmill.runs.directory import RunDirectory

say = lambda text: print("said", text)
program = (sys.executable, "-c", {KILLED_ONCE!r})
sys.exit(supervise(sys.argv[1:], RunDirectory(Path("runs/watched")), 3, say, program))
"""


def test_a_real_run_killed_with_9_reaches_its_end(tmp_path: Path, text_file: Path, start: Start) -> None:
    arguments = [*TINY_FLAGS, "--corpus", str(text_file), "--tokenizer", "byte", "--run_name", "watched"]
    arguments += ["--max_steps", "40", "--checkpoint_freq", "10", "--eval_freq", "40"]
    process = start(*arguments, program=("-c", WATCHING))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (tmp_path / "killed").exists()
    run = RunDirectory(tmp_path / "runs/watched")
    (words,) = [line for line in output.splitlines() if line.startswith("said ")]
    assert "killed by SIGKILL (out of memory?)); restarting it in 1 s, restart 1 of at most 3" in words
    steps = [line.split()[0] for line in run.text_log.read_text().splitlines() if " train " in line]
    assert steps == [str(step) for step in range(1, 41)]
    assert [event.step >= 12 for event in read_history(run) if isinstance(event, RunCrashed)] == [True]

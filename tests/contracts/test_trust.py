"""Reading a run executes and fetches nothing, unless its user has named that now or used it before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import py_compile
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import PROJECT, TINY_FLAGS, GptMill

import gptmill as package
from gptmill.cli.main import VERBS, run_guarded
from gptmill.config import trust

EXAMPLE = PROJECT / "examples/gated_attention.py"
EVIL = 'open("PWNED", "w").close()\n'
FLAGS = [
    *TINY_FLAGS,
    *"--data_dir words --max_steps 2 --checkpoint_freq 2 --sample_tokens 0 --attention gated --run_name s".split(),
]
# Every verb as it meets a run that somebody sent. None may run the plug-in that the run names, nor open its address.
CALLS = {
    "prepare": ["prepare words.txt --out again --tokenizer byte"],
    "tokenizer": ["tokenizer show runs/s/tokenizer.json --text a"],
    "data": ["data show --run s --step 1", "data info words", "data score words --by loss --run s --device cpu"],
    "train": [
        "train --run_name s --resume latest",
        "train --run_name s --resume latest --max_steps 50 --supervise --max_restarts 3",
        "train runs/s/config.toml --run_name new",
        "train extends.toml --run_name new",
        "train --resume runs/s/checkpoints/latest --run_name branch",
        "train --init_from s --data_dir words --run_name new --device cpu",
        "train --run_name s --list_checkpoints",
    ],
    "plan": ["plan runs/s/config.toml", "plan extends.toml"],
    "tune": ["tune demo --write runs/s/config.toml", "tune runs/s/config.toml --max_trials 1"],
    "bench": ["bench runs/s/config.toml --steps 1"],
    "verify-resume": ["verify-resume runs/s/config.toml"],
    "runs": ["runs list", "runs compare s s"],
    "report": ["report s --format md", "report s --format json"],
    "checkpoints": ["checkpoints list s", "checkpoints verify s", "checkpoints prune s", "checkpoints history s"],
    "tensorboard": ["tensorboard nothing"],
    "sample": ["sample s --max_new_tokens 2 --device cpu", "sample runs/s/checkpoints/latest --device cpu"],
    "eval": ["eval s --device cpu"],
    "import": ["import s --out imported"],
    "export": ["export s --to gguf --out exported"],
    "compress": ["compress s --out compressed --device cpu"],
    "doctor": [],  # reads no run
    "config": ["config show runs/s/config.toml", "config show extends.toml", "config list"],
    "completion": ["completion bash"],
}

# Those that read the options of the run themselves; others train by what they read, for which `train` stands here.
USE_CONFIG = ("data", "train", "plan", "runs", "report", "eval", "export", "compress", "config")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_new_parts")]


@pytest.fixture(autouse=True)
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """trusted.json of a user who has used nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(trust.SWITCH, raising=False)
    monkeypatch.setenv(trust.PLACE, str(tmp_path / "home/trusted.json"))
    for name in ("_suspects", "_named"):
        monkeypatch.setattr(trust, name, type(getattr(trust, name))())
    return tmp_path / "home/trusted.json"


def receive(straight: Path, **options: str | None) -> None:
    """Makes a run that somebody sent of one that was trained: runs/s, whose config.toml and checkpoints say more."""
    straight.rename("runs/s")
    for path in Path("runs/s/checkpoints").glob("step_*/checkpoint.json"):
        content = json.loads(path.read_text())
        del content["sha256"]
        content["values"]["config"].update(options)
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content, indent=1))
    config = Path("runs/s/config.toml").read_text()
    for name, value in options.items():
        line = f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}"
        config = re.sub(rf"(# {name} is not set|{name} = .*)", line, config)
    Path("runs/s/config.toml").write_text(config)
    Path("extends.toml").write_text('extends = "runs/s/config.toml"\n')


def call(command: str) -> int:
    with contextlib.suppress(SystemExit):
        return run_guarded(command.split())
    return 0


def test_every_verb_is_tried() -> None:
    assert CALLS.keys() == VERBS.keys()


def test_reading_a_run_never_executes_it(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receive(straight, plugin="parts.py")
    for place in (Path("parts.py"), Path("runs/s/parts.py")):
        place.write_text(EVIL)
    for command in [command for commands in CALLS.values() for command in commands]:
        code = call(command)
        printed = capsys.readouterr()
        assert not Path("PWNED").exists(), command
        assert "Traceback" not in printed.err, command
        assert code in (0, 2), (command, printed.err)
        if "--trust" in printed.err:
            assert code == 2, command
            assert printed.err.count("\n") == 1, command
    run = package.open_run("s")
    assert "finished" in repr(run)
    assert (run.state, run.step, run.config.plugins.plugin) == ("finished", 40, "runs/s/parts.py")
    assert not Path("PWNED").exists()
    with pytest.raises(package.UserError, match="add --trust"):
        package.train(run.config, run_name="new")
    with pytest.raises(package.UserError, match="add --trust"):
        package.plan(run.config)
    run.load(device="cpu")  # needs none of its parts
    assert not Path("PWNED").exists()
    assert not Path("runs/new").exists()
    assert call("eval s --device cpu --trust") == 0
    assert Path("PWNED").exists()


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """An address, and the paths that it was asked for."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_PUT = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def test_reading_a_run_never_opens_an_address(
    straight: Path, server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, asked = server
    receive(straight, data_dir=f"{address}/x", mirror_to=f"{address}/runs")
    for command in [command for verb in USE_CONFIG for command in CALLS[verb]]:
        code = call(command)
        printed = capsys.readouterr()
        assert not asked, command
        assert "Traceback" not in printed.err, command
        assert code in (0, 2), (command, printed.err)
    resume = "train --run_name s --resume latest --max_steps 41"
    assert call(resume) == 2
    assert f"names the address {address}/x" in capsys.readouterr().err
    assert call(f"{resume} --data_dir words") == 2
    assert f"names the address {address}/runs" in capsys.readouterr().err
    assert not asked
    call(f"{resume} --trust")
    assert asked


@pytest.mark.parametrize("value", ["{0}/a=0.5,{0}/b=0.5", "HTTP:/{1}/a=1"])
def test_an_address_in_a_mixture_counts(
    straight: Path, server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str], value: str
) -> None:
    address, asked = server
    receive(straight, mixture=value.format(address, address.removeprefix("http://")), data_dir=None)
    for command in ("train --run_name s --resume latest", "eval s --device cpu", "plan runs/s/config.toml"):
        assert call(command) == 2, command
        assert "names the address http://127.0.0.1" in capsys.readouterr().err
    assert not asked


def test_an_address_counts_if_it_is_named_now(straight: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    receive(straight, data_dir=f"{address}/x")
    assert package.open_run("s").config.data.data_dir == f"{address}/x"
    for open_address in (package.open_corpus, package.prepare):
        with pytest.raises(package.UserError):
            open_address(f"{address}/x/y")
        assert asked
        asked.clear()
    call(f"train --run_name s --resume latest --data_dir {address}/x")
    assert asked
    asked.clear()
    call("train --run_name s --resume latest --data_dir words --max_steps 44")
    assert not asked


def train(gptmill: GptMill) -> None:
    shutil.copyfile(EXAMPLE, "gated.py")
    gptmill("train", *FLAGS, "--plugin", "gated.py")


@pytest.mark.usefixtures("words")
def test_a_run_of_the_user_goes_on_by_its_name(gptmill: GptMill, fresh_home: Path) -> None:
    train(gptmill)
    assert call("sample s --max_new_tokens 2 --device cpu") == 0
    assert call("train --run_name s --resume latest --max_steps 3") == 0
    assert call("plan runs/s/config.toml") == 0
    assert list(json.loads(fresh_home.read_text())["trusted"].values()) == ["gated.py"]


@pytest.mark.usefixtures("words")
def test_a_repeated_command_resumes_in_a_fresh_home(gptmill: GptMill, fresh_home: Path) -> None:
    train(gptmill)
    fresh_home.unlink()
    repeated = [*FLAGS, "--resume", "auto", "--max_steps", "3"]
    gptmill("train", *repeated, "--plugin", "gated.py")
    assert "3 train" in Path("runs/s/log.txt").read_text()
    fresh_home.unlink()
    Path("own.toml").write_text('[plugins]\nplugin = "gated.py"\n[model]\nattention = "gated"\n')
    gptmill("train", "own.toml", "--run_name", "s", "--resume", "auto", "--max_steps", "4", "--logdir", "runs")
    assert "4 train" in Path("runs/s/log.txt").read_text()


@pytest.mark.usefixtures("words")
def test_a_run_of_an_older_version_is_refused_once(
    gptmill: GptMill, fresh_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(gptmill)
    fresh_home.unlink()
    before = {path: path.stat().st_mtime_ns for path in Path("runs/s").rglob("*")}
    for command in ("train --run_name s --resume latest --max_steps 3", "sample s --device cpu", "eval s --device cpu"):
        assert call(command) == 2
        error = capsys.readouterr().err
        assert "gated.py" in error
        assert error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path("runs/s").rglob("*")} == before
    assert call("config show runs/s/config.toml") == 0
    shown = capsys.readouterr().out
    assert "the plug-in gated.py is not loaded" in shown
    assert 'gate_bias = "2.0"' in shown
    assert package.open_run("s").config.model.attention.tag == "gated"
    assert call("runs list") == 0
    assert "damaged" not in capsys.readouterr().out
    assert call("train --run_name s --resume latest --max_steps 3 --trust") == 0
    assert call("train --run_name s --resume latest --max_steps 4") == 0
    capsys.readouterr()
    assert call("checkpoints history s") == 0
    history = capsys.readouterr().out
    assert history.count("trusted the plug-in gated.py (sha256:") == 1


@pytest.mark.usefixtures("words")
def test_changed_code_takes_one_flag(gptmill: GptMill) -> None:
    train(gptmill)
    Path("gated.py").write_text(Path("gated.py").read_text() + "# changed\n")
    assert gptmill("train", "--run_name", "s", "--resume", "latest", "--max_steps", "3", check=False).returncode == 2
    gptmill("train", "--run_name", "s", "--resume", "latest", "--max_steps", "3", "--allow_changes")
    gptmill("train", "--run_name", "s", "--resume", "latest", "--max_steps", "4")


@pytest.mark.usefixtures("words")
def test_bytecode_of_other_code_is_not_executed(gptmill: GptMill) -> None:
    """Python runs bytecode that says it was made of a file of this size and time, which the fingerprint covers."""
    train(gptmill)
    source = Path("gated.py")
    content, time = source.read_bytes(), source.stat().st_mtime
    source.write_bytes(EVIL.encode() + b"#" * (len(content) - len(EVIL)))
    os.utime(source, (time, time))
    py_compile.compile("gated.py", doraise=True)
    source.write_bytes(content)
    os.utime(source, (time, time))
    gptmill("sample", "s", "--max_new_tokens", "2", "--device", "cpu")
    assert not Path("PWNED").exists()


def test_two_starts_at_once_are_both_remembered(fresh_home: Path) -> None:
    def start(number: int) -> None:
        trust.remember_run({"data_dir": f"s3://bucket/{number}"})

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(fresh_home.read_text())["trusted"]) == 8


@pytest.mark.usefixtures("straight")
def test_a_home_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(trust.PLACE, str(tmp_path / "file/trusted.json"))
    trust.remember_run({"data_dir": "s3://bucket/x"})
    assert "to resume the run by its name alone, add --trust" in capsys.readouterr().err
    assert call("train --run_name straight --resume latest --max_steps 41") == 0

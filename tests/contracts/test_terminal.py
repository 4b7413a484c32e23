"""What a stranger's run, corpus or words hold never commands the terminal, and gptmill's own displays still do."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unicodedata import bidirectional, category

import pytest
from conftest import TINY_FLAGS, make_environment
from zygote import Zygote

from gptmill.api.progress import show_amount
from gptmill.cli import sample
from gptmill.cli.main import run_guarded
from gptmill.config.text import guard_output, sanitize
from gptmill.runs.events import RunStarted, StepLogged, Warned
from gptmill.runs.trackers.console import build_console

ATTACK = "\x1b]0;pwned\x07\x1b[2J\x1b[8m\x9b2J\u202e\u2028\rx"
SHOWN = r"\x1b]0;pwned\x07\x1b[2J\x1b[8m\x9b2J\u202e\u2028\rx"
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def test_what_commands_a_terminal_is_escaped_and_all_else_is_kept() -> None:
    directions = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    for character in map(chr, range(0x10000)):
        is_command = category(character) in ("Cc", "Cs", "Zl", "Zp") or bidirectional(character) in directions
        expected = ascii(character)[1:-1] if is_command and character not in "\t\n" else character
        assert sanitize(character) == expected, ascii(character)
    assert sanitize(ATTACK) == sanitize(SHOWN) == SHOWN
    assert sanitize("\r\n a\r") == "\r\n a\\r"


def spoil(value: object) -> object:
    """A JSON value with the attack behind every text in it, but the kinds of events."""
    if isinstance(value, dict):
        return {
            name: item if name in ("event", "format", "dtype", "name", "file", "tag") else spoil(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [spoil(item) for item in value]
    return value + ATTACK if isinstance(value, str) else value


@pytest.fixture
def hostile(straight: Path) -> str:
    """A run and a corpus with the attack in their names, logs, options and checkpoints."""
    for log in (straight / "events.jsonl", straight / "ledger.jsonl"):
        lines = log.read_text(encoding="utf-8").split("\n")[:-1]
        log.write_text("".join(json.dumps(spoil(json.loads(line))) + "\n" for line in lines), encoding="utf-8")
    checkpoints = straight / "checkpoints"
    (checkpoints / ATTACK).symlink_to(next(checkpoints.glob("step_*")).name)
    with (straight / "config.toml").open("a", encoding="utf-8") as config:
        config.write(f"\n[{json.dumps(ATTACK)}]\n{json.dumps(ATTACK)} = {json.dumps(ATTACK)}\n")
    manifest = straight.parent.parent / "words/manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["source"] = spoil(content["source"]) | {ATTACK: ATTACK}
    manifest.write_text(json.dumps(content), encoding="utf-8")
    straight.rename(straight.with_name(ATTACK))
    return ATTACK


def test_no_verb_passes_on_what_a_stranger_wrote(
    hostile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = f"runs/{hostile}/config.toml"
    for words in (
        ["runs", "list"],
        ["runs", "compare", hostile, hostile],
        *(["checkpoints", action, hostile] for action in ("list", "history", "prune")),
        *(["checkpoints", action, hostile, hostile] for action in ("compare", "remove")),
        *([verb, hostile] for verb in ("report", "eval", "export", "prepare", hostile)),
        *([*words, config] for words in (["plan"], ["config", "show"])),
        ["data", "info", "words"],
        ["data", "show", hostile],
        ["data", "show", "--run", hostile, "--step", "1"],
        ["train", f"--{hostile}", hostile],
    ):
        run_guarded(words)
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert not COMMANDS.search(output), (words, ascii(output))
        assert SHOWN[:16] in output, (words, output)


class TerminalText(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TerminalText]:
    """Both streams, behind the gate, on a terminal whose text this is."""
    text = TerminalText()
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(text), redirect_stderr(text):
        guard_output()
        yield text


def test_displays_draw_and_what_is_printed_meanwhile_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as output:
        assert not sys.stderr.isatty()  # so that libraries draw nothing
        display = build_console()
        display.track(RunStarted(0, ATTACK, 20, 64, 1000, "CPU", "fp32", 1, "c", "t", "0", "2", None))
        display.track(StepLogged(1, 0.1, 2.5, 6e-4, 1.25, 4321.0, 60.0))
        sys.stdout.writelines([ATTACK, " printed\n"])
        sys.stderr.write(f"{ATTACK} warned\n")
        display.track(Warned(1, "disk", f"{ATTACK} tracked"))
        display.close()
        with show_amount(f"{ATTACK} reported", "steps") as report, monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: 1e9)
            report(1, 2)
        sys.stdout.write(f"{ATTACK} at last\n")
    drawn = re.compile("\x1b\\[(?:[0-9;]*m|[0-9]*[AK]|\\?25[lh])|\r")
    shown = output.getvalue()
    assert {"\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r"} <= set(drawn.findall(shown))
    assert "\x1b[8m" not in shown
    plain = drawn.sub("", shown)
    assert not COMMANDS.search(plain), ascii(plain)
    assert "1/20" in plain
    for word in ("printed", "warned", "at last"):
        assert f"{SHOWN} {word}\n" in plain, word
    for word in ("tracked", "reported"):  # rich leaves out a few control characters itself
        assert re.search(r"\\x1b\]0;pwned\\x1b.{,40}" + word, plain), word


def test_a_sample_goes_to_a_terminal_escaped_and_into_a_file_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, written in ((True, SHOWN), (False, ATTACK)):
        with terminal(monkeypatch) as output:
            output.is_terminal = is_terminal
            sample.write(ATTACK)
        assert output.getvalue() == written


def test_a_real_terminal_gets_the_display_and_no_commands(words: list[str], tmp_path: Path, zygote: Zygote) -> None:
    master, slave = pty.openpty()
    flags = [*TINY_FLAGS, *words, "--max_steps", "2", "--logdir", f"runs{ATTACK}", "--run_name", "a"]
    options = {"stdin": slave, "stdout": slave, "stderr": slave, "takes_terminal": True}
    environment = make_environment(TERM="xterm")
    with zygote.start(["-m", "gptmill", "train", *flags], tmp_path, environment, **options) as process:  # type: ignore[arg-type]
        os.close(slave)
        written = b""
        with suppress(OSError):  # once the program has closed the terminal
            while block := os.read(master, 65536):
                written += block
        os.close(master)
        assert process.wait(60) == 0
    shown = written.decode()
    assert "\x1b[?25l" in shown
    assert "2/2" in shown
    assert f"The run is in runs{SHOWN}/a/." in shown
    assert not re.search("\x1b\\]|\x1b\\[2J|\x1b\\[8m|[\x07\x9b\u2028\u202e]", shown)

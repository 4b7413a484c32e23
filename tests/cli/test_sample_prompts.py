"""gptmill sample on a byte-level run: files of prompts, JSON, stop strings, hostile options, a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS, make_environment, run_forked
from zygote import Zygote

from gptmill.cli.main import run_guarded
from gptmill.config.requests import LoadingOptions
from gptmill.inference.opening import open_model

TEXT = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise\n" * 100
LINE = "\n\n" + "─" * 72 + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """A folder in which `gptmill train` has made the run `tiny`."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "words.txt").write_text(TEXT, encoding="utf-8")
    flags = "--corpus words.txt --tokenizer byte --max_steps 4 --checkpoint_freq 2 --run_name tiny".split()
    run_forked(["train", *flags, *TINY_FLAGS], folder, zygote)
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def sample(capsys: pytest.CaptureFixture[str], *flags: str, run: str = "tiny") -> str:
    assert run_guarded(["sample", run, "--device", "cpu", "--max_new_tokens", "20", *flags]) == 0
    return capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run_guarded(["sample", "tiny", "--device", "cpu", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gptmill: ")
    return captured.err


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_many_samples_into_a_file_show_how_long_they_will_take(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptmill.api.progress.PLAIN_SECONDS", 0.0)
    call = ["sample", "tiny", "--device", "cpu", "--max_new_tokens", "5", "--num_samples", "4", "--batch_size", "2"]
    assert run_guarded([*call, *flags]) == 0
    lines = capsys.readouterr().err.splitlines()
    amounts = [int(line.removeprefix("sampling: ").split(" of 20 tokens, ")[0]) for line in lines]
    assert amounts == sorted(amounts)
    assert {2, 20} <= set(amounts)  # a token of the first two samples; all of all
    assert lines[-1].endswith(" tokens, 0 s left")


def test_a_file_of_prompts_gives_what_each_gives_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["the quick", "a\u2028\x85b", "é 🙂 and rivers"]  # separators that end no line
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_bytes("\r\n\r\n".join(prompts).encode())
    written = [json.dumps({"prompt": prompt, "id": 1}, ensure_ascii=False) for prompt in prompts]
    records.write_bytes("\n".join(written).encode())
    alone = [
        sample(capsys, "--prompt", prompt, "--seed", str(42 + 2 * number), "--num_samples", "2")
        for number, prompt in enumerate(prompts)
    ]
    for path in (lines, records):
        for size in ("1", "4", "32"):
            found = sample(capsys, "--prompt_file", str(path), "--num_samples", "2", "--batch_size", size)
            assert found == LINE.join(text.removesuffix("\n") for text in alone) + "\n"


def test_json_has_the_tokens_and_their_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "the", "--num_samples", "2", "--top_k", "5", "--repetition_penalty", "1.2"]
    records = [json.loads(line) for line in sample(capsys, *flags, "--json").splitlines()]
    plain = sample(capsys, *flags).removesuffix("\n").split(LINE)
    model = open_model("tiny", LoadingOptions(device="cpu"))
    for number, record in enumerate(records):
        assert set(record) == {"prompt", "text", "tokens", "log_probs", "finish_reason", "seed"}
        assert record["prompt"] == "the"
        assert "the" + record["text"] == plain[number]
        assert record["seed"] == 42 + number
        assert model.decode(record["tokens"]) == record["text"]
        prompt = model.encode_document("the")
        logits = model([*prompt, *record["tokens"]][:16])[len(prompt) - 1 : -1]
        count = len(logits)
        expected = logits.log_softmax(dim=-1)[torch.arange(count), torch.tensor(record["tokens"][:count])]
        assert record["log_probs"][:count] == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(record["log_probs"]) == len(record["tokens"])
    assert all(record["finish_reason"] in ("length", "end_of_text") for record in records)


def test_texts_stop_before_any_of_several_strings(capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = [json.loads(sample(capsys, "--prompt", "the", "--json"))]
    first, second = whole["text"][9:12], whole["text"][5:7]
    record = json.loads(sample(capsys, "--prompt", "the", "--json", "--stop", first, f"--stop={second}"))
    assert record["finish_reason"] == "stop"
    assert record["text"] == whole["text"][: min(whole["text"].find(first), whole["text"].find(second))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--top_p 2", "--top_p 2.0: must be above 0 and at most 1"),
        ("--min_p -1", "--min_p -1.0: must lie between 0 and 1"),
        ("--repetition_penalty -0.5", "--repetition_penalty -0.5: must be above 0"),
        ("--batch_size 0", "--batch_size 0: must be at least 1"),
        ("--stop=", "must not be empty"),
        ("--prompt a --prompt_file words.txt", "different sources of prompts; keep one"),
        ("--interactive --json", "leave one out"),
        ("--prompt_file none.txt", "none.txt: No such file or directory"),
        ("--context rolling", "--context rolling needs RoPE, and this model has learned positions"),
    ],
)
def test_options_that_cannot_be_met_are_refused(flags: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refuse(capsys, *flags.split())


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"\n \n", "holds no prompts"),
        ("latin.txt", b"the \xe9", "not UTF-8 at byte 4"),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": 3}', "line 2: expected a JSON object"),
        ("deep.jsonl", b"[" * 100_000, "line 1: expected a JSON object"),
    ],
)
def test_files_without_usable_prompts_are_refused(
    name: str, content: bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in refuse(capsys, "--prompt_file", str(tmp_path / name))


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_file_of_prompts_that_cannot_be_read_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot read --prompt_file {name}: " in refuse(capsys, "--prompt_file", name)


def test_a_prompt_of_a_million_characters_counts_by_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for length in (1_000_000, 100):
        prompt = ("the quick fox " * 80_000)[-length:]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
        assert run_guarded(["sample", "tiny", "--device", "cpu", "--prompt", "-", "--max_new_tokens", "5"]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out.removeprefix(prompt))
        assert f"a prompt has {length + 1:,} tokens; the model sees its last 16" in captured.err
    assert outputs[0] == outputs[1]


def test_an_empty_prompt_starts_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(json.loads(sample(capsys, "--prompt", "", "--json"))["tokens"]) > 0


def test_a_damaged_newest_checkpoint_is_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sample(capsys, "--checkpoint", "2")
    weights = folder / "runs" / "tiny" / "checkpoints" / "step_000004" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    try:
        assert run_guarded(["sample", "tiny", "--device", "cpu", "--max_new_tokens", "20"]) == 0
    finally:
        weights.write_bytes(content)
    captured = capsys.readouterr()
    assert captured.out == expected
    assert "using step 2 instead" in captured.err


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, zygote: Zygote, folder: Path, *flags: str) -> None:
        self._master, slave = pty.openpty()
        words = ["-m", "gptmill", "sample", "tiny", "--device", "cpu", "--interactive", *flags]
        options = {"stdin": slave, "stdout": slave, "stderr": slave, "takes_terminal": True}
        self.process = zygote.start(words, folder, make_environment(TERM="dumb"), **options)  # type: ignore[arg-type]
        os.close(slave)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, count: int = 1, *, pressing: str = "") -> None:
        """Returns once the text was shown so many times; presses a key again and again that may go unheard.

        Ctrl-C may: readline shows its prompt, then listens, and an interrupt in between waits for the next key.
        """
        deadline = time.monotonic() + 60
        while self.output.count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} not {count} times within 60 s:\n{self.output}"
            if not select.select([self._master], [], [], 5)[0]:
                self.type(pressing)
                continue
            try:
                self.output += os.read(self._master, 4096).decode(errors="replace").replace("\r", "")
            except OSError:
                pytest.fail(f"ended without {text!r}, {count} times:\n{self.output}")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        os.close(self._master)


def test_an_interactive_terminal_continues_each_prompt(
    folder: Path, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = ("--temperature", "0", "--max_new_tokens", "8")
    expected = sample(capsys, "--prompt", "the quick", *greedy).split("\n")[0]
    with Terminal(zygote, folder, *greedy) as terminal:
        terminal.wait_for("> ")
        terminal.type("the quick\n")
        terminal.wait_for("> ", 2)
        assert expected in terminal.output
        terminal.type("half a li\x03")  # Ctrl-C clears the line
        terminal.wait_for("> ", 3, pressing="\x03")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_ctrl_c_stops_a_text_and_asks_for_the_next_prompt(folder: Path, zygote: Zygote) -> None:
    with Terminal(zygote, folder, "--max_new_tokens", "1000000", "--context", "half") as terminal:
        terminal.wait_for("> ")
        terminal.type("the\n")
        terminal.wait_for("the", 2)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("> ", 2)
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0

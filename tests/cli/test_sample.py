"""gptmill sample, as a process, on a tiny run of a char corpus."""

from __future__ import annotations

import io
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill, run_forked
from zygote import Zygote

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.requests import LoadingOptions
from gptmill.config.sample_request import SampleRequest
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.sampling import find_problems, open_sampler

ON_CPU = LoadingOptions(device="cpu")
SEPARATOR = "\n\n" + "─" * 72 + "\n"
TEXT = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise\n" * 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """A folder in which `gptmill train` has made the run `tiny`."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "words.txt").write_text(TEXT, encoding="utf-8")
    flags = "--corpus words.txt --tokenizer char --sample_prompt the --max_steps 3 --run_name tiny".split()
    run_forked(["train", *flags, *TINY_FLAGS], folder, zygote)
    return folder


@pytest.fixture(autouse=True)
def _run(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")


def draw(gptmill: GptMill, flags: str, run: str = "tiny") -> list[str]:
    output = gptmill("sample", run, "--device", "cpu", *flags.split()).stdout
    assert output.endswith("\n")
    return output[:-1].split(SEPARATOR)


def refuse(gptmill: GptMill, *arguments: str) -> str:
    process = gptmill("sample", *arguments, "--device", "cpu", check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("gptmill: ")
    assert "Traceback" not in process.stderr
    return process.stderr


def test_a_seed_names_a_text_and_sample_i_has_seed_plus_i(gptmill: GptMill) -> None:
    first = draw(gptmill, "--seed 5 --num_samples 3 --prompt the --max_new_tokens 40")
    again = draw(gptmill, "--seed 6 --num_samples 2 --prompt the --max_new_tokens 40", run="runs/tiny")
    assert len(set(first)) == 3
    assert again == first[1:]
    assert all(text.startswith("the") for text in first)
    assert set("".join(first)) <= set(TEXT)


def test_temperature_zero_ignores_the_seed_and_equals_the_likeliest_of_one(gptmill: GptMill) -> None:
    greedy = draw(gptmill, "--temperature 0 --num_samples 2 --prompt the --max_new_tokens 40")
    likeliest = draw(gptmill, "--top_k 1 --seed 9 --prompt the --max_new_tokens 40")
    assert greedy[0] == greedy[1] == likeliest[0]
    assert len(greedy[0]) > len("the")


def test_a_checkpoint_is_sampled_by_its_path_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree("runs/tiny/checkpoints/step_000003", "elsewhere/model")
    texts = []
    for place in ("tiny", "runs/tiny/checkpoints/step_000003", "runs/tiny/checkpoints/latest", "elsewhere/model"):
        assert run_guarded(["sample", place, "--device", "cpu", "--prompt", "the"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == texts[:1] * 4
    assert run_guarded(["sample", "elsewhere/model", "--device", "cpu", "--step", "3"]) == 2
    assert "leave out --checkpoint 3" in capsys.readouterr().err
    (tmp_path / "elsewhere/model/model.safetensors").unlink()
    assert run_guarded(["sample", "elsewhere/model", "--device", "cpu"]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("given", [b"the quick", b"the quick\n", b"the quick\r\n"])
def test_the_prompt_may_come_from_standard_input(
    given: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["sample", "tiny", "--device", "cpu", "--prompt", "the quick"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert run_guarded(["sample", "tiny", "--device", "cpu", "--prompt", "-"]) == 0
    assert capsys.readouterr().out == expected


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \xff")))
    assert run_guarded(["sample", "tiny", "--prompt", "-"]) == 2
    assert "not UTF-8 at byte 4" in capsys.readouterr().err


def test_a_prompt_outside_the_alphabet_names_the_strange_characters(gptmill: GptMill) -> None:
    message = refuse(gptmill, "tiny", "--prompt", "the Ωmega")
    assert "'Ω'" in message
    assert "--prompt" in message


def test_an_unknown_run_suggests_the_nearest(gptmill: GptMill) -> None:
    message = refuse(gptmill, "tinny")
    assert "'tinny'" in message
    assert "did you mean tiny?" in message


def test_a_run_without_checkpoints_is_named(gptmill: GptMill, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "runs" / "tiny" / "checkpoints")
    message = refuse(gptmill, "tiny")
    assert "runs/tiny has no checkpoint" in message
    assert "--resume" not in message  # nobody asked to resume


def test_a_step_that_was_not_saved_is_named(finished: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 2;"):
        open_sampler("tiny", SampleRequest(loading=LoadingOptions("2", device="cpu", logdir=str(finished / "runs"))))


def test_wrong_settings_are_all_listed_before_anything_is_read(gptmill: GptMill) -> None:
    wrong = {"top_p": "1.5", "top_k": "0", "temperature": "-1", "num_samples": "0", "max_new_tokens": "0", "seed": "-1"}
    message = refuse(gptmill, "no-such-run", *(f"--{name}={value}" for name, value in wrong.items()))
    assert "6 problems:" in message
    for name in wrong:
        assert f"  - --{name} " in message


@pytest.mark.parametrize(
    "request_",
    [
        SampleRequest(top_p=0.0),
        SampleRequest(top_p=float("nan")),
        SampleRequest(temperature=float("nan")),
        SampleRequest(seed=2**64),
    ],
    ids=["top_p 0", "top_p nan", "temperature nan", "seed"],
)
def test_settings_with_which_nothing_can_be_drawn_are_refused(request_: SampleRequest) -> None:
    assert len(find_problems(request_)) == 1


def test_the_edges_of_the_settings_are_allowed() -> None:
    assert (
        find_problems(SampleRequest(temperature=0, top_p=1.0, top_k=1, seed=0, num_samples=1, max_new_tokens=1)) == []
    )


def test_a_run_without_an_average_has_none_to_sample_from(gptmill: GptMill) -> None:
    assert "was trained without ema_decay; use its raw weights" in refuse(gptmill, "tiny", "--weights", "ema")


def test_averaged_weights_write_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(TEXT, encoding="utf-8")
    flags = "--corpus words.txt --tokenizer char --sample_tokens 0 --max_steps 9 --run_name ema --max_lr 0.1"
    assert run_guarded(["train", *TINY_FLAGS, *flags.split(), "--ema_decay", "0.99"]) == 0
    texts = {}
    for weights in ("raw", "ema"):
        request = SampleRequest(max_new_tokens=20, loading=LoadingOptions(weights=weights, device="cpu"))  # type: ignore[arg-type]
        texts[weights] = open_sampler("ema", request).generate()[0].text
    assert texts["raw"] != texts["ema"]


def test_compiling_changes_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a backend that generates no code: that takes long, and is torch's own to test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gptmill.inference.text_generation.BatchGenerator", partial(BatchGenerator, backend="eager"))
    plain, compiled = (
        open_sampler("tiny", SampleRequest(max_new_tokens=20, compile=is_compiled, loading=ON_CPU)).generate()
        for is_compiled in (False, True)
    )
    assert plain == compiled

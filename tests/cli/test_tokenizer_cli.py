"""gptmill tokenizer, as a user calls it: train one, look at it, prepare and train with it, lose the file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill

from gptmill.cli.main import run_guarded
from gptmill.config.requests import LoadingOptions
from gptmill.config.sample_request import SampleRequest
from gptmill.inference.sampling import open_sampler


def test_a_model_outlives_the_file_of_its_own_tokenizer_and_wrong_names_are_refused(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(command: str, *, code: int = 0) -> str:
        assert run_guarded(shlex.split(command)) == code, command
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    trained = call(f"tokenizer train {text_file} --vocab_size 300 --out mine/words.json")
    assert "300 tokens" in trained
    assert "(gpt2: " in trained
    shown = call("tokenizer show mine/words.json --text 'the quick fox'")
    assert "vocab_size   300\nend of text  299\n" in shown
    assert "' quick'" in shown
    named = "--tokenizer mine/words.json"
    call(f"prepare {text_file} --out bpe {named}")
    train = f"train --data_dir bpe {' '.join(TINY_FLAGS)}"
    call(f"{train} --max_steps 2 --run_name own {named}")
    files = sorted(path.name for path in tmp_path.rglob("*"))
    for command in (
        train,
        train.replace("train", "plan", 1),
        f"prepare {text_file}",
        *(f"data {action} bpe" for action in ("info", "verify", "show", "score")),
        "train --run_name own --resume latest --max_steps 3",
    ):
        assert "there is no tokenizer 'miwe.json'" in call(f"{command} --tokenizer miwe.json", code=2), command
    assert sorted(path.name for path in tmp_path.rglob("*")) == files
    Path("mine/words.json").unlink()
    call(f"train --run_name own --resume latest --max_steps 3 {named}")
    call("data show --run own --step 1")
    sampler = open_sampler("own", SampleRequest("the quick", max_new_tokens=4, loading=LoadingOptions(device="cpu")))
    assert sampler.model.tokenizer.vocab_size == 300
    assert sampler.generate()[0].tokens


def test_an_existing_file_is_replaced_only_when_asked(gptmill: GptMill, text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("mine", encoding="utf-8")
    refused = gptmill("tokenizer", "train", text_file, "--vocab_size", "300", check=False)
    assert refused.returncode == 2
    assert "tokenizer.json: already exists; add --overwrite" in refused.stderr
    assert path.read_text(encoding="utf-8") == "mine"
    gptmill("tokenizer", "train", text_file, "--vocab_size", "300", "--overwrite")
    assert '"ByteLevel"' in path.read_text(encoding="utf-8")


def test_all_wrong_flags_are_named_at_once_and_nothing_is_written(
    gptmill: GptMill, text_file: Path, tmp_path: Path
) -> None:
    refused = gptmill(
        "tokenizer", "train", text_file, "--vocab_size", "256", "--max_mb", "0", "--out", tmp_path, check=False
    )
    assert refused.returncode == 2
    for part in ("--vocab_size 256: must be at least 257", "--max_mb 0: must be", "is a folder; give a file"):
        assert part in refused.stderr
    assert "Traceback" not in refused.stderr
    assert sorted(tmp_path.iterdir()) == [text_file]


def test_a_wrong_form_is_answered_with_the_usage(gptmill: GptMill) -> None:
    for words in (["train"], ["show", "gpt2", "byte"], ["learn", "x"]):
        refused = gptmill("tokenizer", *words, check=False)
        assert refused.returncode == 2
        assert "train SOURCE [SOURCE ...] | show TOKENIZER" in refused.stderr

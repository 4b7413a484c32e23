"""gptmill tokenizer, as a user calls it: train one, look at it, prepare and train with it, lose the file."""

from __future__ import annotations

from pathlib import Path

from conftest import TINY_FLAGS, GptMill

from gptmill.config.requests import LoadingOptions
from gptmill.config.sample_request import SampleRequest
from gptmill.inference.sampling import open_sampler


def test_a_model_outlives_the_file_of_its_own_tokenizer(gptmill: GptMill, text_file: Path, tmp_path: Path) -> None:
    trained = gptmill("tokenizer", "train", text_file, "--vocab_size", "300", "--out", "mine/words.json")
    assert "300 tokens" in trained.stdout
    assert "(gpt2: " in trained.stdout
    shown = gptmill("tokenizer", "show", "mine/words.json", "--text", "the quick fox").stdout
    assert "vocab_size   300\nend of text  299\n" in shown
    assert "' quick'" in shown
    gptmill("prepare", text_file, "--tokenizer", "mine/words.json", "--out", "data/words")
    (tmp_path / "mine" / "words.json").unlink()
    gptmill("train", "--data_dir", "data/words", "--max_steps", "2", "--run_name", "own", *TINY_FLAGS)
    request = SampleRequest(
        "the quick", max_new_tokens=4, loading=LoadingOptions(device="cpu", logdir=str(tmp_path / "runs"))
    )
    sampler = open_sampler("own", request)
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

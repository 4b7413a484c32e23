"""A user's mistake costs one sentence: no traceback, exit code 2, and not a file more or less than before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY_FLAGS, GptMill, run_forked
from zygote import Zygote

from gptmill.config.errors import UserError
from gptmill.data.shards.opening import open_shards
from gptmill.runs.checkpoints.storage import load_checkpoint

WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise\n" * 100
CHECKPOINT = "runs/first/checkpoints/step_000002"
TRAIN = ["train", "--data_dir", "shards", "--sample_prompt", "the", "--max_steps", "2", *TINY_FLAGS]

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """words.txt, its char shards in shards/, and a run of two steps on them, runs/first."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "words.txt").write_text(WORDS, encoding="utf-8")
    for arguments in (
        ["prepare", "words.txt", "--tokenizer", "char", "--out", "shards"],
        [*TRAIN, "--run_name", "first"],
    ):
        run_forked(arguments, folder, zygote)
    return folder


@pytest.fixture
def home(finished: Path, tmp_path: Path) -> Path:
    """The working folder of `gptmill`, with a copy of all that."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK)}


@pytest.fixture
def refuse(gptmill: GptMill, tmp_path: Path) -> Refuse:
    """Runs a command that must fail as the user's mistake, and returns the message."""

    def run(*arguments: str | Path, **environment: str) -> str:
        before = read_files(tmp_path)
        process = gptmill(*arguments, check=False, **environment)
        assert "Traceback" not in process.stderr, process.stderr
        assert process.returncode == 2, process.stdout + process.stderr
        first, *others = process.stderr.splitlines()
        assert first.startswith("gptmill: "), process.stderr
        assert all(line.startswith("  - ") for line in others), process.stderr
        assert read_files(tmp_path) == before
        return process.stderr

    return run


# Words


def test_wrong_flags(refuse: Refuse) -> None:
    message = refuse("train", "demo", "--max_step", "3", "--seed", "x")
    assert "did you mean --max_steps?" in message
    assert "--seed x" in message


def test_a_wrong_recipe_name(refuse: Refuse) -> None:
    assert "did you mean demo?" in refuse("config", "show", "demmo")


def test_a_wrong_recipe_key(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\nnum_layer = 2\nnum_heads = 'x'\n", encoding="utf-8")
    message = refuse("config", "show", "mine.toml")
    assert "did you mean num_layers?" in message
    assert "num_heads = 'x'" in message


def test_a_folder_or_a_dangling_link_where_a_recipe_is_expected(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link.toml").symlink_to("nowhere.toml")
    assert "folder.toml" in refuse("config", "show", "folder.toml")
    assert "link.toml" in refuse("config", "show", "link.toml")


def test_no_corpus_at_all(refuse: Refuse) -> None:
    message = refuse("train", *TINY_FLAGS)
    assert "--corpus" in message
    assert "--data_dir" in message


# Text


def test_a_run_of_no_chosen_size_on_a_cpu(refuse: Refuse) -> None:
    message = refuse("train", "--data_dir", "shards", "--device", "cpu")
    assert "GPT-2 124M in steps of 524,288 tokens, is too slow for a CPU" in message
    assert "gptmill train demo --data_dir=shards" in message


def test_a_missing_file(refuse: Refuse) -> None:
    assert "nothing.txt does not exist" in refuse("prepare", "nothing.txt")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_file_without_permission(refuse: Refuse, text_file: Path) -> None:
    text_file.chmod(0)
    message = refuse("prepare", text_file, "--tokenizer", "byte")
    assert f"cannot read {text_file}" in message
    assert "Permission denied" in message


def test_a_folder_with_nothing_but_a_dangling_link(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").symlink_to("nowhere.txt")
    assert "texts" in refuse("prepare", "texts", "--tokenizer", "byte")
    assert "texts/a.txt" in refuse("prepare", "texts/a.txt", "--tokenizer", "byte")


def test_an_empty_corpus(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\x89PNG")
    assert "empty.txt is empty" in refuse("prepare", "empty.txt")
    assert "folder empty has no" in refuse("prepare", "empty")
    assert "folder images has no" in refuse("prepare", "images")


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_bytes_that_are_not_utf_8(tokenizer: str, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(WORDS, encoding="utf-8")
    (tmp_path / "texts" / "b.txt").write_bytes(b"x" * 10_000 + b"\xe9" + b"x" * 10_000)
    message = refuse("prepare", "texts", "--tokenizer", tokenizer)
    assert str(tmp_path / "texts" / "b.txt") in message
    assert "byte 0xe9 at offset 10000" in message


def test_python_source_that_is_not_utf_8(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_bytes(b"# plain\n" * 2000 + b"# \xe9\n")
    (tmp_path / "early.py").write_bytes(b"# \xe9\n")
    assert "byte 0xe9 at offset 16002" in refuse("prepare", "late.py", "--tokenizer", "byte")
    assert "byte 0xe9 at offset 2" in refuse("prepare", "early.py", "--tokenizer", "byte")


def test_a_failed_preparation_leaves_no_folder_behind(gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff" * 1000)
    gptmill("prepare", "bad.txt", "--tokenizer", "byte", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]


def test_a_place_that_cannot_be_written(refuse: Refuse, text_file: Path, tmp_path: Path) -> None:
    assert "words.txt" in refuse("prepare", text_file, "--tokenizer", "byte", "--out", "words.txt")
    assert "words.txt/shards" in refuse("prepare", text_file, "--tokenizer", "byte", "--out", "words.txt/shards")
    (tmp_path / "data").touch()
    assert "data/words-byte" in refuse("prepare", text_file, "--tokenizer", "byte")


def test_the_working_folder_itself_may_be_prepared_or_is_refused_by_a_sentence(
    gptmill: GptMill, finished: Path
) -> None:
    process = gptmill("prepare", finished / "words.txt", "--tokenizer", "byte", "--out", ".", check=False)
    assert process.returncode in (0, 2)
    assert "Traceback" not in process.stderr


def test_wrong_settings_of_a_preparation(refuse: Refuse, text_file: Path) -> None:
    message = refuse("prepare", text_file, "--val_fraction", "2", "--shard_tokens", "0")
    assert "--val_fraction 2.0" in message
    assert "--shard_tokens 0" in message


def test_a_corpus_prepared_from_other_text_is_kept(refuse: Refuse, home: Path) -> None:
    (home / "words.txt").write_text(WORDS + "more\n", encoding="utf-8")
    assert "--overwrite" in refuse("prepare", "words.txt", "--tokenizer", "char", "--out", "shards")


def test_a_corpus_shorter_than_one_window(refuse: Refuse, home: Path) -> None:
    message = refuse(*TRAIN, "--context_length", "16384", "--total_batch_size", "65536", "--eval_tokens", "16384")
    assert "shards" in message
    assert "context_length + 1 = 16,385" in message
    assert str(home) not in message


# Shards


def test_shards_of_another_tokenizer(refuse: Refuse, home: Path) -> None:
    message = refuse(*TRAIN, "--tokenizer", "byte")
    assert (home / "shards").is_dir()
    assert "asks for byte" in message
    assert "prepared with char:" in message


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": "other"}', '{"format": "gptmill-shards", "version": 99}'],
)
def test_a_damaged_manifest_is_found_when_preparing_again(content: str, refuse: Refuse, home: Path) -> None:
    (home / "shards" / "manifest.json").write_text(content, encoding="utf-8")
    assert "shards/manifest.json" in refuse("prepare", "words.txt", "--tokenizer", "char", "--out", "shards")


def test_a_damaged_manifest_is_found_when_training(refuse: Refuse, home: Path) -> None:
    manifest = home / "shards" / "manifest.json"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text[: len(text) // 2], encoding="utf-8")
    assert "shards/manifest.json is damaged" in refuse(*TRAIN)


def test_a_manifest_whose_tokenizer_is_damaged(home: Path) -> None:
    manifest = home / "shards" / "manifest.json"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace('"alphabet"', '"alphabot"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(home / "shards")


def test_a_truncated_shard(refuse: Refuse, home: Path) -> None:
    os.truncate(home / "shards" / "train_000000.npy", 1000)
    message = refuse(*TRAIN)
    assert "shards/train_000000.npy" in message
    assert "prepare the corpus again" in message


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_shard_cut_anywhere_is_named(size: int, home: Path) -> None:
    os.truncate(home / "shards" / "val_000000.npy", size)
    with pytest.raises(UserError, match=r"val_000000\.npy"):
        open_shards(home / "shards")


# Runs


def test_a_run_that_exists_is_not_overwritten(refuse: Refuse, home: Path) -> None:
    message = refuse(*TRAIN, "--run_name", "first")
    assert (home / "runs" / "first").is_dir()
    assert "runs/first already has checkpoints" in message
    assert "--resume latest" in message


def test_a_run_that_exists_is_noticed_before_a_corpus_is_prepared(refuse: Refuse, home: Path) -> None:
    new_text = ["--data_dir", "new", "--corpus", "words.txt", "--tokenizer", "byte"]
    assert "runs/first already has checkpoints" in refuse(*TRAIN, *new_text, "--run_name", "first")
    assert not (home / "new").exists()


def test_a_run_name_that_the_disk_cannot_hold(refuse: Refuse, home: Path) -> None:
    assert home.is_dir()
    assert "must be a plain folder name" in refuse(*TRAIN, "--run_name", "x" * 300)


def test_resuming_without_a_run(refuse: Refuse) -> None:
    assert "no run in runs/" in refuse("train", "--resume", "latest")


def test_resuming_on_shards_of_another_alphabet(refuse: Refuse, gptmill: GptMill, home: Path) -> None:
    (home / "words.txt").write_text(WORDS + "Ωmega\n", encoding="utf-8")
    gptmill("prepare", "words.txt", "--tokenizer", "char", "--out", "shards", "--overwrite")
    message = refuse("train", "--resume", "latest", "--max_steps", "4")
    assert "tokenizer mismatch" in message
    assert message.count("char:") == 2


def test_a_checkpoint_with_a_flipped_bit(refuse: Refuse, home: Path) -> None:
    file = home / CHECKPOINT / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for command in (["train", "--resume", "latest", "--max_steps", "4"], ["sample", "first", "--device", "cpu"]):
        message = refuse(*command)
        assert CHECKPOINT in message
        assert "model.safetensors" in message


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "gptmill-checkpoint", "version": 1}'])
def test_a_checkpoint_with_a_damaged_manifest(content: str, home: Path) -> None:
    (home / CHECKPOINT / "checkpoint.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="step_000002"):
        load_checkpoint(home / CHECKPOINT, groups=("model",))


# Machines


def test_a_gpu_that_is_not_there(refuse: Refuse, home: Path) -> None:
    assert (home / "shards").is_dir()
    message = refuse(*TRAIN, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert "GPU" in message
    assert "--device cpu" in message


@pytest.mark.skipif(os.name == "nt" or torch.backends.mps.is_available(), reason="auto has a GPU to take here")
def test_a_gpu_that_torch_cannot_use_is_not_ignored(refuse: Refuse, gptmill: GptMill, home: Path) -> None:
    tool = home / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "GPU 0: NVIDIA Test Card (UUID: x)"\n', encoding="utf-8")
    tool.chmod(0o755)
    environment = {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    message = refuse(*TRAIN, "--run_name", "second", "--device", "auto", **environment)
    assert "NVIDIA Test Card" in message
    assert "--device cpu" in message
    gptmill(*TRAIN, "--run_name", "second", "--device", "cpu", **environment)
    assert (home / "runs" / "second" / "checkpoints" / "step_000002").is_dir()

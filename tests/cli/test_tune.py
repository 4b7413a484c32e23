"""gptmill tune, as a user runs it: a table, a command, and a recipe that gives the same run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import GptMill, Start

from gptmill.cli.main import run_guarded
from gptmill.cli.tune import make_command, make_table
from gptmill.config.errors import UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import PrepareRequest
from gptmill.config.serialization import check_extension_path, make_extension
from gptmill.data.prepare import prepare_corpus
from gptmill.experiments.tune.search import Setting, TrialResult

RECIPE = """\
# A recipe
[data]
data_dir = "words"
[model]
num_layers = 2
embd_size = 16
num_heads = 2
context_length = 16
[training]
total_batch_size = 128
mini_batch_size = 4
[machine]
device = "cpu"
precision = "fp32"
"""


@pytest.fixture
def recipe(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare_corpus([str(text_file)], PrepareRequest(out="words", tokenizer="byte"), lambda _: None)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_tuning_prints_a_table_and_a_command_and_writes_a_recipe(
    recipe: Path, tmp_path: Path, gptmill: GptMill
) -> None:
    flags = "--no_compile --seed 7 --steps 3 --max_trials 2 --write tuned.toml".split()
    lines = gptmill("tune", recipe.name, *flags).stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("setting "))
    assert [line.split(",")[0] for line in lines[head + 1 : head + 3]] == ["mini_batch_size 1", "mini_batch_size 2"]
    assert sum("best; first step after" in line for line in lines) == 1
    assert lines[head + 3] == "stopped before all settings were tried; these are the results so far"
    command, shorter = lines[-2:]
    config = make_config("tuned.toml", {})
    size = config.training.mini_batch_size
    assert size in (1, 2)
    assert command == f"gptmill train recipe.toml --no_compile --seed=7 --mini_batch_size={size}"
    assert shorter == "gptmill train tuned.toml"
    assert config == make_config(recipe.name, {"seed": 7, "mini_batch_size": size})
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_prints_the_table_so_far_and_leaves_nothing(recipe: Path, tmp_path: Path, start: Start) -> None:
    process = start("tune", recipe.name, *"--no_compile --steps 2 --write tuned.toml".split(), stderr=2)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("2. "):
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; these are the results so far" in rest
    command = "gptmill train recipe.toml --no_compile --mini_batch_size=1"
    assert rest.splitlines()[-2:] == [command, "tuned.toml was not written"]
    assert not (tmp_path / "tuned.toml").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--data_dir nowhere", "nowhere"),
        ("--device cuda", "NVIDIA GPU"),
        (
            "--total_batch_size 100",
            "total_batch_size = 100: is not a multiple of mini_batch_size 1 x context_length 16",
        ),
    ],
)
def test_what_no_training_can_do_is_one_sentence(
    flags: str,
    complaint: str,
    recipe: Path,
    tmp_path: Path,
    gptmill: GptMill,
) -> None:
    process = gptmill("tune", recipe.name, *flags.split(), check=False, CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 2
    (sentence,) = process.stderr.splitlines()
    assert sentence.startswith("gptmill: ")
    assert complaint in sentence
    assert not (tmp_path / "runs").exists()


def test_unknown_flags_and_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["tune", "demo", "--step", "3"]) == 2
    assert "did you mean --steps?" in capsys.readouterr().err
    assert run_guarded(["tune", "demo", "twice"]) == 2
    assert "gptmill tune [RECIPE] [flags]" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_trial() -> None:
    best = TrialResult(Setting(64, "default"), 591_234.0, 0.61, 40.123, "H200 (cuda:0)", "first step after 41 s")
    lines = make_table([best, TrialResult(Setting(128, "default"), note="out of memory", is_out_of_memory=True)], best)
    assert lines == [
        "setting                                 tokens/s    MFU    memory  note",
        "mini_batch_size 64, compiled: default    591,234  61.0%  40.12 GB  best; first step after 41 s",
        "mini_batch_size 128, compiled: default         -      -         -  out of memory",
    ]


def test_the_command_can_be_typed_as_it_stands() -> None:
    flags = {"corpus": "my text.txt", "sample_prompt": "-x", "grad_clip": None, "compile": True}
    assert make_command("demo", flags, 2, 1) == (
        "OMP_NUM_THREADS=2 gptmill train demo '--corpus=my text.txt' --sample_prompt=-x --grad_clip=none --compile"
    )
    assert make_command(None, {}, None, 8) == "torchrun --standalone --nproc_per_node=8 -m gptmill train"


@pytest.mark.parametrize(
    "flags",
    [
        {"corpus": "other.txt", "mini_batch_size": 2},  # takes the place of the recipe's data_dir
        {"optimizer": "muon", "matrix_lr": 0.01, "grad_clip": None, "milestone_freq": 5, "run_name": None},
        {"feed_forward": "swiglu", "sample_prompt": 'a "quote"\n'},
    ],
)
@pytest.mark.parametrize("place", ["tuned.toml", "deeper/tuned.toml"])
def test_an_extension_gives_the_run_of_its_recipe_and_flags(
    flags: dict[str, object], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    Path(place).write_text(make_extension(Path(place), "recipe.toml", flags, {"compile"}, "tuned"), encoding="utf-8")
    assert make_config(place, {}) == make_config("recipe.toml", flags)
    assert "compile = false" in Path(place).read_text(encoding="utf-8")


def test_a_recipe_is_not_written_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(UserError, match="would extend itself"):
        check_extension_path(path, str(path), may_overwrite=True)
    with pytest.raises(UserError, match="add --overwrite"):
        check_extension_path(path, "demo", may_overwrite=False)
    check_extension_path(path, "demo", may_overwrite=True)

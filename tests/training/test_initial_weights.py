"""--init_from: the first step has exactly the source's weights, a restart too, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import EXACT_FLAGS, EXACT_STEPS, GptMill, RunRanks, Start, wait_for_text
from safetensors.torch import load_file, save_file
from tiny import CPU, make_config, make_shards, open_tiny

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.config.schema import list_values
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import TokenShards
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import to_hf_weights
from gptmill.runs.checkpoints.storage import Checkpoint, save_checkpoint
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.training.initial_weights import (
    broadcast_initial_weights,
    check_model,
    read_initial_source,
    record_source,
)
from gptmill.training.run_request import RunRequest

BYTES = 257


def read_events(run: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == kind]


def read_init_from(run: Path) -> str:
    return str(json.loads((run / "checkpoints/latest/checkpoint.json").read_text())["values"]["config"]["init_from"])


def publish(run: Path, folder: Path) -> None:
    """The run's latest weights as a Hugging Face folder."""
    config = make_config().model
    weights = load_file(run / "checkpoints/latest/model.safetensors")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_hf_config(config, BYTES)), encoding="utf-8")
    save_file(to_hf_weights(config, weights, BYTES), folder / "model.safetensors")


@pytest.fixture
def here(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder as the working folder, with runs/straight and its corpus."""
    assert straight.is_dir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The same weights


def test_the_loss_before_the_first_step_is_the_source_s_at_its_end(here: Path) -> None:
    assert run_guarded(["train", *EXACT_FLAGS, "--max_steps", "2", "--init_from", "straight", "--run_name", "new"]) == 0
    source, new = here / "runs/straight", here / "runs/new"
    first = read_events(new, "EvalDone")[0]
    assert (first["step"], first["val_loss"]) == (0, read_events(source, "EvalDone")[-1]["val_loss"])
    assert [event["step"] for event in read_events(new, "StepLogged")] == [1, 2]
    digest = json.loads((source / "checkpoints/latest/checkpoint.json").read_text())["files"]["model.safetensors"]
    recorded = f"{(source / 'checkpoints/latest').resolve()}#sha256={digest['sha256']}"
    assert read_init_from(new) == recorded
    assert read_events(new, "RunStarted")[0]["parent"] == recorded


VARIANTS: dict[str, dict[str, Any]] = {
    "ema": {"ema_decay": 0.9},
    "muon": {"optimizer": "muon"},
    "lion": {"optimizer": "lion"},
    "fp8": {"precision": "fp8-emulated"},
    "dropout": {"dropout": 0.5, "zero_init": True},
}


@pytest.fixture
def shards(text_file: Path) -> TokenShards:
    return make_shards(text_file)


def start_source(shards: TokenShards, folder: Path, **fields: Any) -> RunDirectory:
    """A run with a checkpoint of step 3."""
    tiny = open_tiny(shards, seed=7, **fields)
    run = create_run(str(folder), "source", tiny.config)
    origin = {"config": list_values(tiny.config), "tokenizer_fingerprint": tiny.corpora.fingerprint}
    tiny.state.step = 3
    save_checkpoint(run.checkpoints, tiny.state.make_checkpoint(origin))
    return run


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_kind_of_training_starts_with_exactly_those_weights(
    shards: TokenShards, tmp_path: Path, fields: dict[str, Any]
) -> None:
    run = start_source(shards, tmp_path / "runs")
    tiny = open_tiny(shards, init_from=str(run.path), logdir=str(tmp_path / "runs"), **fields)
    request = RunRequest(tiny.config)
    source = read_initial_source(request, CPU)
    weights = broadcast_initial_weights(source, request, tiny.corpora, tiny.plan, CPU)
    assert weights is not None
    weights.load(tiny.state)
    saved = load_file(run.checkpoints / "step_000003/model.safetensors")
    found = tiny.state.make_checkpoint({}).tensors
    assert found["model"].keys() == saved.keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in saved.items())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.get("ema", {}).items())
    assert tiny.state.step == 0
    assert record_source(request, weights).config.training.init_from == weights.init_from


def test_two_ranks_start_with_them(here: Path, run_ranks: RunRanks) -> None:
    run_ranks("train", *EXACT_FLAGS, "--max_steps", "2", "--init_from", "straight", "--run_name", "two")
    assert run_guarded(["train", *EXACT_FLAGS, "--max_steps", "2", "--init_from", "straight", "--run_name", "one"]) == 0
    one, two = (read_events(here / "runs" / name, "EvalDone")[0]["val_loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-6)
    assert read_init_from(here / "runs/two") == read_init_from(here / "runs/one")


# Restarts


def kill(start: Start, run: Path, step: int, *flags: str) -> None:
    process = start("train", *flags, "--run_name", run.name)
    wait_for_text(process, run / "log.txt", f"\n{step} train")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def assert_same_end(one: Path, other: Path) -> None:
    for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_killed_run_ends_as_the_unbroken_one(here: Path, gptmill: GptMill, start: Start) -> None:
    """Before its first checkpoint it needs the source again; after that, never."""
    flags = [*EXACT_FLAGS, "--max_steps", "30", "--init_from", "straight@24"]
    gptmill("train", *flags, "--run_name", "whole")
    kill(start, here / "runs/early", 3, *flags, "--checkpoint_freq", "1000")
    gptmill("train", *flags, "--run_name", "early", "--resume", "auto", "--checkpoint_freq", "8")
    assert_same_end(here / "runs/whole", here / "runs/early")
    kill(start, here / "runs/late", 12, *flags)
    shutil.rmtree(here / "runs/straight")
    gptmill("train", *flags, "--run_name", "late", "--resume", "auto")
    assert_same_end(here / "runs/whole", here / "runs/late")
    assert read_events(here / "runs/late", "RunStarted")[-1]["parent"] == read_init_from(here / "runs/whole")


def test_a_source_that_is_gone_or_changed_is_named_in_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], start: Start
) -> None:
    kill(start, here / "runs/new", 2, *EXACT_FLAGS, "--checkpoint_freq", "1000", "--init_from", "straight")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    checkpoints = here / "runs/straight/checkpoints"
    saved = checkpoints / f"step_{EXACT_STEPS:06d}"
    resume = ["train", "--run_name", "new", "--resume", "latest"]
    saved.rename(here / "elsewhere")
    assert run_guarded(resume) == 2
    assert "is gone; restore it, or start a new run" in capsys.readouterr().err
    step, tensors = EXACT_STEPS, {"model": {"w": torch.zeros(1)}, "optimizer": {}}
    values = json.loads((here / "elsewhere/checkpoint.json").read_text())["values"]
    save_checkpoint(checkpoints, Checkpoint(step, tensors, values))
    assert run_guarded(resume) == 2
    assert "have changed since the run started" in capsys.readouterr().err
    shutil.rmtree(saved)
    (here / "elsewhere").rename(saved)
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


# What does not fit


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--init_from straight --num_layers 3 --embd_size 32 --no_bias",
            "--init_from straight has num_layers 2, embd_size 16, bias true, and this run num_layers 3, embd_size 32, "
            "bias false: add --num_layers 2 --embd_size 16 --bias",
        ),
        ("--init_from straight --mtp_heads 1", "add --mtp_heads 0"),
        ("--init_from straight --context_length 8", "add --context_length 16"),
        ("--init_from straight --norm rmsnorm", "add --norm layernorm --norm_bias"),
        ("--init_from straigth", "did you mean straight?"),
        ("--init_from straight@999", "no checkpoint of step 999"),
        ("--init_from words.txt", "that is a file"),
        ("--init_from words", "neither config.toml, checkpoint.json nor config.json"),
        ("--init_from resume", "use --resume latest"),
        ("--init_from scratch", "leave it out"),
        ("--init_from gpt2-xl", "download the model"),
        ("--init_from s3://bucket/run", "download the model"),
        ("--init_from=", "init_from = : must not be empty"),
        ("--resume runs/straight/checkpoints/latest --init_from straight", "leave one of them out"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["train", *EXACT_FLAGS, "--run_name", "new", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert not Path("runs/new").exists()


def test_another_tokenizer_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["prepare", "words.txt", "--tokenizer", "char", "--out", "letters"]) == 0
    publish(here / "runs/straight", here / "model")
    capsys.readouterr()
    before = sorted(here.rglob("*"))
    prepared = ["--data_dir", "letters"]
    unprepared = ["--data_dir", "none", "--corpus", "words.txt", "--tokenizer", "gpt2"]
    for source, said in (("straight", "was trained with byte:"), ("model", "has a vocabulary of 257 tokens")):
        for data in (prepared, unprepared):
            assert run_guarded(["train", *EXACT_FLAGS, *data, "--init_from", source, "--run_name", "new"]) == 2
            assert said in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_rows_beyond_the_vocabulary_are_cut_if_the_folder_has_the_corpus_tokenizer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Qwen3, whose embedding has hundreds of rows more than its tokenizer has tokens."""
    assert run_guarded(["tokenizer", "train", "words.txt", "--vocab_size", "260", "--out", "tokenizer.json"]) == 0
    assert run_guarded(["prepare", "words.txt", "--tokenizer", "tokenizer.json", "--out", "bpe"]) == 0
    model, folder = open_tiny(make_shards(here / "words.txt")).state.model, here / "model"
    config = make_config().model
    rows = {"token_embedding.weight": torch.randn(400, config.embd_size)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_hf_config(config, 400)), encoding="utf-8")
    save_file(to_hf_weights(config, {**model.state_dict(), **rows}, 400), folder / "model.safetensors")
    words = [
        "train",
        *EXACT_FLAGS,
        "--data_dir",
        "bpe",
        "--max_steps",
        "1",
        "--init_from",
        "model",
        "--run_name",
        "new",
    ]
    assert run_guarded(words) == 2
    assert "a vocabulary of 400 tokens, but bpe one of 260" in capsys.readouterr().err
    shutil.copyfile("tokenizer.json", folder / "tokenizer.json")
    assert run_guarded(words) == 0
    saved = load_file("runs/new/checkpoints/latest/model.safetensors")
    assert len(saved["token_embedding.weight"]) == 320


def test_weights_that_diverged_are_refused(shards: TokenShards, tmp_path: Path) -> None:
    run = start_source(shards, tmp_path)
    tiny = open_tiny(shards, init_from=str(run.path))
    request = RunRequest(tiny.config)
    source = read_initial_source(request, CPU)
    assert source is not None
    source.weights["final_norm.weight"][3] = torch.nan
    with pytest.raises(UserError, match=r"final_norm\.weight in .* is not finite"):
        broadcast_initial_weights(source, request, Corpora((shards,)), tiny.plan, CPU)


def test_fields_that_shape_no_weights_may_differ_with_a_warning(
    shards: TokenShards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_source(shards, tmp_path, positions="rope", rope_base=500.0)
    longer = {"positions": "rope", "context_length": 32, "dropout": 0.1, "total_batch_size": 256}
    for base, warns in ((500.0, False), (900.0, True)):
        config = make_config(init_from=str(run.path), rope_base=base, **longer)
        assert read_initial_source(RunRequest(config), CPU) is not None
        assert ("add --rope_base 500.0 to keep" in capsys.readouterr().err) == warns


@dataclass(frozen=True)
class Own:
    """A registered feed-forward layer, which need not have a ffn_size."""

    tag: ClassVar[str] = "own"
    gain: float = 1.0


def test_options_of_registered_parts_must_be_the_same() -> None:
    check_model(ModelConfig(feed_forward=Own()), ModelConfig(feed_forward=Own()), "base")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has gain 1\.0, and this run gain 2\.0: add --gain 1\.0"):
        check_model(ModelConfig(feed_forward=Own()), ModelConfig(feed_forward=Own(2.0)), "base")  # type: ignore[arg-type]


# Resuming with the flag


def test_a_resumed_run_accepts_its_source_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*EXACT_FLAGS, "--max_steps", "2", "--run_name", "new"]
    assert run_guarded(["train", *flags, "--init_from", "runs/straight@best"]) == 0
    resume = ["train", "--run_name", "new", "--resume", "latest", "--max_steps", "3"]
    recorded = read_init_from(here / "runs/new")
    own = recorded.partition("#")[0]
    for same in ("straight", "runs/straight", "runs/straight/checkpoints/best_model", own, recorded):
        assert run_guarded([*resume, "--init_from", same]) == 0, capsys.readouterr().err
    for other in ("none", "another", "straight@8", "runs/straight/checkpoints/step_000008"):
        assert run_guarded([*resume, "--init_from", other]) == 2
        assert "cannot change init_from" in capsys.readouterr().err
    assert run_guarded(["train", "--run_name", "straight", "--resume", "latest", "--init_from", "new"]) == 2
    assert "started from scratch" in capsys.readouterr().err


def test_a_run_that_branches_from_one_of_its_checkpoints_has_another_parent(here: Path) -> None:
    flags = [*EXACT_FLAGS, "--max_steps", "2"]
    assert run_guarded(["train", *flags, "--run_name", "new", "--init_from", "straight"]) == 0
    branch = "--resume runs/new/checkpoints/latest --run_name branch --max_steps 3".split()
    assert run_guarded(["train", *branch]) == 0
    assert "# init_from is not set" in (here / "runs/branch/config.toml").read_text()


# Hugging Face


def test_a_hugging_face_folder(here: Path) -> None:
    """Its padding rows are not the source's, and do not count."""
    publish(here / "runs/straight", here / "model")
    assert run_guarded(["train", *EXACT_FLAGS, "--max_steps", "2", "--init_from", "model", "--run_name", "new"]) == 0
    expected = read_events(here / "runs/straight", "EvalDone")[-1]["val_loss"]
    assert read_events(here / "runs/new", "EvalDone")[0]["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert read_init_from(here / "runs/new").startswith(f"{(here / 'model').resolve()}#sha256=")

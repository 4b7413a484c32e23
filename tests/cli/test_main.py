"""The command line as users meet it first: help, version, config, and broken pipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GptMill, make_environment
from zygote import Zygote

import gptmill as package
from gptmill.cli.main import VERBS, run_guarded
from gptmill.config.compress_request import CompressRequest
from gptmill.config.doctor_request import DoctorRequest
from gptmill.config.eval_request import EvalRequest
from gptmill.config.export_request import ExportRequest
from gptmill.config.import_request import ImportRequest
from gptmill.config.plan_request import PlanRequest
from gptmill.config.recipes import list_recipes, load_recipe
from gptmill.config.report_request import ReportRequest
from gptmill.config.requests import (
    BenchRequest,
    CheckpointsRequest,
    DataRequest,
    PrepareRequest,
    PresetOptions,
    RunsRequest,
    StartOptions,
    TokenizerRequest,
    TuneRequest,
    VerifyResumeRequest,
)
from gptmill.config.run import ModelConfig, RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import build_config, list_fields
from gptmill.config.sizes import list_sizes, load_size, load_size_training
from gptmill.config.tensorboard_request import TensorBoardRequest
from gptmill.models.flops import count_flops
from gptmill.models.parameters import count_parameters

CONFIGS = {
    "prepare": (PrepareRequest,),
    "train": (StartOptions, PresetOptions, RunConfig),
    "sample": (SampleRequest,),
    "eval": (EvalRequest,),
    "import": (ImportRequest,),
    "export": (ExportRequest,),
    "compress": (CompressRequest,),
    "config": (PresetOptions, RunConfig),
    "doctor": (DoctorRequest,),
    "data": (DataRequest,),
    "runs": (RunsRequest,),
    "report": (ReportRequest,),
    "tensorboard": (TensorBoardRequest,),
    "checkpoints": (CheckpointsRequest,),
    "tokenizer": (TokenizerRequest,),
    "verify-resume": (VerifyResumeRequest, PresetOptions, RunConfig),
    "plan": (PlanRequest, PresetOptions, RunConfig),
    "tune": (TuneRequest, PresetOptions, RunConfig),
    "bench": (BenchRequest, PresetOptions, RunConfig),
    "completion": (),
}
FOUNDING_FLAGS = (
    "total_batch_size mini_batch_size context_length num_layers embd_size num_heads max_lr min_lr warmup_steps "
    "weight_decay num_epochs steps_per_epoch max_steps eval_freq checkpoint_freq keep_checkpoints run_name seed logdir "
    "use_tensorboard resume list_checkpoints force_cpu device"
).split()

# Says on stderr which heavy libraries are loaded once main has answered.
SPY = """
import sys
from gptmill.cli.main import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
sys.stderr.write(" ".join(sorted({"torch", "numpy"} & sys.modules.keys())))
raise SystemExit(code)
"""


def spy(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SPY, *arguments]
    return subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=60, check=False)


def read_flag(text: str, name: str) -> str:
    """What the help says of a flag, without the white space at which it was wrapped."""
    found = re.search(rf"^  --{name}\b.*?(?=\n  --|\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"--{name} is missing"
    return "".join(found.group().split())


def test_alone_and_with_help_it_lists_the_verbs_without_loading_torch() -> None:
    answers = [spy(*arguments) for arguments in ((), ("--help",), ("-h",), ("help",))]
    assert [(answer.returncode, answer.stderr) for answer in answers] == [(0, "")] * 4
    assert len({answer.stdout for answer in answers}) == 1
    for verb, summary in VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(summary)}$", answers[0].stdout, re.MULTILINE)


def test_what_handles_text_and_shards_loads_no_torch(text_file: Path, tmp_path: Path) -> None:
    corpus, logdir = str(tmp_path / "words"), str(tmp_path)
    commands = [
        ("prepare", str(text_file), "--tokenizer", "byte", "--out", corpus),
        ("data", "info", corpus),
        ("data", "show", corpus),
        ("data", "verify", corpus),
        ("runs", "list", "--logdir", logdir),
    ]
    for command in commands:
        answer = spy(*command)
        assert (answer.returncode, "torch" in answer.stderr) == (0, False), command


def test_version_is_the_packages(gptmill: GptMill) -> None:
    assert gptmill("--version").stdout == f"gptmill {package.__version__}\n"


def test_every_verb_has_its_flags_listed_here() -> None:
    assert CONFIGS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_groups_all_its_flags_and_loads_no_torch(verb: str) -> None:
    answer = spy(verb, "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    fields = [field for config in CONFIGS[verb] for field in list_fields(config)]
    for title in {field.section_title for field in fields}:
        assert f"\n{title}:\n" in answer.stdout
    for field in fields:
        assert "".join(field.help.split()) in read_flag(answer.stdout, field.name)
    headings = re.findall(r"^(\w.*):$", answer.stdout, re.MULTILINE)
    assert headings[headings.index("Help") + 1] == "Examples"


def test_the_help_of_train_has_the_founding_flags_and_the_recipes(gptmill: GptMill) -> None:
    text = gptmill("train", "-h").stdout
    for name in FOUNDING_FLAGS:
        assert read_flag(text, name)
    for name, title in list_recipes().items():
        assert re.search(rf"^  {re.escape(name)} +{re.escape(title)}$", text, re.MULTILINE)


def test_the_help_of_train_with_a_recipe_shows_its_values() -> None:
    answer = spy("train", "demo", "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    for name, value in load_recipe("demo").items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if not shown.isprintable():
            shown = json.dumps(shown)  # a line break must not break the help's layout
        assert read_flag(answer.stdout, name).endswith("".join(f"[{shown}]".split()))


def test_an_unknown_verb_suggests_the_nearest_and_lists_all(gptmill: GptMill) -> None:
    process = gptmill("trian", check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("gptmill: unknown verb 'trian' (did you mean train?)")
    assert all(verb in process.stderr for verb in VERBS)
    assert process.stdout == ""


def test_config_list_names_every_recipe_with_its_title(gptmill: GptMill) -> None:
    lines = gptmill("config", "list").stdout.splitlines()
    named = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    assert named == [[*pair] for pair in (*list_recipes().items(), *list_sizes().items())]
    assert all(list_recipes().values())


def test_config_show_of_a_size_sets_the_model_and_what_else_the_size_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in list_sizes():
        assert run_guarded(["config", "show", "--size", size]) == 0
        shown = capsys.readouterr().out
        (tmp_path / "shown.toml").write_text(shown, encoding="utf-8")
        config = build_config(RunConfig, load_recipe(str(tmp_path / "shown.toml")))
        rest = build_config(RunConfig, load_size_training(size))
        assert config == replace(rest, model=build_config(ModelConfig, load_size(size))), size
        count = count_parameters(config.model, 50_304)
        assert shown.startswith(f"# {count.total:,} parameters"), size
        flops = count_flops(config.model, 50_304, config.model.context_length)
        assert f"\n# {flops / 1e6:,.1f} MFLOP per trained token" in shown, size


def test_config_show_is_itself_a_recipe(gptmill: GptMill, tmp_path: Path) -> None:
    shown = gptmill("config", "show", "demo", "--num-layers=6", "--grad_clip", "none", "--sample_prompt", 'a "b" # c\n')
    (tmp_path / "shown.toml").write_text(shown.stdout, encoding="utf-8")
    flags = {"num_layers": 6, "grad_clip": None, "sample_prompt": 'a "b" # c\n'}
    assert build_config(RunConfig, load_recipe(str(tmp_path / "shown.toml"))) == build_config(
        RunConfig, {**load_recipe("demo"), **flags}
    )
    assert gptmill("config", "show", "shown.toml").stdout == shown.stdout


def test_config_show_without_a_recipe_shows_the_defaults(gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "shown.toml").write_text(gptmill("config", "show").stdout, encoding="utf-8")
    assert build_config(RunConfig, load_recipe(str(tmp_path / "shown.toml"))) == RunConfig()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("config", "the usage is gptmill config list | show [RECIPE]"),
        ("config lst", "the usage is gptmill config list | show [RECIPE]"),
        ("config show demo gpt2-124m", "the usage is"),
        ("config list demo", "config list"),
        (
            "config show gpt2-124m --num_heads 7",
            "num_heads = 7: does not divide embd_size 768; the nearest that do are 6 and 8",
        ),
        ("config show --total_batch_size 1000", "the nearest are 32768"),
        ("sample", "the usage is gptmill sample RUN"),
        ("prepare", "the usage is gptmill prepare SOURCE"),
        ("train demo demo", "the usage is gptmill train [RECIPE]"),
        ("doctor now", "the usage is gptmill doctor [flags]"),
    ],
)
def test_a_wrong_form_is_answered_with_the_usage(line: str, says: str, gptmill: GptMill) -> None:
    process = gptmill(*line.split(), check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("gptmill: ")
    assert says in process.stderr
    assert "Traceback" not in process.stderr


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_broken_pipe_is_not_an_error(unbuffered: str, unread: int, tmp_path: Path, zygote: Zygote) -> None:
    environment = make_environment(PYTHONUNBUFFERED=unbuffered)
    for line in ("--version", "train --help", "config list", "config show demo"):
        process = zygote.run(["-m", "gptmill", *line.split()], tmp_path, environment, stdout=unread)
        assert (process.returncode, process.stderr) == (0, ""), line


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nor_is_it_in_a_fresh_interpreter(unbuffered: str, unread: int) -> None:
    """Which flushes once more when it ends."""
    process = subprocess.run(
        [sys.executable, "-m", "gptmill", "--help"],
        env=make_environment(PYTHONUNBUFFERED=unbuffered),
        stdout=unread,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_a_closed_or_full_output_gives_no_traceback() -> None:
    for redirection in (">&-", "> /dev/full"):
        command = f"{shlex.quote(sys.executable)} -m gptmill config list {redirection}"
        process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in process.stderr, process.stderr
        assert process.returncode in (0, 2)


def test_running_out_of_memory_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arguments: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr("gptmill.cli.main.run_command", fail)
    assert run_guarded(["prepare", "words"]) == 2
    assert capsys.readouterr().err.startswith("gptmill: out of memory; close other programs")

"""Parts of a plug-in: each kind works, from flags to an exact resume, and bad plug-ins get one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, TINY_FLAGS, GptMill, RunRanks, Start

OWN = PROJECT / "tests/api/own_parts.py"
STEPS, HALF = 8, 4
FLAGS = [
    *TINY_FLAGS,
    *f"--sample_tokens 2 --dropout 0.1 --max_steps {STEPS} --checkpoint_freq {HALF} --eval_freq {HALF}".split(),
    *"--run_name run --plugin own_parts.py".split(),
]
VARIANTS = {
    "architecture with logits": "--architecture gru --gru_width 24 --label_smoothing 0.1",
    "architecture with a loss": "--architecture bigram --sample_tokens 0 --schedule sqrt --sqrt_steps 3",
    "attention without a cache, two optimizers": "--attention mean --optimizer two-sgds --max_lr 0.1 --ema_decay 0.9",
    "feed-forward": "--feed_forward snake --trackers lines --gradient_checkpointing full",
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(OWN, tmp_path / "own_parts.py"))


def read_end(run: Path) -> dict[str, bytes]:
    tensors = sorted((run / "checkpoints/latest").resolve().glob("*.safetensors"))
    names = [*tensors, run / "log.txt", run / "lines.txt"]
    return {path.name: path.read_bytes() for path in names if path.exists()}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_runs_with_own_parts_resume_exactly(gptmill: GptMill, words: list[str], tmp_path: Path, flags: str) -> None:
    gptmill("train", *words, *FLAGS, *flags.split())
    run = tmp_path / "runs/run"
    end = read_end(run)
    gptmill("train", "--run_name", "run", "--resume", str(HALF))
    assert read_end(run) == end


def test_changed_code_is_noticed(gptmill: GptMill, words: list[str], own: Path, tmp_path: Path) -> None:
    gptmill("train", *words, *FLAGS, "--feed_forward", "snake")
    saved = json.loads((tmp_path / "runs/run/checkpoints/latest/checkpoint.json").read_text())
    assert list(saved["values"]["plugins"]) == ["feed_forward snake"]
    own.write_text(own.read_text().replace("x.sin()", "x.cos()"))
    resume = ["train", "--run_name", "run", "--resume", "latest", "--max_steps", "10", "--plugin", "own_parts.py"]
    refused = gptmill(*resume, check=False)
    assert refused.returncode == 2
    assert "the code of feed_forward snake has changed" in refused.stderr
    gptmill(*resume, "--allow_changes")


def test_two_ranks_train_an_own_model(run_ranks: RunRanks, gptmill: GptMill, words: list[str], tmp_path: Path) -> None:
    flags = [*words, *FLAGS, "--dropout", "0", "--architecture", "gru", "--trackers", "lines"]
    gptmill("train", *flags)
    alone = (tmp_path / "runs/run/log.txt").read_text()
    run_ranks("train", *flags, "--run_name", "two")
    both = (tmp_path / "runs/two/log.txt").read_text()
    assert [line.split()[:2] for line in both.splitlines()] == [line.split()[:2] for line in alone.splitlines()]
    pairs = zip(alone.split(), both.split(), strict=True)
    assert all(abs(float(one) - float(other)) < 1e-4 for one, other in pairs if "." in one)


def test_an_evaluator_that_cannot_start_stops_all_ranks_with_a_sentence(
    start_ranks: RunRanks, words: list[str], tmp_path: Path
) -> None:
    ranks = start_ranks("train", *words, *FLAGS, "--evaluators", "unbuilt")
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    assert "evaluator unbuilt cannot start: FileNotFoundError: no such probe" in outputs[0]
    assert not any("Traceback" in output for output in outputs)
    assert not (tmp_path / "runs/run").exists()


def test_what_fails_in_a_tracker_or_an_evaluator_does_not_end_the_run(gptmill: GptMill, words: list[str]) -> None:
    done = gptmill("train", *words, *FLAGS, "--trackers", "broken,unbuilt", "--evaluators", "broken")
    assert "tracker unbuilt cannot be opened (no answer)" in done.stderr
    assert "no score today" in done.stderr
    assert "cannot track" in done.stderr
    assert done.stderr.count("BrokenTracker failed") == 1


def test_a_recipe_names_a_plugin_and_sets_its_options(gptmill: GptMill, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    shutil.move(tmp_path / "own_parts.py", tmp_path / "recipes/own_parts.py")
    recipe = '[plugins]\nplugin = "own_parts.py"\n[model]\narchitecture = "gru"\ngru_width = 20\n'
    (tmp_path / "recipes/own.toml").write_text(recipe)
    gptmill("train", "recipes/own.toml", *words, *FLAGS[:-2], "--gru_width", "12")
    config = (tmp_path / "runs/run/config.toml").read_text()
    assert "gru_width = 12" in config
    assert 'plugin = "recipes/own_parts.py"' in config
    assert "gru: width of the state. [20]" in gptmill("train", "recipes/own.toml", "--help").stdout


def test_formats_sources_and_tokenizers(gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "film.srt").write_text("1\n00:00\nHello there.\n\n2\n00:01\nGoodbye.\n" * 40)
    plugin = ["--plugin", "own_parts.py", "--tokenizer", "upper"]
    gptmill("prepare", "film.srt", *plugin, "--srt_skip", "1", "--out", "film")
    shown = gptmill("data", "show", "film", "--context_length", "32", "--plugin", "own_parts.py").stdout
    assert "00:00\nHELLO THERE." in shown
    counts = ["prepare", "count:600", *plugin, "--count_word", "item"]
    gptmill(*counts, "--processes", "2", "--out", "two")
    gptmill(*counts, "--processes", "1", "--out", "one")
    assert (tmp_path / "two/train_000000.npy").read_bytes() == (tmp_path / "one/train_000000.npy").read_bytes()
    unknown = gptmill("data", "info", "one", check=False)
    assert unknown.returncode == 2
    assert "--plugin that registers it" in unknown.stderr


def test_a_corpus_is_prepared_again_only_for_the_parts_that_it_uses(gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 2000)
    gptmill("prepare", "a.txt", "--tokenizer", "byte", "--out", "a")
    before = (tmp_path / "a/manifest.json").read_bytes()
    gptmill("prepare", "a.txt", "--tokenizer", "byte", "--out", "a", "--plugin", "own_parts.py", "--srt_skip", "7")
    assert (tmp_path / "a/manifest.json").read_bytes() == before


HEAD = "import gptmill\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n"
BAD = {
    "missing": (None, "there is no plug-in bad.py"),
    "syntax": ("def (", "cannot be loaded: SyntaxError"),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "kind": ('import gptmill\ngptmill.register("atention", "x")', "did you mean attention"),
    "name": ('import gptmill\ngptmill.register("attention", "Two words")', "cannot be the name of a attention"),
    "tokenizer": (
        'import gptmill\ngptmill.register("tokenizer", "x")(print)',
        "must have the same text as its attribute",
    ),
    "taken": ('import gptmill\ngptmill.register("optimizer", "adamw")(print)', "'adamw' exists already, in gptmill"),
    "option taken": (
        f'{HEAD}    max_lr: float = 1.0\ngptmill.register("schedule", "x", options=A)(print)',
        "have the name of another option: rename max_lr",
    ),
    "option type": (
        f'{HEAD}    sizes: tuple = ()\ngptmill.register("schedule", "x", options=A)(print)',
        "must be int, float, str, bool",
    ),
}


@pytest.mark.parametrize(("code", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_plugin_gets_one_sentence(gptmill: GptMill, tmp_path: Path, code: str | None, message: str) -> None:
    if code is not None:
        (tmp_path / "bad.py").write_text(code)
    refused = gptmill("config", "show", "demo", "--plugin", "bad.py", check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


WRONG_USE = {
    "unknown evaluator": ("--evaluators nothing", "names no registered evaluator: nothing"),
    "fp8": ("--attention mean --precision fp8-emulated", "has no fp8 GEMMs for attention of a plug-in"),
    "documents": ("--architecture gru --documents masked", "works only with --documents packed"),
    "no logits": ("--architecture bigram", "disable samples: --sample_tokens 0"),
    "smoothing of an own loss": ("--architecture bigram --sample_tokens 0 --z_loss 1e-4", "computes its own loss"),
    "option of another variant": ("--gru_width 3", "applies only to architecture gru"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG_USE.values(), ids=WRONG_USE.keys())
def test_wrong_use_of_own_parts_gets_one_sentence(gptmill: GptMill, words: list[str], flags: str, message: str) -> None:
    refused = gptmill("train", *words, *FLAGS, *flags.split(), check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_broken_reader_names_the_file(gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "film.srt").write_text("1\n00:00\nHello.\n\nbad\n")
    refused = gptmill("prepare", "film.srt", "--plugin", "own_parts.py", check=False)
    assert refused.returncode == 2
    assert "failed on" in refused.stderr
    assert "film.srt: ValueError: a block without a number" in refused.stderr


def test_installed_packages_are_found_by_their_entry_point(tmp_path: Path) -> None:
    (tmp_path / "site/mine-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site/mine-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = "[gptmill.plugins]\nmine = mine\nbroken = nowhere\n"
    (tmp_path / "site/mine-1.0.dist-info/entry_points.txt").write_text(points)
    code = 'import gptmill\n@gptmill.register("source", "ten")\ndef ten(rest, options):\n'
    code += "    yield from map(str, range(10**6, 10**6 + int(rest)))\n"
    (tmp_path / "site/mine.py").write_text(code)
    command = [sys.executable, "-m", "gptmill", "prepare", "ten:500", "--tokenizer", "byte", "--out", "ten"]
    command += ["--val_fraction", "0.2"]
    path = f"{tmp_path / 'site'}:{PROJECT / 'src'}"
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the plug-in broken cannot be loaded" in done.stderr
    assert (tmp_path / "ten/manifest.json").exists()


def test_a_program_may_import_a_plugin_that_it_also_names(start: Start, own: Path) -> None:
    code = "import own_parts, gptmill\n"
    code += "config = gptmill.make_config('demo', plugin='own_parts.py', feed_forward='snake')\n"
    code += "print(config.model.feed_forward.tag)"
    done = start("-c", f"import sys; sys.path.insert(0, {str(own.parent)!r})\n{code}", program=())
    assert done.communicate()[0].splitlines()[-1:] == ["snake"]


def test_files_that_a_plugin_imports_count_as_its_code(gptmill: GptMill, words: list[str], own: Path) -> None:
    own.with_name("beside.py").write_text("FACTOR = 1.0\n")
    own.write_text(own.read_text().replace("\nimport gptmill\n", "\nimport beside\nimport gptmill\n"))
    gptmill("train", *words, *FLAGS, "--feed_forward", "snake")
    own.with_name("beside.py").write_text("FACTOR = 2.0\n")
    resume = ["train", "--run_name", "run", "--resume", "latest", "--max_steps", "10", "--plugin", "own_parts.py"]
    assert "the code of feed_forward snake has changed" in gptmill(*resume, check=False).stderr

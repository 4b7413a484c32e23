"""Tasks as an evaluator of a run: when they run, under which names, compiled or not, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_FLAGS
from small_tasks import write_lines, write_tasks
from torch._dynamo.utils import counters

from gptmill.cli.main import run_guarded
from gptmill.config.model import ModelConfig
from gptmill.config.run import EvaluationConfig, MachineConfig, RunConfig, TrainingConfig
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.evals.task_evaluator import TaskEvaluator, load_eval_tasks
from gptmill.models.gpt import GPT, build_gpt
from gptmill.runs.events import ScoresDone
from gptmill.runtime.world import World

TOKENIZER = ByteTokenizer()
MODEL = ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=48)
WORLD = World(0, 1, torch.device("cpu"))
LAST = 7


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    tasks = EvaluationConfig(eval_freq=2, eval_tasks="hellaswag,lambada", eval_task_data=str(write_tasks(tmp_path)))
    return RunConfig(model=MODEL, training=TrainingConfig(mini_batch_size=2), evaluation=tasks)


def build_model() -> GPT:
    return build_gpt(MODEL, 320, seed=5, vocab_size=TOKENIZER.vocab_size).eval()


def build_evaluator(config: RunConfig) -> TaskEvaluator:
    return TaskEvaluator(load_eval_tasks(config, TOKENIZER), config, TOKENIZER, WORLD, LAST)


def evaluate(evaluator: TaskEvaluator, model: GPT, step: int = 0) -> ScoresDone | None:
    with torch.no_grad():
        return evaluator.evaluate(model, step, lambda: False)


def test_the_founding_metric_has_the_name_of_the_task(config: RunConfig) -> None:
    event = evaluate(build_evaluator(config), build_model(), step=3)
    assert event is not None
    names = ["hellaswag", "hellaswag/acc", "hellaswag/acc_norm", "lambada", "lambada/perplexity"]
    assert (event.step, [*event.scores]) == (3, names)


def test_only_the_first_examples_count(config: RunConfig) -> None:
    limited = replace(config, evaluation=replace(config.evaluation, eval_task_limit=5))
    assert [len(loaded.examples) for loaded in load_eval_tasks(limited, TOKENIZER)] == [5, 5]
    everything = replace(config, evaluation=replace(config.evaluation, eval_task_limit=None))
    assert [len(loaded.examples) for loaded in load_eval_tasks(everything, TOKENIZER)] == [12, 12]


@pytest.mark.parametrize(("freq", "steps"), [(None, [0, 2, 4, 6, LAST]), (4, [0, 4, LAST])])
def test_they_run_when_due_and_at_the_end(config: RunConfig, freq: int | None, steps: list[int]) -> None:
    """An evaluator is asked at every evaluation."""
    config = replace(config, evaluation=replace(config.evaluation, eval_task_freq=freq, eval_task_limit=1))
    evaluator, model = build_evaluator(config), build_model()
    assert [step for step in (0, 2, 4, 6, LAST) if evaluate(evaluator, model, step) is not None] == steps


def test_they_compile_nothing_anew_and_score_the_same(config: RunConfig) -> None:
    """Other shapes than training's would replace its graphs by ones for any shape."""
    plain = evaluate(build_evaluator(config), build_model())
    model = build_model()
    model.compile_parts(backend="eager")
    tokens = torch.arange(2 * MODEL.context_length).view(2, -1)
    torch._dynamo.reset()
    counters.clear()
    try:
        before = model.train()(tokens, tokens).objective
        graphs = dict(counters["stats"])
        compiled = replace(config, machine=MachineConfig(compile=True))
        scored = evaluate(build_evaluator(compiled), model.eval())
        after = model.train()(tokens, tokens).objective
        assert dict(counters["stats"]) == graphs
    finally:
        torch._dynamo.reset()
    assert before == after
    assert plain is not None
    assert scored is not None
    assert scored.scores == plain.scores


def test_they_stop_when_asked(config: RunConfig) -> None:
    calls: list[int] = []

    class Counted(GPT):
        def hidden_states(self, *arguments: Any) -> torch.Tensor:
            calls.append(1)
            return super().hidden_states(*arguments)

    model = build_gpt(MODEL, 320, seed=5, vocab_size=TOKENIZER.vocab_size, model_class=Counted).eval()
    with torch.no_grad():
        build_evaluator(config).evaluate(model, 0, lambda: len(calls) >= 2)
    assert len(calls) == 2


REFUSED = {
    "unknown task": ("--eval_tasks helaswag", "unknown task 'helaswag' (did you mean hellaswag?)"),
    "no data": ("--eval_tasks piqa", "--eval_task_data FILE"),
    "no folder": ("--eval_tasks piqa --eval_task_data nowhere", "--eval_task_data nowhere does not exist"),
    "other data": ("--eval_tasks piqa --eval_task_data tasks/hellaswag_val.jsonl", "lacks the field goal"),
    "not JSON": ("--eval_tasks lambada --eval_task_data broken.jsonl", "line 1 of broken.jsonl is not valid JSON"),
    "freq": (
        "--eval_tasks lambada --eval_freq 4 --eval_task_freq 6",
        "multiple of eval_freq 4; the nearest are 4 and 8",
    ),
    "limit": ("--eval_tasks lambada --eval_task_limit 0", "must be at least 1"),
    "two of one name": ("--eval_tasks a/own.toml,b/own.toml", "two tasks are named own; rename one file"),
}
OWN = 'kind = "last_word"\ntext = "{text}"\nfile = "own.jsonl"\n'


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_said_before_anything_is_written(
    flags: str,
    message: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path / "tasks")
    (tmp_path / "broken.jsonl").write_text('{"text": "a')
    for folder in ("a", "b"):
        write_lines(tmp_path / folder / "own.jsonl", [{"text": "two words"}])
        (tmp_path / folder / "own.toml").write_text(OWN)
    assert run_guarded(["train", *TINY_FLAGS, *words, "--max_steps", "2", "--run_name", "run", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert " --task_data" not in error
    assert "--download" not in error
    assert not (tmp_path / "runs").exists()


def test_texts_beyond_the_context_are_counted_in_a_warning(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "text.jsonl", [{"text": "a b"}, {"text": "long enough to be cut off"}])
    flags = "--max_steps 1 --run_name run --eval_tasks lambada --eval_task_data text.jsonl --use_tensorboard"
    assert run_guarded(["train", *TINY_FLAGS, *words, *flags.split()]) == 0
    assert "1 of 2 texts of lambada exceed context_length 16 and lose their beginning" in capsys.readouterr().out
    log = [line.rpartition(" ")[0] for line in (tmp_path / "runs/run/log.txt").read_text().splitlines()]
    assert log == [
        "0 val",
        "0 lambada",
        "0 lambada/perplexity",
        "1 train",
        "1 val",
        "1 lambada",
        "1 lambada/perplexity",
    ]

"""lm-evaluation-harness on our models: its numbers are those of our own tasks, and of its own adapter for transformers.

It runs offline, on local files with made-up examples.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_tasks import WORDS, make_text, write_lines, write_tasks

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.evals.harness import run_harness
from gptmill.evals.harness_library import open_harness
from gptmill.evals.harness_model import HarnessModel, cut_windows
from gptmill.evals.harness_tasks import find_data
from gptmill.evals.likelihood import LikelihoodScorer
from gptmill.evals.task import load_task
from gptmill.evals.task_data import load_examples
from gptmill.evals.task_scores import score_task
from gptmill.inference.model import Model
from gptmill.models.gpt import build_gpt
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import to_hf_weights
from gptmill.runtime.world import World

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig(num_layers=2, embd_size=32, num_heads=2, context_length=64)
PADDED = 320
BLIMP = "blimp_adjunct_island"


@pytest.fixture(scope="module")
def model() -> Model:
    """Weights far from their small beginnings, so that the choices differ in likelihood."""
    module = build_gpt(CONFIG, PADDED, seed=3, vocab_size=TOKENIZER.vocab_size).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(4)
    return Model(module, TOKENIZER, 0)


def write_all(folder: Path, count: int = 10) -> dict[str, Path]:
    """The file of each task of the harness, in the Hub's format."""
    generator = random.Random(7)

    def text(longest: int = 5) -> str:
        return make_text(generator, 1, longest)

    def choices(number: int) -> dict[str, Any]:
        return {"text": [text() for _ in range(number)], "label": [*"ABCDE"[:number]]}

    def answer(number: int) -> str:
        return generator.choice("ABCDE"[:number])

    makers = {
        "arc_easy": lambda: {"question": text(), "choices": choices(4), "answerKey": answer(4)},
        "piqa": lambda: {"goal": text(), "sol1": text(), "sol2": text(), "label": generator.randint(0, 1)},
        "winogrande": lambda: {
            "sentence": f"{text()} _ {text()}",
            "option1": text(1),
            "option2": text(1),
            "answer": generator.choice("12"),
        },
        "boolq": lambda: {"passage": text(9), "question": text(), "label": generator.randint(0, 1)},
        "openbookqa": lambda: {"question_stem": text(), "choices": choices(4), "answerKey": answer(4)},
        "commonsense_qa": lambda: {"question": text(), "choices": choices(5), "answerKey": answer(5)},
        BLIMP: lambda: {"sentence_good": text(), "sentence_bad": text(), "UID": "adjunct_island"},
    }
    write_tasks(folder, count)
    files = {"hellaswag": folder / "hellaswag_val.jsonl", "lambada_openai": folder / "lambada_test.jsonl"}
    for name, make in makers.items():
        files[name] = write_lines(folder / f"{name}.jsonl", (make() for _ in range(count)))
    return files


def score_ours(model: Model, harness_name: str, file: Path, limit: int | None = None) -> dict[str, float]:
    name = {"lambada_openai": "lambada", BLIMP: "blimp"}.get(harness_name, harness_name)
    task = load_task(name)
    scorer = LikelihoodScorer(model.module, model.tokenizer, World(0, 1, model.device))
    return {
        metric: measured.value
        for metric, measured in score_task(task, load_examples(task, str(file), limit), scorer).metrics.items()
        if metric != "acc_token_mean"  # which the harness does not have
    }


def test_our_numbers_are_the_harness_numbers(model: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = write_all(tmp_path)
    reports: list[tuple[int, int]] = []
    theirs = run_harness(
        model, [*files], task_data=str(tmp_path), report=lambda done, total: reports.append((done, total))
    )
    for name, file in files.items():
        ours = score_ours(model, name, file)
        found = theirs.metrics[name]
        assert {metric: found[metric] for metric in ours} == pytest.approx(ours, rel=1e-6), name
    assert "|hellaswag " in theirs.tables
    assert "±" in theirs.tables
    assert reports[-1][0] == reports[-1][1]
    assert capfd.readouterr() == ("", "")
    assert os.environ.get("HF_DATASETS_OFFLINE") is None


@pytest.fixture(scope="module")
def theirs(model: Model) -> Any:
    """The harness' own adapter, on the same weights in transformers and a tokenizer of bytes."""
    pytest.importorskip("accelerate")  # which that adapter needs
    with open_harness(downloads=False):
        import transformers
        from lm_eval.models.huggingface import HFLM
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_find_byte)
        vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<|endoftext|>": 256}
        raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")
        content = make_hf_config(CONFIG, TOKENIZER.vocab_size)
        hf_model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
        weights = to_hf_weights(CONFIG, model.module.state_dict(), TOKENIZER.vocab_size)
        hf_model.load_state_dict(weights, strict=False)
        hf_model.tie_weights()
        hf_model.generation_config.pad_token_id = 256
        return HFLM(pretrained=hf_model, tokenizer=tokenizer, batch_size=3, device="cpu", max_length=64)


def _find_byte(letter: str) -> int:
    """Which byte a letter of the byte-level alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) < 256 else others[ord(letter) - 256]


def ask(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments, arguments=arguments)


LONG = " ".join(WORDS * 4)
PAIRS = [
    ("the quick", " brown"),
    ("", "fox jumps"),
    ("rain falls ", "on"),
    (LONG, " stones"),
    ("é ü", " –"),
    ("a", LONG[:63]),
]


def test_likelihoods_are_those_of_the_harness_own_adapter(model: Model, theirs: Any) -> None:
    ours, requests = HarnessModel(model), [ask(*pair) for pair in PAIRS]
    assert TOKENIZER.encode("é –").tolist() == theirs.tok_encode("é –")
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_rolling_likelihoods_are_those_of_the_harness_own_adapter(model: Model, theirs: Any) -> None:
    texts = [ask(text) for text in ("short", LONG, LONG[:64], LONG[:65], LONG[:128])]
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert HarnessModel(model).loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-4)
    assert HarnessModel(model).loglikelihood_rolling([ask("")]) == [0.0]


def test_generated_texts_are_those_of_the_harness_own_adapter(model: Model, theirs: Any) -> None:
    options = {"until": ["\n", "zq"], "max_gen_toks": 12, "do_sample": False}
    requests = [ask(context, dict(options)) for context in ("the quick", "rain falls on old", LONG)]
    found = HarnessModel(model).generate_until([ask(*request.args) for request in requests])
    assert found == theirs.generate_until(requests, disable_tqdm=True)


def test_a_stop_string_ends_the_text(model: Model) -> None:
    harness_model = HarnessModel(model)
    [text] = harness_model.generate_until([ask("the quick", {"max_gen_toks": 12})])
    stop = text[4:6]
    [stopped] = harness_model.generate_until([ask("the quick", {"max_gen_toks": 12, "until": stop})])
    assert stopped == text.partition(stop)[0]


def test_windows_predict_every_token_once() -> None:
    windows = cut_windows(range(11), context_length=4)
    assert [(window.ids.tolist(), window.scored) for window in windows] == [
        ([0, 1, 2, 3, 4], 4),
        ([4, 5, 6, 7, 8], 4),
        ([6, 7, 8, 9, 10], 2),
    ]


REFUSED = {
    "unknown": (["xhellaswagx"], None, "has no task 'xhellaswagx'"),
    "no data": (["piqa"], None, "give its data with --task_data piqa=FILE, or add --download"),
    "no file": (["piqa"], "nowhere.jsonl", "--task_data nowhere.jsonl: there is no such file"),
    "other fields": (["piqa"], "lambada_test.jsonl", "the file must have the fields of the dataset"),
    "not JSON": (["lambada_openai"], "broken.jsonl", "cannot load task lambada_openai"),
    "other format": (["piqa"], "data.zip", "reads .jsonl, .json, .csv, .parquet files; convert it first"),
    "one file for two": (["piqa", "hellaswag"], "lambada_test.jsonl", "is one file for 2 tasks"),
    "another task": (["piqa"], "piqu=lambada_test.jsonl", "piqu is none of the tasks (did you mean piqa?)"),
}


@pytest.mark.parametrize(("names", "data", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_loaded_is_one_sentence(
    names: list[str], data: str | None, message: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_tasks(tmp_path))
    (tmp_path / "broken.jsonl").write_text('{"text": "a')
    (tmp_path / "data.zip").touch()
    with pytest.raises(UserError) as refused:
        run_harness(model, names, task_data=data)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_holds_the_files_of_groups_too(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/blimp_npi.jsonl.gz").touch()
    found = find_data(str(tmp_path), ["blimp", "hellaswag"], ["blimp_npi", "hellaswag", "piqa"])
    assert found == {
        "blimp_npi": tmp_path / "more/blimp_npi.jsonl.gz",
        "hellaswag": tmp_path / "hellaswag_val.jsonl",
    }


def test_without_the_library_the_extra_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[eval\]'"):
        run_harness(model, ["hellaswag"])


@pytest.mark.usefixtures("straight")
def test_the_command_prints_the_tables_and_writes_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_tasks(tmp_path))
    words = ["eval", "straight", "--device", "cpu", "--harness", "hellaswag", "--task_data", "hellaswag_val.jsonl"]
    assert run_guarded([*words, "--limit", "4", "--json", "out.json"]) == 0
    output, errors = capfd.readouterr()
    assert output.startswith("|")
    assert "acc_norm" in output
    assert errors == ""
    content = json.loads(Path("out.json").read_text())
    assert (content["limit"], [*content["harness"]]) == (4, ["hellaswag"])
    assert {"acc", "acc_stderr"} <= content["harness"]["hellaswag"].keys()
    for more, message in {"--tasks": "lambada", "--text": "a.txt"}.items():
        assert run_guarded([*words, more, message]) == 2
        assert f"{more}: is not for --harness" in capfd.readouterr().err


@pytest.mark.realdata
def test_our_numbers_are_the_harness_numbers_on_real_examples(model: Model, realdata: Path) -> None:
    files = {
        "hellaswag": realdata / "hellaswag/hellaswag_val.jsonl.gz",
        "lambada_openai": realdata / "lambada/lambada_test.jsonl.gz",
    }
    found = run_harness(model, [*files], task_data=str(realdata), limit=40)
    for name, file in files.items():
        ours = score_ours(model, name, file, limit=40)
        assert {metric: found.metrics[name][metric] for metric in ours} == pytest.approx(ours, rel=1e-6), name

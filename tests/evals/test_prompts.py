"""The prompts of the shipped tasks equal those of lm-evaluation-harness, which builds them from its own task files.

Each record is written as its authors publish it and, where that differs, as the Hugging Face Hub does, which is what
the harness reads. The texts are made up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptmill.evals.prompts import Example, RecordError, Request, make_example
from gptmill.evals.task import list_tasks, load_task

Record = dict[str, Any]


def publish_choices(*texts: str, labels: str = "ABCDE") -> list[Record]:
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=False)]


def hub_choices(*texts: str, labels: str = "ABCDE") -> Record:
    return {"text": [*texts], "label": [*labels[: len(texts)]]}


HELLASWAG = {
    "activity_label": "Baking bread",
    "ctx_a": "[header] How to knead [title] Flour the table.  Then [substeps] press.",
    "ctx_b": "the baker",
    "ctx": "[header] How to knead [title] Flour the table.  Then [substeps] press. the baker",
    "endings": [" folds the dough  twice.", "[step] sings [title] Loudly.", "eats\u2014it!", "leaves."],
    "label": 2,
}
STARS = ("rock", "ice ", "hydrogen")
QUESTION = "What are stars made of? "
FIRE = ("wood", "stone", "water", "sand", "air")

# The task, its name in the harness, the record as published, and the record that the harness reads.
CASES: list[tuple[str, str, Record, Record]] = [
    ("hellaswag", "hellaswag/hellaswag", HELLASWAG, {**HELLASWAG, "label": "2"}),
    ("hellaswag", "hellaswag/hellaswag", {**HELLASWAG, "ctx_b": ""}, {**HELLASWAG, "ctx_b": "", "label": "2"}),
    *(
        (
            f"arc_{part}",
            f"arc/arc_{part}",
            {"question": {"stem": QUESTION, "choices": publish_choices(*STARS, labels=labels)}, "answerKey": labels[2]},
            {"question": QUESTION, "choices": hub_choices(*STARS, labels=labels), "answerKey": labels[2]},
        )
        for part in ("easy", "challenge")
        for labels in ("ABC", "123")
    ),
    *(
        ("piqa", "piqa/piqa", record, {**record, "label": int(record["label"])})
        for record in ({"goal": "Open a jar", "sol1": "Turn the lid.", "sol2": " Turn the table.", "label": "1"},)
    ),
    *(
        ("winogrande", "winogrande/default", record, record)
        for record in (
            {"sentence": "The cup missed the box as _ was too big.", "option1": "cup", "option2": "box", "answer": "2"},
            {"sentence": "_ slept, so Ann left.", "option1": "Eve ", "option2": "Liz", "answer": "1"},
        )
    ),
    (
        "boolq",
        "super_glue/boolq/default",
        {"passage": "Rain -- Rain is wet.\nIt falls.", "question": "is rain wet", "label": True},
        {"passage": "Rain -- Rain is wet.\nIt falls.", "question": "is rain wet", "label": 1},
    ),
    (
        "openbookqa",
        "openbookqa/openbookqa",
        {"question": {"stem": QUESTION, "choices": publish_choices(*STARS)}, "answerKey": " B"},
        {"question_stem": QUESTION, "choices": hub_choices(*STARS), "answerKey": " B"},
    ),
    (
        "commonsense_qa",
        "commonsense_qa/default",
        {"question": {"stem": " What burns? ", "choices": publish_choices(*FIRE)}, "answerKey": "A"},
        {"question": " What burns? ", "choices": hub_choices(*FIRE), "answerKey": "A"},
    ),
    (
        "lambada",
        "lambada/lambada_openai",
        {"text": 'He said:\n"Give me the key'},
        {"text": 'He said:\n"Give me the key'},
    ),
    *(
        ("blimp", "blimp/adjunct_island", record, record)
        for record in ({"sentence_good": "Who slept?", "sentence_bad": "Slept who?", "UID": "questions"},)
    ),
]


@pytest.fixture(scope="module")
def harness() -> Any:
    """lm_eval's own classes and task files; its documents are given, not downloaded."""
    datasets = pytest.importorskip("datasets")
    task_module = pytest.importorskip("lm_eval.api.task")
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(task_module.__file__).parent.parent / "tasks"

    def ask(name: str, record: Record) -> tuple[list[tuple[str, str]], int, list[int]]:
        config = load_yaml(folder / f"{name}.yaml")
        split = config.get("test_split") or config["validation_split"]
        config["custom_dataset"] = lambda **_: {split: datasets.Dataset.from_list([record])}
        config |= {"metadata": None, "dataset_kwargs": None, "training_split": None}
        if split != config.get("validation_split"):
            config["validation_split"] = None
        task = task_module.ConfigurableTask(config=config)
        task.build_all_requests(rank=0, world_size=1)
        document = task.eval_docs[0]
        pairs = [(instance.args[0], instance.args[1]) for instance in task.instances]
        if task.OUTPUT_TYPE == "loglikelihood":
            return pairs, 0, []
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        choices = task.doc_to_choice(document)
        return pairs, gold if isinstance(gold, int) else choices.index(gold), [len(choice) for choice in choices]

    return ask


def list_pairs(example: Example) -> list[tuple[str, str]]:
    return [(request.context, request.continuation) for request in example.requests]


@pytest.mark.parametrize(("name", "theirs", "published", "hub"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_prompts_equal_those_of_the_harness(
    name: str, theirs: str, published: Record, hub: Record, harness: Any
) -> None:
    pairs, answer, lengths = harness(theirs, hub)
    for record in (published, hub):
        example = make_example(load_task(name), record)
        assert list_pairs(example) == pairs
        assert example.answer == answer
        assert not lengths or [*example.lengths] == lengths


def test_every_shipped_task_is_compared() -> None:
    # hellaswag_raw is the founding script's format, which the harness does not have.
    assert {*list_tasks()} == {name for name, *_ in CASES} | {"hellaswag_raw"}


def test_raw_hellaswag_is_the_text_as_published() -> None:
    example = make_example(load_task("hellaswag_raw"), HELLASWAG)
    assert example.requests[3] == Request(HELLASWAG["ctx"], " leaves.")
    assert example.answer == 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hellaswag", {"endings": None}, "lacks the field endings"),
        ("hellaswag", {"endings": "one text"}, "has no list of texts in endings"),
        ("hellaswag", {"endings": ["one"]}, "has 1 choice"),
        ("hellaswag", {"label": 4}, "has the answer 4; it must be the number of a choice, 0 to 3"),
        ("hellaswag", {"label": -1}, "has the answer -1"),
        ("hellaswag", {"label": ""}, "has the answer ''"),
        ("hellaswag", {"ctx_a": ["text"]}, "has a list in ctx_a"),
        ("winogrande", {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}, "has no blank _"),
        ("lambada", {"text": "word"}, "has a text without a space"),
        (
            "arc_easy",
            {"question": {"stem": "a", "choices": publish_choices("x", "y")}, "answerKey": "Z"},
            "none of its",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_named(name: str, change: Record, message: str) -> None:
    record = {**HELLASWAG, **change} if name == "hellaswag" else change
    with pytest.raises(RecordError, match=message):
        make_example(load_task(name), record)

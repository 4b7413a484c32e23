"""Names from other software lead to our options, and the table that says so is true."""

from __future__ import annotations

import pytest

from gptmill.config import requests
from gptmill.config.run import RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import list_fields
from gptmill.config.synonyms import ADVICE, ADVICE_BY_NAME, NAMES_ELSEWHERE, SAME_ADVICE, list_options, suggest_option

TRAIN = {
    field.name for config in (requests.StartOptions, requests.PresetOptions, RunConfig) for field in list_fields(config)
}
PREPARE, SAMPLE = ({field.name for field in list_fields(config)} for config in (requests.PrepareRequest, SampleRequest))
NAMES = [name for names in NAMES_ELSEWHERE.values() for name in names.split()]


def test_every_target_of_the_table_is_an_option() -> None:
    assert NAMES_ELSEWHERE.keys() <= TRAIN | PREPARE | SAMPLE
    assert SAME_ADVICE.keys() <= ADVICE.keys()
    for advice in ADVICE.values():
        assert list_options(advice) <= TRAIN, advice


def test_the_table_names_no_option_of_ours_and_nothing_twice() -> None:
    assert not TRAIN & {*NAMES, *ADVICE_BY_NAME}
    for option, names in NAMES_ELSEWHERE.items():
        assert len(set(names.split())) == len(names.split()), option


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *[(name, "max_lr") for name in ("lr", "learning_rate")],
        *[(name, "max_steps") for name in ("steps", "max_iters", "train-iters", "num_iterations")],
        *[(name, "context_length") for name in ("block_size", "seq_length", "max_seq_len", "training.seq_len")],
        *[(name, "eval_freq") for name in ("eval_interval", "eval_steps", "eval.interval")],
        *[(name, "checkpoint_freq") for name in ("save_steps", "checkpoint.interval")],
        *[(name, "num_layers") for name in ("n_layer", "num_hidden_layers")],
        *[(name, "num_heads") for name in ("n_head", "num_attention_heads")],
        *[(name, "embd_size") for name in ("n_embd", "hidden_size")],
        *[(name, "num_epochs") for name in ("epochs", "num_train_epochs")],
        *[(name, "logdir") for name in ("out_dir", "output_dir", "job.dump_folder")],
        ("per_device_train_batch_size", "mini_batch_size"),
        ("dtype", "precision"),
        ("nproc_per_node", "gpus"),
        ("warmup_iters", "warmup_steps"),
        ("min_learning_rate", "min_lr"),
        ("lr_scheduler_type", "schedule"),
        ("resume_from_checkpoint", "resume"),
        ("optimizer.weight_decay", "weight_decay"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_ours(name: str, option: str) -> None:
    assert suggest_option(f"--{name}", TRAIN) == f"; gptmill calls it --{option}"
    assert suggest_option(name, TRAIN) == f"; gptmill calls it {option}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gradient_accumulation_steps", "set --total_batch_size (tokens of a step) and --mini_batch_size"),
        ("batch_size", "--mini_batch_size is the sequences"),
        ("bf16", "use --precision bf16"),
        ("fp8", "use --precision fp8"),
        ("report_to", "use --use_tensorboard"),
        ("vocab_size", "--tokenizer"),
        ("lr_decay_iters", "--max_steps"),
        ("dataset", "--corpus"),
        ("always_save_checkpoint", "--checkpoint_freq"),
    ],
)
def test_a_name_without_a_counterpart_is_answered_with_advice(name: str, says: str) -> None:
    assert says in suggest_option(f"--{name}", TRAIN)
    assert "--" not in suggest_option(name, TRAIN)


def test_the_answer_is_an_option_of_the_verb() -> None:
    assert suggest_option("--out_dir", PREPARE) == "; gptmill calls it --out"
    assert suggest_option("--num_workers", PREPARE) == "; gptmill calls it --processes"
    assert suggest_option("--num_workers", TRAIN) == "; gptmill calls it --prefetch_batches"
    assert suggest_option("--max_tokens", SAMPLE) == "; gptmill calls it --max_new_tokens"
    assert suggest_option("--lr", SAMPLE) == ""


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    assert suggest_option("--num_layer", TRAIN) == " (did you mean --num_layers?)"
    assert suggest_option("zzzzzz", TRAIN) == ""

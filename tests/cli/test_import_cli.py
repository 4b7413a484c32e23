"""gptmill import, and what the other verbs do with the run that it makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import GptMill

TEXT = "bal dem kor tin bum del kar " * 300


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A Llama with the tokenizer of the bytes 0 to 255 and 64 more, in a folder that `transformers` saved."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["</s>", *alphabet, *(f"<{number}>" for number in range(63))]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=0,
    )
    folder = tmp_path / "published"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_an_imported_run_is_used_like_any_other(published: Path, gptmill: GptMill, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    assert gptmill("import", published, "--out", "llama").stdout == f"run runs/llama, made of {published}\n"
    shutil.rmtree(published)
    assert "model only" in gptmill("runs", "list").stdout
    assert "step_000000: valid" in gptmill("checkpoints", "verify", "llama").stdout
    for source in ("llama", "runs/llama/checkpoints/latest"):
        assert gptmill("sample", source, "--prompt", "bal", "--max_new_tokens", "2").stdout.startswith("bal")
    again = gptmill("import", tmp_path / "absent", "--out", "llama", check=False)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    resumed = gptmill("train", "--run_name", "llama", "--resume", "latest", check=False)
    assert (resumed.returncode, resumed.stderr.count("\n")) == (2, 1)
    assert "gptmill train runs/llama/config.toml --init_from llama" in resumed.stderr


def test_training_goes_on_where_transformers_is(published: Path, gptmill: GptMill, tmp_path: Path) -> None:
    """The loss of step 0 is that of `transformers` on the same windows."""
    import transformers

    from gptmill.data.shards.opening import open_shards

    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    gptmill("import", published, "--out", "llama")
    flags = "--max_steps 1 --total_batch_size 64 --mini_batch_size 4 --eval_tokens 64 --sample_tokens 2 --device cpu"
    train = ["train", "runs/llama/config.toml", "--init_from", "llama", "--corpus", "text.txt", "--val_fraction", "0.5"]
    gptmill(*train, "--data_dir", "data", "--run_name", "further", "--warmup_steps", "0", *flags.split())
    log = (tmp_path / "runs/further/log.txt").read_text(encoding="utf-8").split("\n")
    (loss,) = (float(line.split()[2]) for line in log if line.startswith("0 val "))
    ids = torch.from_numpy(open_shards(tmp_path / "data").val[0][:65].astype("int64"))
    model = transformers.AutoModelForCausalLM.from_pretrained(published).eval()
    with torch.no_grad():
        logits = model(ids[:64].view(4, 16)).logits.flatten(0, 1)
    assert abs(torch.nn.functional.cross_entropy(logits, ids[1:]).item() - loss) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model"], "--out is missing"),
        (["absent", "--out", "run"], "there is no absent"),
        (["https://x/y.gguf", "--out", "run"], "a URL is not read"),
        (["model", "--out", ".."], "choose another name"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], said: str, gptmill: GptMill, tmp_path: Path) -> None:
    answer = gptmill("import", *arguments, check=False)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())

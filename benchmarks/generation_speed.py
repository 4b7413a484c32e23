"""Generation speed: gptmill beside transformers.generate in several settings, interleaved, on a GPT-2 124M.

python benchmarks/generation_speed.py                       # CPU, or the GPU if there is one
python benchmarks/generation_speed.py --batches 1,32 --new_tokens 256 --dtype bf16 --compile
python benchmarks/generation_speed.py --batches 32 --no_autotune    # compiling with max-autotune outlasts all else
python benchmarks/generation_speed.py --model HF_DIR --prompt "In a quiet village by the sea, an old woman"

The weights are random, or a published model's, the same in both. Speed depends on them only with self-speculation, on
the CPU, whose guesses are better where a text repeats itself, as that of random weights does: --model shows what an
ordinary text gives, and a line of its own what guesses give without repetitions. Greedy texts are compared token for
token, in fp32 strictly. In bf16 equal logits are common, so that the first difference is reported only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptmill.inference import self_speculation
from gptmill.inference.generator import BatchGenerator
from gptmill.inference.huggingface_folder import read_hf_folder
from gptmill.inference.loading import build_empty
from gptmill.inference.self_speculation import NGRAM
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.huggingface.config_import import read_hf_config
from gptmill.models.huggingface.conversion import from_hf_weights

NEVER_FOUND = 1 << 30  # tokens: no text repeats so many
GREEDY = SamplingConfig(temperature=0.0)
Tokens = list[list[int]]


def build_models(device: str, dtype: torch.dtype, sizes: dict[str, int]) -> tuple[Any, GPT, int]:
    """The same random weights as transformers' model and as ours."""
    torch.manual_seed(0)
    config = GPT2Config(**sizes)
    theirs = GPT2LMHeadModel(config).eval()
    our_config = read_hf_config({**config.to_dict(), "model_type": "gpt2"})
    rows = pad_vocab(config.vocab_size)
    weights = from_hf_weights(theirs.state_dict(), "gpt2", our_config, rows)
    ours = GPT(our_config, rows)
    ours.load_state_dict({name: tensor.float().contiguous().clone() for name, tensor in weights.items()}, assign=True)
    return theirs.to(device, dtype), ours.to(device, dtype).eval(), config.vocab_size


def load_models(folder: str, device: str, dtype: torch.dtype) -> tuple[Any, GPT, int]:
    """A published model, by transformers and by us."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found, vocab_size = read_hf_folder(Path(folder)), theirs.config.vocab_size
    ours = build_empty(found.config, vocab_size)
    ours.load_state_dict({name: tensor.float() for name, tensor in found.convert(vocab_size).items()}, assign=True)
    return theirs.to(device, dtype), ours.to(device, dtype).eval(), vocab_size


def list_their_settings(device: str, *, autotune: bool) -> dict[str, dict[str, Any]]:
    """What may be fastest; on CUDA, transformers compiles the forward pass by itself when the cache is static."""
    settings: dict[str, dict[str, Any]] = {"dynamic cache": {}, "static cache": {"cache_implementation": "static"}}
    if device == "cuda":
        from transformers import CompileConfig

        autotuned = CompileConfig(mode="max-autotune", fullgraph=True, dynamic=False)
        if autotune:
            settings["static cache, max-autotune"] = {"cache_implementation": "static", "compile_config": autotuned}
        settings["static cache, not compiled"] = {"cache_implementation": "static", "disable_compile": True}
    return settings


def make_theirs(model: Any, prompts: torch.Tensor, count: int, setting: dict[str, Any]) -> Callable[[], Tokens]:
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

    def run() -> Tokens:
        with torch.inference_mode():
            mask = torch.ones_like(prompts)
            tokens = model.generate(prompts, attention_mask=mask, **options, **setting)
        return tokens[:, prompts.shape[1] :].tolist()

    return run


def make_ours(
    model: GPT, vocab_size: int, prompts: torch.Tensor, count: int, *, ngram: int = NGRAM, **options: bool
) -> Callable[[], Tokens]:
    generator = BatchGenerator(model, GREEDY, vocab_size, **options)

    def run() -> Tokens:
        self_speculation.NGRAM = ngram
        steps = generator.generate(prompts.tolist(), count, [0] * len(prompts))
        return [list(text) for text in zip(*(step.tokens for step in steps), strict=True)]

    return run


def measure(
    runs: dict[str, Callable[[], Tokens]], repeats: int, summary: str
) -> tuple[dict[str, float], dict[str, Tokens]]:
    """Seconds of each, in turns, after a warm-up; and the tokens. A setting that fails is left out."""
    tokens: dict[str, Tokens] = {}
    for name, run in runs.items():
        try:
            tokens[name] = run()
            run()
        except Exception as error:
            print(f"  {name}: failed with {type(error).__name__}: {error!s:.200}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in tokens}
    for _ in range(repeats):
        for name in tokens:
            started = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - started)
    choose = min if summary == "minimum" else statistics.median
    return {name: choose(values) for name, values in seconds.items()}, tokens


def find_difference(ours: Tokens, theirs: Tokens) -> int | None:
    """The first step at which any text differs."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(ours, theirs, strict=True)]
    steps = [step for pair in pairs for step, (mine, other) in enumerate(pair) if mine != other]
    return min(steps, default=None)


def make_prompts(arguments: argparse.Namespace, batch: int, vocab_size: int) -> torch.Tensor:
    if arguments.prompt is not None:
        ids = AutoTokenizer.from_pretrained(arguments.model)(arguments.prompt).input_ids
        return torch.tensor([ids] * batch, device=arguments.device)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (batch, arguments.prompt_tokens), generator=generator).to(arguments.device)


def compare(arguments: argparse.Namespace, batch: int, theirs: Any, ours: GPT, vocab_size: int) -> dict[str, Any]:
    device, count = arguments.device, arguments.new_tokens
    prompts = make_prompts(arguments, batch, vocab_size)
    # On a GPU, where there is no self-speculation, the first is all.
    runs = {"gptmill": make_ours(ours, vocab_size, prompts, count, speculative=True)}
    if device == "cpu" and batch == 1:
        runs["gptmill, guesses by INT8 alone"] = make_ours(
            ours, vocab_size, prompts, count, speculative=True, ngram=NEVER_FOUND
        )
        runs["gptmill, no guesses"] = make_ours(ours, vocab_size, prompts, count)
    if arguments.compile:
        runs["gptmill, compiled"] = make_ours(ours, vocab_size, prompts, count, compiled=True)
    for name, setting in list_their_settings(device, autotune=not arguments.no_autotune).items():
        runs[f"transformers, {name}"] = make_theirs(theirs, prompts, count, setting)
    seconds, tokens = measure(runs, arguments.repeats, arguments.summary)
    best_theirs = min(value for name, value in seconds.items() if name.startswith("transformers"))
    best_ours = min(value for name, value in seconds.items() if name.startswith("gptmill"))
    for name, value in seconds.items():
        different = find_difference(tokens["gptmill"], tokens[name])
        same = "same tokens" if different is None else f"other tokens from step {different}"
        rate = f"{value / count * 1e3:9.3f} ms/step {batch * count / value:11.0f} tokens/s"
        print(f"  {name:<42}{rate} {best_theirs / value:6.2f}x  {same}", flush=True)
        if arguments.dtype == "fp32" and different is not None:
            raise SystemExit(f"greedy tokens of {name} differ in fp32 at batch {batch}")
    return {"batch": batch, "seconds": seconds, "ratio": best_theirs / best_ours}


def main() -> None:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16" if has_cuda else "fp32")
    parser.add_argument("--batches", default="1,32" if has_cuda else "1")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=256 if has_cuda else 64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick trial")
    parser.add_argument("--compile", action="store_true", help="also measure gptmill compiled")
    parser.add_argument("--no_autotune", action="store_true", help="leave out transformers compiled with max-autotune")
    parser.add_argument("--model", help="a folder with a published model, instead of GPT-2 with random weights")
    parser.add_argument("--prompt", help="a text for --model; by default random tokens")
    parser.add_argument("--threads", type=int, help="CPU threads; by default torch's choice")
    parser.add_argument(
        "--summary", choices=["median", "minimum"], default="median", help="minimum: for a machine with other work"
    )
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.model:
        theirs, ours, vocab_size = load_models(arguments.model, arguments.device, dtype)
    else:
        theirs, ours, vocab_size = build_models(arguments.device, dtype, {"n_layer": arguments.layers})
    place = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    name = arguments.model or f"GPT-2, {arguments.layers} layers"
    print(f"{name}, {arguments.dtype}, torch {torch.__version__}, {place}")
    results = []
    for batch in map(int, arguments.batches.split(",")):
        about = f"{arguments.prompt_tokens} prompt tokens" if arguments.prompt is None else repr(arguments.prompt)
        print(f"batch {batch}: {about}, {arguments.new_tokens} new ones, {arguments.summary} of {arguments.repeats}")
        results.append(compare(arguments, batch, theirs, ours, vocab_size))
        print(f"  best of gptmill / best of transformers: {results[-1]['ratio']:.2f}x")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Size and speed of a model by compression method: GPT-2 124M with random weights, or the model of a run.

    python benchmarks/compression.py [--run RUN_OR_CHECKPOINT] [--device cpu] [--context_length 256] [--methods int8]

All models are measured in alternation, on the same device. Prints a Markdown table. Losses need a trained model:
`gptmill compress RUN` prints them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from gptmill.config.compress_request import CompressRequest
from gptmill.config.model import ModelConfig
from gptmill.config.requests import LoadingOptions
from gptmill.data.tokenizers import build_tokenizer
from gptmill.evals.compression_measures import measure_weights
from gptmill.evals.speed import measure_speeds
from gptmill.inference.compression import check_compressible, compress_model, make_compression, pack_layers
from gptmill.inference.loading import LoadedModel
from gptmill.inference.opening import load_source
from gptmill.models.gpt import build_gpt, pad_vocab
from gptmill.runs.checkpoints.tensor_files import measure_tensors
from gptmill.runtime.device import choose_device

METHODS = ("int8", "int8-dynamic", "int4", "prune-2:4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context_length", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    device = choose_device(options.device)
    plain = open_plain(options.run, options.context_length)
    models = [plain, *(compress(plain, method) for method in options.methods)]
    for loaded in models:
        loaded.model.to(device)
        pack_layers(loaded.model)
    print("| | MB | bits per weight | generation (tokens/s) | | forward (tokens/s) | |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    speeds = measure_speeds(models)
    for name, loaded, speed in zip(("plain", *options.methods), models, speeds, strict=True):
        megabytes = measure_tensors(loaded.model.state_dict()) / 1e6
        factors = speed.generation / speeds[0].generation, speed.forward / speeds[0].forward
        print(
            f"| {name} | {megabytes:,.1f} | {measure_weights(loaded.model)[0]:.2f} | {speed.generation:,.1f} | "
            f"{factors[0]:.2f}x | {speed.forward:,.0f} | {factors[1]:.2f}x |"
        )


def open_plain(run: str | None, context_length: int) -> LoadedModel:
    if run is not None:
        return load_source(run, LoadingOptions(device="cpu"))
    tokenizer = build_tokenizer("gpt2", ())
    config = ModelConfig(context_length=context_length)
    return LoadedModel(build_gpt(config, pad_vocab(tokenizer.vocab_size), seed=0).eval(), tokenizer, step=0)


def compress(plain: LoadedModel, method: Any) -> LoadedModel:
    compression = make_compression(CompressRequest(method=method), "")
    model = check_compressible(plain.model, compression, "the model")
    with torch.no_grad():
        return LoadedModel(compress_model(model, compression).eval(), plain.tokenizer, plain.step)


if __name__ == "__main__":
    main()

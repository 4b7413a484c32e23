"""How long the matmuls of a model's step take on this GPU, in each way that cuBLASLt knows.

    python benchmarks/matmul_ways.py [RECIPE] [--tokens 65536] [--heat 4]

The card is kept busy first (--heat seconds), then the ways of each matmul take turns, as when a training chooses among
them. Random numbers in bf16; microseconds, medians of 9 turns. "guess" is the way that the library would take.
Attention, norms and all the rest are not in the sum, which is that of one step of so many tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import torch
from runs import run_guarded
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, SwiGlu
from gptmill.config.recipes import make_config
from gptmill.models.gpt import pad_vocab
from gptmill.models.kernels.cublaslt import Algorithm, Epilogue, GemmPlan, Operands, find_version, has_library
from gptmill.models.kernels.gemm import describe

TURNS = 9
VOCAB_SIZE = 50257


class Layer(NamedTuple):
    name: str
    inputs: int
    outputs: int
    count: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the ways to multiply.")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heat", type=float, default=4.0)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not has_library():
        parser.error("torch finds no NVIDIA GPU here; use a machine that has one")
    try:
        model = make_config(options.recipe, {}).model
    except UserError as error:
        parser.error(str(error))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {find_version()}\n")
    keep_busy(options.heat)
    print("| matmul | times | guess | best | way | all |\n|---|---:|---:|---:|---:|---|")
    guessed, best = 0.0, 0.0
    for layer in list_layers(model):
        for name, numbers, epilogue in list_matmuls(layer, options.tokens):
            times = time_ways(numbers, epilogue)
            way = min(range(len(times)), key=times.__getitem__)
            print(
                f"| {name} | {layer.count} | {times[0]:.0f} | {times[way]:.0f} | {way} | {format_times(times)} |",
                flush=True,
            )
            if epilogue == Epilogue.DEFAULT:
                guessed, best = guessed + layer.count * times[0], best + layer.count * times[way]
    print(f"\nmatmuls of a step without GELU's work: {guessed / 1000:.1f} ms as guessed, {best / 1000:.1f} ms at best")
    return 0


def list_layers(model: ModelConfig) -> list[Layer]:
    width, heads = model.embd_size, model.num_heads * model.head_width
    inner = model.hidden_size * (2 if isinstance(model.feed_forward, SwiGlu) else 1)
    return [
        Layer("queries", width, heads + 2 * model.kv_heads * model.head_width, model.num_layers),
        Layer("attention's last", heads, width, model.num_layers),
        Layer("up", width, inner, model.num_layers),
        Layer("down", model.hidden_size, width, model.num_layers),
        Layer("head", width, pad_vocab(VOCAB_SIZE), 1),
    ]


def list_matmuls(layer: Layer, tokens: int) -> list[tuple[str, Operands, Epilogue]]:
    """Forward, the gradients of input and weight; and with GELU's work, for those next to it."""
    x, weight, gradient = draw(tokens, layer.inputs), draw(layer.outputs, layer.inputs), draw(tokens, layer.outputs)
    found = [
        (layer.name, Operands(x, weight.t()), Epilogue.DEFAULT),
        (f"{layer.name}, gradient of x", Operands(gradient, weight), Epilogue.DEFAULT),
        (f"{layer.name}, gradient of the weight", Operands(gradient.t(), x), Epilogue.DEFAULT),
    ]
    if layer.name == "up":
        bias, beside = draw(1, layer.outputs)[0], torch.empty_like(gradient)
        found.append(("up and GELU", Operands(x, weight.t(), bias, aux=beside), Epilogue.GELU_AUX_BIAS))
    if layer.name == "down":
        found.append(("down and GELU, gradient of x", Operands(gradient, weight, aux=x), Epilogue.DGELU))
    return found


def draw(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def keep_busy(seconds: float) -> None:
    matrix, started = draw(8192, 8192), time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        torch.cuda.synchronize()


def time_ways(numbers: Operands, epilogue: Epilogue) -> list[float]:
    """Microseconds of each."""
    matmul = describe(numbers, epilogue)
    assert matmul is not None, "such matrices lie as the library wants them"
    plan = GemmPlan(matmul, numbers)
    times: list[list[float]] = [[] for _ in plan.algorithms]
    for _ in range(TURNS):
        for way, found in zip(plan.algorithms, times, strict=True):
            found.append(time_way(plan, numbers, way))
    return [statistics.median(found) for found in times]


def time_way(plan: GemmPlan, numbers: Operands, way: Algorithm) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    plan.run(numbers, way)
    begin.record()
    plan.run(numbers, way)
    plan.run(numbers, way)
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / 2


def format_times(times: list[float]) -> str:
    return ", ".join(f"{found:.0f}" for found in times)


if __name__ == "__main__":
    sys.exit(run_guarded(main))

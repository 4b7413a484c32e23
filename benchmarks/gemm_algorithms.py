"""Times every GEMM algorithm that cuBLASLt offers for the matmuls of one training step.

    python benchmarks/gemm_algorithms.py [RECIPE] [--tokens 65536] [--warmup_seconds 4]

Warms the GPU up, then times the algorithms of each matmul interleaved, as autotuning does before training. Operands are
random bf16. Times are microseconds, medians of 9 rounds. "heuristic" is the algorithm that cuBLASLt picks by itself.
The sum covers the matmuls of one step of --tokens tokens; it leaves out attention, norms and everything else.
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

ROUNDS = 9
VOCAB_SIZE = 50257


class Layer(NamedTuple):
    name: str
    inputs: int
    outputs: int
    count: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the GEMM algorithms of cuBLASLt.")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one step")
    parser.add_argument("--warmup_seconds", type=float, default=4.0)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not has_library():
        parser.error("torch finds no NVIDIA GPU here; use a machine that has one")
    try:
        model = make_config(options.recipe, {}).model
    except UserError as error:
        parser.error(str(error))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {find_version()}\n")
    warm_up(options.warmup_seconds)
    print("| matmul | calls | heuristic | best | algorithm | all |\n|---|---:|---:|---:|---:|---|")
    heuristic, best = 0.0, 0.0
    for layer in list_layers(model):
        for name, operands, epilogue in list_matmuls(layer, options.tokens):
            times = time_algorithms(operands, epilogue)
            fastest = min(range(len(times)), key=times.__getitem__)
            cells = (name, layer.count, f"{times[0]:.0f}", f"{times[fastest]:.0f}", fastest, format_times(times))
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            if epilogue == Epilogue.DEFAULT:
                heuristic, best = heuristic + layer.count * times[0], best + layer.count * times[fastest]
    print(f"\nmatmuls of a step, GELU not fused: heuristic {heuristic / 1000:.1f} ms, best {best / 1000:.1f} ms")
    return 0


def list_layers(model: ModelConfig) -> list[Layer]:
    width, heads = model.embd_size, model.num_heads * model.head_width
    inner = model.hidden_size * (2 if isinstance(model.feed_forward, SwiGlu) else 1)
    return [
        Layer("QKV projection", width, heads + 2 * model.kv_heads * model.head_width, model.num_layers),
        Layer("attention output", heads, width, model.num_layers),
        Layer("up", width, inner, model.num_layers),
        Layer("down", model.hidden_size, width, model.num_layers),
        Layer("head", width, pad_vocab(VOCAB_SIZE), 1),
    ]


def list_matmuls(layer: Layer, tokens: int) -> list[tuple[str, Operands, Epilogue]]:
    """Forward, input gradient and weight gradient; next to GELU, also the matmuls with the fused GELU epilogue."""
    x, weight, gradient = draw(tokens, layer.inputs), draw(layer.outputs, layer.inputs), draw(tokens, layer.outputs)
    found = [
        (layer.name, Operands(x, weight.t()), Epilogue.DEFAULT),
        (f"{layer.name}, input gradient", Operands(gradient, weight), Epilogue.DEFAULT),
        (f"{layer.name}, weight gradient", Operands(gradient.t(), x), Epilogue.DEFAULT),
    ]
    if layer.name == "up":
        bias, aux = draw(1, layer.outputs)[0], torch.empty_like(gradient)
        found.append(("up with GELU", Operands(x, weight.t(), bias, aux=aux), Epilogue.GELU_AUX_BIAS))
    if layer.name == "down":
        found.append(("down with GELU, input gradient", Operands(gradient, weight, aux=x), Epilogue.DGELU))
    return found


def draw(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def warm_up(seconds: float) -> None:
    matrix, started = draw(8192, 8192), time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        torch.cuda.synchronize()


def time_algorithms(operands: Operands, epilogue: Epilogue) -> list[float]:
    """Returns the microseconds of each algorithm."""
    matmul = describe(operands, epilogue)
    assert matmul is not None, "cuBLASLt supports these layouts"
    plan = GemmPlan(matmul, operands)
    times: list[list[float]] = [[] for _ in plan.algorithms]
    for _ in range(ROUNDS):
        for algorithm, found in zip(plan.algorithms, times, strict=True):
            found.append(time_algorithm(plan, operands, algorithm))
    return [statistics.median(found) for found in times]


def time_algorithm(plan: GemmPlan, operands: Operands, algorithm: Algorithm) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    plan.run(operands, algorithm)
    begin.record()
    plan.run(operands, algorithm)
    plan.run(operands, algorithm)
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / 2


def format_times(times: list[float]) -> str:
    return ", ".join(f"{found:.0f}" for found in times)


if __name__ == "__main__":
    sys.exit(run_guarded(main))

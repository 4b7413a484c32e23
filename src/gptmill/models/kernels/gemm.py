"""Large GEMMs with the fastest algorithm of cuBLASLt, found by timing (autotuning).

cuBLASLt has many kernels for a GEMM: tile sizes, pipeline stages, ways to split the sum. Its heuristic ranks them by
shape, with a GPU in mind that runs at its highest clock. Under the load of training a GPU is limited by power and
clocks lower, and then other kernels win: on an H200 by up to a fifth.

So inside `autotune_gemms()` the first GEMM of each shape, layout and epilogue is timed:

1. candidates that fail are dropped; the rest run until the GPU is warm, that is, at its power limit;
2. all of them are timed in turn, round after round, since the clock drifts: the median over the rounds counts;
3. the fastest is taken if it beats the heuristic's first by at least MIN_SPEEDUP. Where the caller passes a plain
   implementation that does the same, such as GEMM and GELU one after the other, it competes too.

`autotuned` holds the results by problem, GPU and library version, and the caller may save and restore it. Outside of
`autotune_gemms()`, unknown GEMMs use the heuristic's first. Small GEMMs stay with torch: choosing costs host time. So
do all under deterministic algorithms: other kernels sum in another order.

Shape suffixes: M rows, K summed dimension, N columns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptmill.models.kernels.cublaslt import (
    DATA_TYPES,
    MAX_ALGORITHMS,
    WORKSPACE_BYTES,
    Algorithm,
    Epilogue,
    GemmPlan,
    GemmProblem,
    MatrixLayout,
    Operands,
    find_version,
    has_library,
)

MIN_FLOPS = 2e10  # of a GEMM that is worth the host's time: 30 µs of an H200
ROUNDS, SHORT_BURST, LONG_BURST = 7, 1, 4
LONG_GEMM_FLOPS = 4e11  # from which on one run is timed by itself, not a burst of several
WARM_UP_SECONDS = 0.2
MIN_SPEEDUP = 0.01
USE_TORCH = -1
ALIGNMENT = 256  # bytes that the heuristic assumes
HALF_PRECISION = (torch.bfloat16, torch.float16)

autotuned: dict[str, int] = {}
"""The autotuning cache: the index of the fastest algorithm by `name_gemm`; USE_TORCH where none wins."""
_plans: dict[tuple[GemmProblem, torch.device], tuple[GemmPlan, Algorithm] | None] = {}
_is_autotuning = False


def gemm(
    a_MK: Tensor,
    b_KN: Tensor,
    bias_N: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """`a @ b`, plus a bias. fp8 operands have a scale each, and their result is bf16."""
    operands = Operands(a_MK, b_KN, bias_N, scale_a, scale_b)
    epilogue = Epilogue.DEFAULT if bias_N is None else Epilogue.BIAS
    result = tuned_gemm(operands, epilogue, use_fast_accum=use_fast_accum)
    return gemm_reference(operands, use_fast_accum=use_fast_accum) if result is None else result


def gemm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` of half-precision operands in fp32: the sums are neither rounded nor cast in another pass."""
    result = tuned_gemm(
        Operands(a_MK, b_KN), Epilogue.DEFAULT, result=torch.float32, plain=lambda: gemm_fp32_reference(a_MK, b_KN)
    )
    return gemm_fp32_reference(a_MK, b_KN) if result is None else result


def gemm_fp32_reference(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Reference implementation, which rounds the result before it is cast."""
    return gemm(a_MK, b_KN).float()


def gemm_reference(operands: Operands, *, use_fast_accum: bool = False) -> Tensor:
    """Reference implementation: PyTorch's own."""
    a, b, bias, scale_a, scale_b, _ = operands
    if scale_a is None or scale_b is None:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum
    )


def tuned_gemm(
    operands: Operands,
    epilogue: Epilogue,
    *,
    use_fast_accum: bool = False,
    result: torch.dtype | None = None,
    plain: Callable[[], Any] | None = None,
) -> Tensor | None:
    """The GEMM by the best known algorithm; None where torch should compute it.

    `plain` computes the same by separate operations; it is timed along with the algorithms, and None is returned where
    it is faster.
    """
    if not is_large(operands.a, operands.b) or not has_library() or torch.are_deterministic_algorithms_enabled():
        return None
    problem = describe(operands, epilogue, use_fast_accum=use_fast_accum, result=result)
    found = None if problem is None else _find_plan(problem, operands, plain)
    return None if found is None else found[0].run(operands, found[1])


def is_large(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and 2.0 * a.shape[0] * a.shape[1] * b.shape[1] >= MIN_FLOPS


def describe(
    operands: Operands, epilogue: Epilogue, *, use_fast_accum: bool = False, result: torch.dtype | None = None
) -> GemmProblem | None:
    """The problem that the operands pose; None where dtypes, strides or alignment are not supported.

    `result` defaults to the operands' dtype, or bf16 for fp8.
    """
    a, b, bias, scale_a, _, aux = operands
    left, right = _make_layout(a), _make_layout(b)
    if left is None or right is None:
        return None
    result = result or (torch.bfloat16 if scale_a is not None else a.dtype)
    is_supported = scale_a is not None or (a.dtype == b.dtype and a.dtype in HALF_PRECISION)
    fits = all(each is None or _is_usable(each, result) for each in (bias, aux))
    fits = fits and (bias is None or len(bias) == b.shape[1])
    return (
        GemmProblem(left, right, result, epilogue, scale_a is not None, use_fast_accum)
        if is_supported and fits
        else None
    )


def _is_usable(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _make_layout(matrix: Tensor) -> MatrixLayout | None:
    down, right = matrix.stride()
    is_transposed = right != 1
    if (is_transposed and down != 1) or matrix.data_ptr() % ALIGNMENT or matrix.dtype not in DATA_TYPES:
        return None
    rows, columns = matrix.shape
    return MatrixLayout(rows, columns, right if is_transposed else down, is_transposed, matrix.dtype)


@contextmanager
def autotune_gemms() -> Iterator[None]:
    """A context in which GEMMs that the autotuning cache does not know are timed; elsewhere the heuristic decides."""
    global _is_autotuning
    _is_autotuning = True
    _plans.clear()  # which the heuristic chose
    try:
        yield
    finally:
        _is_autotuning = False


def _find_plan(
    problem: GemmProblem, operands: Operands, plain: Callable[[], Any] | None
) -> tuple[GemmPlan, Algorithm] | None:
    key = (problem, operands.a.device)
    if key not in _plans:
        _plans[key] = None
        with suppress(RuntimeError):  # torch computes what the library refuses
            plan, name = GemmPlan(problem, operands), name_gemm(*key)
            can_time = _is_autotuning and not torch.cuda.is_current_stream_capturing()
            if name not in autotuned and can_time:
                autotuned[name] = _find_fastest(plan, operands, plain)
            index = autotuned.get(name, 0)
            if 0 <= index < len(plan.algorithms):
                _plans[key] = plan, plan.algorithms[index]
    return _plans[key]


def name_gemm(problem: GemmProblem, device: torch.device) -> str:
    """The key in the autotuning cache, with all that the fastest algorithm depends on."""
    library = f"cuBLASLt {find_version()}, {MAX_ALGORITHMS} ways in {WORKSPACE_BYTES} bytes"
    return f"{torch.cuda.get_device_name(device)}, {library}: {problem.name}"


def _find_fastest(plan: GemmPlan, operands: Operands, plain: Callable[[], Any] | None) -> int:
    """The index of the fastest algorithm; USE_TORCH where none works, or `plain` is faster."""
    (rows, depth), columns = operands.a.shape, operands.b.shape[1]
    burst = SHORT_BURST if 2.0 * rows * depth * columns > LONG_GEMM_FLOPS else LONG_BURST
    candidates = [(index, partial(plan.run, operands, each)) for index, each in enumerate(plan.algorithms)]
    candidates = [(index, run) for index, run in candidates if _works(run)]
    if not candidates:
        return USE_TORCH
    runs: list[Callable[[], Any]] = [run for _, run in candidates] + ([] if plain is None else [plain])
    _warm_up(runs)
    times = [[_start_timing(run, burst) for run in runs] for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    medians = [
        statistics.median(begin.elapsed_time(end) for begin, end in rounds) for rounds in zip(*times, strict=True)
    ]
    best = min(range(len(medians)), key=medians.__getitem__)
    if best == len(candidates):
        return USE_TORCH
    return candidates[best if medians[best] < (1 - MIN_SPEEDUP) * medians[0] else 0][0]


def _works(run: Callable[[], Any]) -> bool:
    try:
        run()
    except RuntimeError:
        return False
    return True


def _warm_up(runs: Sequence[Callable[[], Any]]) -> None:
    """Keeps the GPU busy until its clock is limited by power, as it is in training."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        for run in runs:
            run()
        torch.cuda.synchronize()


def _start_timing(run: Callable[[], Any], burst: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(burst):
        run()
    end.record()
    return begin, end

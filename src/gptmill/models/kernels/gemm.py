"""Large matmuls in the fastest way that NVIDIA's library knows, which is rarely the one that it takes by itself.

It guesses by shapes, for a card that runs at its highest clock. Under a training's load a card is short of power, and
then other ways win: on an H200 by up to a fifth. So they are timed, once for each shape.

M rows, K width that is summed over, N columns.
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
    FORMATS,
    MAX_ALGORITHMS,
    WORKSPACE_BYTES,
    Algorithm,
    Epilogue,
    Matmul,
    Matrix,
    Numbers,
    Plan,
    find_version,
    has_library,
)

LEAST_OPERATIONS = 2e10  # of a matmul that is worth the host's time: 30 µs of an H200
ROUNDS, SHORT_BURST, LONG_BURST = 7, 1, 4
LONG_MATMUL = 4e11  # operations from which on one is timed by itself
HEAT_SECONDS = 0.2
LEAST_GAIN = 0.01
PLAIN = -1
ALIGNMENT = 256  # bytes that the library's guesses count on
WIDE = (torch.bfloat16, torch.float16)

choices: dict[str, int] = {}
"""The number of the fastest way of each matmul, by its name; PLAIN where none wins. Whoever trains may keep it."""
_plans: dict[tuple[Matmul, torch.device], tuple[Plan, Algorithm] | None] = {}
_is_timing = False


def multiply(
    a_MK: Tensor,
    b_KN: Tensor,
    bias_N: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """`a @ b`, plus a bias; of numbers in fp8 each matrix has a scale, and the result is in bf16."""
    numbers = Numbers(a_MK, b_KN, bias_N, scale_a, scale_b)
    epilogue = Epilogue.NOTHING if bias_N is None else Epilogue.BIAS
    result = tuned_gemm(numbers, epilogue, use_fast_accum=use_fast_accum)
    return gemm_reference(numbers, use_fast_accum=use_fast_accum) if result is None else result


def gemm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` in fp32, of narrower numbers: its sums are not rounded, nor cast in another pass."""
    result = tuned_gemm(
        Numbers(a_MK, b_KN), Epilogue.NOTHING, result=torch.float32, plain=lambda: gemm_fp32_reference(a_MK, b_KN)
    )
    return gemm_fp32_reference(a_MK, b_KN) if result is None else result


def gemm_fp32_reference(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """The twin: rounded, and cast."""
    return multiply(a_MK, b_KN).float()


def gemm_reference(numbers: Numbers, *, use_fast_accum: bool = False) -> Tensor:
    """The twin: PyTorch's."""
    a, b, bias, scale_a, scale_b, _ = numbers
    if scale_a is None or scale_b is None:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum
    )


def tuned_gemm(
    numbers: Numbers,
    epilogue: Epilogue,
    *,
    use_fast_accum: bool = False,
    result: torch.dtype | None = None,
    plain: Callable[[], Any] | None = None,
) -> Tensor | None:
    """None where the library is not to be asked, or knows no way that is faster than the plain one to do the same."""
    if not is_large(numbers.a, numbers.b) or not has_library() or torch.are_deterministic_algorithms_enabled():
        return None
    matmul = describe(numbers, epilogue, use_fast_accum=use_fast_accum, result=result)
    found = None if matmul is None else _find_plan(matmul, numbers, plain)
    return None if found is None else found[0].run(numbers, found[1])


def is_large(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and 2.0 * a.shape[0] * a.shape[1] * b.shape[1] >= LEAST_OPERATIONS


def describe(
    numbers: Numbers, epilogue: Epilogue, *, use_fast_accum: bool = False, result: torch.dtype | None = None
) -> Matmul | None:
    """None for what the library is not asked for. The result is in the format of what is multiplied, or in bf16."""
    a, b, bias, scale_a, _, beside = numbers
    left, right = _describe_matrix(a), _describe_matrix(b)
    if left is None or right is None:
        return None
    result = result or (torch.bfloat16 if scale_a is not None else a.dtype)
    is_known = scale_a is not None or (a.dtype == b.dtype and a.dtype in WIDE)
    fits = all(each is None or _lies_well(each, result) for each in (bias, beside))
    fits = fits and (bias is None or len(bias) == b.shape[1])
    return Matmul(left, right, result, epilogue, scale_a is not None, use_fast_accum) if is_known and fits else None


def _lies_well(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _describe_matrix(matrix: Tensor) -> Matrix | None:
    down, right = matrix.stride()
    is_transposed = right != 1
    if (is_transposed and down != 1) or matrix.data_ptr() % ALIGNMENT or matrix.dtype not in FORMATS:
        return None
    rows, columns = matrix.shape
    return Matrix(rows, columns, right if is_transposed else down, is_transposed, matrix.dtype)


@contextmanager
def autotune_gemms() -> Iterator[None]:
    """Within it, matmuls whose fastest way is not known are timed; elsewhere the library's guess is taken."""
    global _is_timing
    _is_timing = True
    _plans.clear()  # of guesses
    try:
        yield
    finally:
        _is_timing = False


def _find_plan(matmul: Matmul, numbers: Numbers, plain: Callable[[], Any] | None) -> tuple[Plan, Algorithm] | None:
    key = (matmul, numbers.a.device)
    if key not in _plans:
        _plans[key] = None
        with suppress(RuntimeError):  # what the library refuses is left to torch
            plan, name = Plan(matmul, numbers), name_gemm(*key)
            can_time = _is_timing and not torch.cuda.is_current_stream_capturing()
            if name not in choices and can_time:
                choices[name] = _find_fastest(plan, numbers, plain)
            number = choices.get(name, 0)
            if 0 <= number < len(plan.algorithms):
                _plans[key] = plan, plan.algorithms[number]
    return _plans[key]


def name_gemm(matmul: Matmul, device: torch.device) -> str:
    """With all that its fastest way depends on."""
    library = f"cuBLASLt {find_version()}, {MAX_ALGORITHMS} ways in {WORKSPACE_BYTES} bytes"
    return f"{torch.cuda.get_device_name(device)}, {library}: {matmul.name}"


def _find_fastest(plan: Plan, numbers: Numbers, plain: Callable[[], Any] | None) -> int:
    """Its number; all take turns, since a card's clock goes up and down. PLAIN where no way works."""
    (rows, depth), columns = numbers.a.shape, numbers.b.shape[1]
    burst = SHORT_BURST if 2.0 * rows * depth * columns > LONG_MATMUL else LONG_BURST
    numbered = [(number, partial(plan.run, numbers, way)) for number, way in enumerate(plan.algorithms)]
    numbered = [(number, run) for number, run in numbered if _works(run)]
    if not numbered:
        return PLAIN
    runs: list[Callable[[], Any]] = [run for _, run in numbered] + ([] if plain is None else [plain])
    _warm_up(runs)
    times = [[_start_timing(run, burst) for run in runs] for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    medians = [statistics.median(begin.elapsed_time(end) for begin, end in turns) for turns in zip(*times, strict=True)]
    best = min(range(len(medians)), key=medians.__getitem__)
    if best == len(numbered):
        return PLAIN
    return numbered[best if medians[best] < (1 - LEAST_GAIN) * medians[0] else 0][0]


def _works(run: Callable[[], Any]) -> bool:
    try:
        run()
    except RuntimeError:
        return False
    return True


def _warm_up(runs: Sequence[Callable[[], Any]]) -> None:
    """Keeps a card busy until it is as short of power as it will be in a training."""
    started = time.perf_counter()
    while time.perf_counter() - started < HEAT_SECONDS:
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

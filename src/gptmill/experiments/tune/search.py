"""The order of the trials, and which one is best. Does not know how a setting is measured.

Micro-batch sizes come first, from a small one upward: throughput, not memory, decides where to stop. Compile modes
follow, and on a CPU precision and threads; if one of these is faster, larger micro-batches are tried once more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from gptmill.config.run import CompileMode, PrecisionName

MIN_GAIN = 0.01  # less is measurement noise
PATIENCE = 2  # sizes in a row without a gain; the first may be noise
START_FACTOR = 4  # how much smaller than the recipe's size the first one is
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
MODES: tuple[CompileMode | None, ...] = (None, "default")
MODES_ON_CUDA: tuple[CompileMode | None, ...] = (*MODES, "reduce-overhead", "max-autotune-no-cudagraphs")
CPU = re.compile(r"CPU, (\d+) threads")


@dataclass(frozen=True)
class Setting:
    """The settings of a trial."""

    mini_batch_size: int
    compile_mode: CompileMode | None
    """None disables torch.compile."""
    precision: PrecisionName | None = None
    """None keeps the recipe's."""
    threads: int | None = None
    """None keeps torch's default."""

    def describe(self) -> str:
        compiled = "not compiled" if self.compile_mode is None else f"compiled: {self.compile_mode}"
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        return ", ".join(filter(None, [f"mini_batch_size {self.mini_batch_size}", compiled, self.precision, threads]))


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial; no throughput if it failed."""

    setting: Setting
    tokens_per_second: float = 0.0
    mfu: float | None = None
    memory_gb: float = 0.0
    device: str = ""
    note: str = ""
    is_out_of_memory: bool = False

    @property
    def has_succeeded(self) -> bool:
        return self.tokens_per_second > 0


@dataclass(frozen=True)
class SearchSpace:
    """What may be tried."""

    sizes: tuple[int, ...]
    """Every mini_batch_size that divides the batch size, in order."""
    initial: Setting
    """The recipe's setting, where the search starts."""
    tries_compile_modes: bool = True
    tries_precision: bool = False
    tries_threads: bool = False
    max_trials: int | None = None


class BudgetExhaustedError(Exception):
    """The limit on the number of trials or on the time is reached."""


Measure = Callable[[Setting, int], TrialResult]
"""Measures a setting, given the maximum number of trials that may follow."""


class Search:
    """The results so far, and what to try next."""

    def __init__(self, space: SearchSpace, measure: Measure) -> None:
        self.results: list[TrialResult] = []
        self._space = space
        self._measure = measure
        self._ladder = make_ladder(space.sizes)
        self._later = 0
        """Maximum number of trials after those of the sizes."""

    @property
    def best(self) -> TrialResult | None:
        """The cheapest setting, by `_rank`, within MIN_GAIN of the fastest."""
        successes = [result for result in self.results if result.has_succeeded]
        if not successes:
            return None
        threshold = max(result.tokens_per_second for result in successes) * (1 - MIN_GAIN)
        return min((result for result in successes if result.tokens_per_second >= threshold), key=_rank)

    def run(self) -> bool:
        """Runs the search; returns False if the budget was exhausted first."""
        try:
            self._search()
        except BudgetExhaustedError:
            return False
        return True

    def _search(self) -> None:
        space, initial = self._space, self._space.initial
        self._later = len(MODES_ON_CUDA) * space.tries_compile_modes + space.tries_precision
        self._find_size(initial)
        if self.best is None and space.tries_compile_modes and initial.compile_mode is not None:
            self._find_size(replace(initial, compile_mode=None))
        if self.best is None:
            return
        self._later = 0
        found, device = self.best.setting, self.best.device
        if space.tries_compile_modes:
            modes = MODES_ON_CUDA if "(cuda" in device else MODES
            self._try_each([replace(found, compile_mode=mode) for mode in modes])
        cpu = CPU.match(device)
        if cpu and space.tries_precision:
            self._try_each([replace(self.best.setting, precision="bf16")])
        if cpu and space.tries_threads:
            fewer = sorted({int(cpu[1]) // 2, 1} - {0, int(cpu[1])}, reverse=True)
            self._try_each([replace(self.best.setting, threads=number) for number in fewer])
        if self.best.setting != found:  # a faster setting may gain more from a larger micro-batch
            self._climb(self.best.setting, patience=1)

    def _find_size(self, base: Setting) -> None:
        """Goes down from the first size until one fits, up while that gains, then down while nothing is lost."""
        largest = max(base.mini_batch_size // START_FACTOR, self._ladder[0])
        rungs = [rung for rung in self._ladder if rung <= largest]
        size = rungs.pop()
        result = self._try(replace(base, mini_batch_size=size), len(self._ladder))
        while result.is_out_of_memory and rungs:
            size = rungs.pop()
            result = self._try(replace(base, mini_batch_size=size), len(rungs))
        if not result.has_succeeded:
            return
        self._climb(result.setting, PATIENCE)
        while rungs and self.best is not None and self.best.setting.mini_batch_size == size:
            size = rungs.pop()
            self._try(replace(base, mini_batch_size=size), len(rungs))

    def _climb(self, base: Setting, patience: int) -> None:
        fits, misses = base.mini_batch_size, 0
        above = [rung for rung in self._ladder if rung > fits]
        for left, size in zip(reversed(range(len(above))), above, strict=True):
            best = self._find_best_speed()
            result = self._try(replace(base, mini_batch_size=size), left)
            if result.is_out_of_memory:
                self._bisect(base, fits, size)
                return
            misses = 0 if result.tokens_per_second > best * (1 + MIN_GAIN) else misses + 1
            if misses == patience:
                return
            fits = size

    def _bisect(self, base: Setting, fits: int, too_large: int) -> None:
        """Tries the divisors in between, while that gains."""
        while between := [size for size in self._space.sizes if fits < size < too_large]:
            size, best = between[len(between) // 2], self._find_best_speed()
            result = self._try(replace(base, mini_batch_size=size), len(between) // 2)
            if result.is_out_of_memory:
                too_large = size
            elif result.tokens_per_second > best * (1 + MIN_GAIN):
                fits = size
            else:
                return

    def _try_each(self, settings: list[Setting]) -> None:
        for left, setting in zip(reversed(range(len(settings))), settings, strict=True):
            self._try(setting, left)

    def _try(self, setting: Setting, left: int) -> TrialResult:
        """Measures a setting, unless there is a result for it."""
        for known in self.results:
            if known.setting == setting:
                return known
        limit = self._space.max_trials
        if limit is not None and len(self.results) >= limit:
            raise BudgetExhaustedError
        left += self._later
        result = self._measure(setting, left if limit is None else min(left, limit - len(self.results) - 1))
        self.results.append(result)
        return result

    def _find_best_speed(self) -> float:
        return max((result.tokens_per_second for result in self.results), default=0.0)


def make_ladder(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns some of the sizes, each at least twice the previous one."""
    ladder = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * ladder[-1]:
            ladder.append(size)
    return tuple(ladder)


def list_divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors, in order."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))


def _rank(result: TrialResult) -> tuple[int, int, bool, float]:
    """Returns a sort key by cost: memory, compile time, lower precision, threads."""
    setting = result.setting
    mode = 0 if setting.compile_mode is None else 1 + COMPILE_MODES.index(setting.compile_mode)
    return setting.mini_batch_size, mode, setting.precision is not None, setting.threads or math.inf

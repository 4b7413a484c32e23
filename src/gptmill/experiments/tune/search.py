"""The order in which settings are tried for speed, and which of them is best. Knows nothing of how one is measured.

Batches come first, from a small one upward: speed, not memory, says where to end. Then what compiles the model, and
on a CPU rounding and threads; and where one of these has won, larger batches once more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from gptmill.config.run import CompileMode, PrecisionName

GAIN = 0.01  # less is within what two measurements of the same thing differ by
PATIENCE = 2  # sizes in a row without a gain, the first of which may be noise
START_BELOW = 4  # times smaller than the recipe's own batch
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
MODES: tuple[CompileMode | None, ...] = (None, "default")
MODES_ON_CUDA: tuple[CompileMode | None, ...] = (*MODES, "reduce-overhead", "max-autotune-no-cudagraphs")
CPU = re.compile(r"CPU, (\d+) threads")


@dataclass(frozen=True)
class Setting:
    """What a trial runs with."""

    mini_batch_size: int
    compile_mode: CompileMode | None
    """None does not compile."""
    precision: PrecisionName | None = None
    """None is the recipe's own."""
    threads: int | None = None
    """None is torch's own choice."""

    def describe(self) -> str:
        compiled = "not compiled" if self.compile_mode is None else f"compiled: {self.compile_mode}"
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        return ", ".join(filter(None, [f"mini_batch_size {self.mini_batch_size}", compiled, self.precision, threads]))


@dataclass(frozen=True)
class Result:
    """What came out of a trial; no speed where it failed."""

    setting: Setting
    tokens_per_second: float = 0.0
    mfu: float | None = None
    memory_gb: float = 0.0
    device: str = ""
    note: str = ""
    ran_out: bool = False
    """Whether it failed for want of memory."""

    @property
    def is_sound(self) -> bool:
        return self.tokens_per_second > 0


@dataclass(frozen=True)
class Scope:
    """What may be tried."""

    sizes: tuple[int, ...]
    """Every mini_batch_size that divides the batch, in order."""
    own: Setting
    """The recipe's own, where the search begins."""
    tries_modes: bool = True
    tries_precision: bool = False
    tries_threads: bool = False
    max_trials: int | None = None


class EnoughError(Exception):
    """No more trials: their number or the time is up."""


Measure = Callable[[Setting, int], Result]
"""Measures a setting, given how many trials may follow at most."""


class Search:
    """The trials so far, and what to try next."""

    def __init__(self, scope: Scope, measure: Measure) -> None:
        self.results: list[Result] = []
        self._scope = scope
        self._measure = measure
        self._ladder = make_ladder(scope.sizes)
        self._later = 0
        """Trials, at most, of what comes after the batches."""

    @property
    def best(self) -> Result | None:
        """The fastest; of those within a hundredth of it, the one that asks for least."""
        sound = [result for result in self.results if result.is_sound]
        if not sound:
            return None
        enough = max(result.tokens_per_second for result in sound) * (1 - GAIN)
        return min((result for result in sound if result.tokens_per_second >= enough), key=_rank)

    def run(self) -> bool:
        """Tries until all is known, or until it is enough: then it returns False."""
        try:
            self._search()
        except EnoughError:
            return False
        return True

    def _search(self) -> None:
        scope, own = self._scope, self._scope.own
        self._later = len(MODES_ON_CUDA) * scope.tries_modes + scope.tries_precision
        self._find_size(own)
        if self.best is None and scope.tries_modes and own.compile_mode is not None:
            self._find_size(replace(own, compile_mode=None))
        if self.best is None:
            return
        self._later = 0
        found, device = self.best.setting, self.best.device
        if scope.tries_modes:
            modes = MODES_ON_CUDA if "(cuda" in device else MODES
            self._try_each([replace(found, compile_mode=mode) for mode in modes])
        cpu = CPU.match(device)
        if cpu and scope.tries_precision:
            self._try_each([replace(self.best.setting, precision="bf16")])
        if cpu and scope.tries_threads:
            fewer = sorted({int(cpu[1]) // 2, 1} - {0, int(cpu[1])}, reverse=True)
            self._try_each([replace(self.best.setting, threads=number) for number in fewer])
        if self.best.setting != found:  # what is faster by itself may gain more from a larger batch
            self._climb(self.best.setting, patience=1)

    def _find_size(self, base: Setting) -> None:
        """Down from the first size until one fits, up while that gains, and down again while nothing is lost by it."""
        wanted = max(base.mini_batch_size // START_BELOW, self._ladder[0])
        rungs = [rung for rung in self._ladder if rung <= wanted]
        size = rungs.pop()
        result = self._try(replace(base, mini_batch_size=size), len(self._ladder))
        while result.ran_out and rungs:
            size = rungs.pop()
            result = self._try(replace(base, mini_batch_size=size), len(rungs))
        if not result.is_sound:
            return
        self._climb(result.setting, PATIENCE)
        while rungs and self.best is not None and self.best.setting.mini_batch_size == size:
            size = rungs.pop()
            self._try(replace(base, mini_batch_size=size), len(rungs))

    def _climb(self, base: Setting, patience: int) -> None:
        fits, misses = base.mini_batch_size, 0
        above = [rung for rung in self._ladder if rung > fits]
        for left, size in zip(reversed(range(len(above))), above, strict=True):
            top = self._find_top()
            result = self._try(replace(base, mini_batch_size=size), left)
            if result.ran_out:
                self._close_in(base, fits, size)
                return
            misses = 0 if result.tokens_per_second > top * (1 + GAIN) else misses + 1
            if misses == patience:
                return
            fits = size

    def _close_in(self, base: Setting, fits: int, too_large: int) -> None:
        """Tries what lies between, where the batch has divisors there, for as long as that gains."""
        while between := [size for size in self._scope.sizes if fits < size < too_large]:
            size, top = between[len(between) // 2], self._find_top()
            result = self._try(replace(base, mini_batch_size=size), len(between) // 2)
            if result.ran_out:
                too_large = size
            elif result.tokens_per_second > top * (1 + GAIN):
                fits = size
            else:
                return

    def _try_each(self, settings: list[Setting]) -> None:
        for left, setting in zip(reversed(range(len(settings))), settings, strict=True):
            self._try(setting, left)

    def _try(self, setting: Setting, left: int) -> Result:
        """Measures it, unless that was done before."""
        for known in self.results:
            if known.setting == setting:
                return known
        limit = self._scope.max_trials
        if limit is not None and len(self.results) >= limit:
            raise EnoughError
        left += self._later
        result = self._measure(setting, left if limit is None else min(left, limit - len(self.results) - 1))
        self.results.append(result)
        return result

    def _find_top(self) -> float:
        return max((result.tokens_per_second for result in self.results), default=0.0)


def make_ladder(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Some of the sizes, each at least twice the one before."""
    ladder = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * ladder[-1]:
            ladder.append(size)
    return tuple(ladder)


def list_divisors(number: int) -> tuple[int, ...]:
    """All of them, in order."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))


def _rank(result: Result) -> tuple[int, int, bool, float]:
    """What a setting asks for: memory, time to compile, coarser rounding, threads."""
    setting = result.setting
    mode = 0 if setting.compile_mode is None else 1 + COMPILE_MODES.index(setting.compile_mode)
    return setting.mini_batch_size, mode, setting.precision is not None, setting.threads or math.inf

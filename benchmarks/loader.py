"""Throughput of the data loader on memory-mapped shards in shuffled order, and memory use with a huge corpus.

    python benchmarks/loader.py [SCRATCH]

Throughput: batches of 64 windows in training order over 20 shards of 10 M tokens in the page cache, on one thread.
Memory: windows from all over a sparse shard of a billion windows. Mapped file pages count as resident but can be
reclaimed by the kernel, so the anonymous memory of the process (RssAnon) is printed too.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from gptmill.data.batches.batch import make_batch
from gptmill.data.batches.mixture_weights import MixtureWeights
from gptmill.data.batches.order import Shuffle
from gptmill.data.batches.row_reader import HostReader
from gptmill.data.batches.samplers import WindowSampler
from gptmill.data.shards.arrays import HEADER_BYTES, MappedArrays, MapPool, find_array
from gptmill.data.shards.opening import SplitWindows

NUM_SHARDS, SHARD_TOKENS = 20, 10_000_000
VOCAB_SIZE = 50_257
BATCH = 64
SEED = 42
MEASURED_SECONDS = 3.0
HUGE_WINDOWS, HUGE_CONTEXT = 1_000_000_000, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", nargs="?", help="folder for temporary files (default: the system's)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        measure_speed(Path(folder))
        measure_memory(Path(folder))


def make_reading(arrays: MappedArrays, context_length: int) -> tuple[WindowSampler, HostReader]:
    """Returns the sampler and the reader that training uses for a single corpus."""
    windows = SplitWindows(arrays, context_length)
    sampler = WindowSampler([windows], [Shuffle(windows.num_windows, SEED)], MixtureWeights((Fraction(1),)), BATCH)
    return sampler, HostReader([arrays], 0, VOCAB_SIZE)


def measure_speed(folder: Path) -> None:
    arrays = make_shards(folder)
    print(f"{NUM_SHARDS} shards of {SHARD_TOKENS:,} tokens, batches of {BATCH} windows, shuffled")
    for context_length in (256, 1024):
        sampler, reader = make_reading(arrays, context_length)
        steps: dict[str, Callable[[int], object]] = {
            "indices": lambda number: sampler.find(number * BATCH),  # noqa: B023
            "rows": lambda number: reader.read(sampler.find(number * BATCH)),  # noqa: B023
            "batches": lambda number: make_batch(reader.read(sampler.find(number * BATCH)), -100),  # noqa: B023
        }
        for name, step in steps.items():
            speed = BATCH * context_length * count_per_second(step)
            print(f"context {context_length:>5}  {name:<8} {speed / 1e6:>8.1f} M tokens/s")


def make_shards(folder: Path) -> MappedArrays:
    generator = np.random.default_rng(SEED)
    files = []
    for number in range(NUM_SHARDS):
        path = folder / f"train_{number:06d}.npy"
        np.save(path, generator.integers(0, VOCAB_SIZE, SHARD_TOKENS, dtype=np.uint16))
        files.append(find_array(path))
    return MappedArrays(files, MapPool())


def count_per_second(step: Callable[[int], object]) -> float:
    """Returns calls per second, after a second of warm-up that fills the page cache."""
    done, started, warm_until = 0, time.perf_counter(), 1.0
    while (elapsed := time.perf_counter() - started) < warm_until + MEASURED_SECONDS:
        done = done + 1 if elapsed > warm_until else 0
        step(done)
    return done / MEASURED_SECONDS


def measure_memory(folder: Path) -> None:
    path = folder / "huge.npy"
    tokens = HUGE_WINDOWS * HUGE_CONTEXT + 1
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (tokens,)})
        file.truncate(HEADER_BYTES + 2 * tokens)
    sampler, reader = make_reading(MappedArrays([find_array(path)], MapPool()), HUGE_CONTEXT)
    size = f"{2 * tokens / 1e9:.0f} GB"
    print(f"\n{sampler.samples_per_epoch:,} windows of {HUGE_CONTEXT} tokens in a sparse file of {size}")
    for batches in (0, 1, 1000, 2000):
        for number in range(batches):
            reader.read(sampler.find(number * 1_000_003))
        print(f"after {batches * BATCH:>7,} windows: {describe_memory()}")


def describe_memory() -> str:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return ", ".join(
        f"{name} {int(kilobytes) / 1e3:,.0f} MB" for name, kilobytes in re.findall(r"(VmRSS|RssAnon):\s+(\d+)", status)
    )


if __name__ == "__main__":
    main()

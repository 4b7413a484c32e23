"""Which ways to multiply were the fastest on this machine, kept for the next process: to time them takes seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptmill.config.json_text import read_json
from gptmill.data.files import find_cache_dir
from gptmill.models.kernels.gemm import USE_TORCH, autotune_gemms, autotuned
from gptmill.runtime.world import World

FILE_NAME = "matmuls.json"


@contextmanager
def autotune_run_gemms(world: World) -> Iterator[None]:
    """Matmuls that run within it are timed, where nobody has done so before."""
    if world.device.type != "cuda":
        yield
        return
    path = find_file()
    autotuned.update({} if path is None else read_autotuned(path))
    known = dict(autotuned)
    with autotune_gemms():
        yield
    if path is not None and autotuned != known and world.is_main:
        with suppress(OSError):  # a place that cannot be written to: then they are timed again
            write_autotuned(path)


def find_file() -> Path | None:
    """None for a user who has no home."""
    try:
        return find_cache_dir() / FILE_NAME
    except RuntimeError:
        return None


def read_autotuned(path: Path) -> dict[str, int]:
    """None where there are none; a file that is broken counts as none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: number for name, number in entries if type(number) is int and number >= USE_TORCH}


def write_autotuned(path: Path) -> None:
    """Adds those of this process to what other processes have written meanwhile, and use already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**autotuned, **read_autotuned(path)}, indent=0, sort_keys=True), encoding="utf-8")
    partial.replace(path)

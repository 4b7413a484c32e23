"""What a measurement depends on besides the recipe: GPU clocks, the compile cache, and the commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import gptmill

CLOCK_FIELDS = {
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}
NUMBER = re.compile(r"\s*\d+(\.\d+)?\s*")
TOOL_SECONDS = 20.0


def read_clocks() -> dict[str, float]:
    """Returns the current clocks of the first GPU from nvidia-smi; empty without it. Unknown fields are omitted."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    output = _run(
        tool, f"--id={first}", f"--query-gpu={','.join(CLOCK_FIELDS.values())}", "--format=csv,noheader,nounits"
    )
    values = dict(zip(CLOCK_FIELDS, output.split(","), strict=False))
    return {name: float(value) for name, value in values.items() if NUMBER.fullmatch(value)}


def count_compiled_graphs() -> int:
    """Counts the graphs in torch.compile's cache on disk: if none is added, every compilation was a cache hit."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # which imports the compiler, for seconds

    return sum(1 for _ in Path(cache_dir()).glob("fxgraph/*/*"))


def find_commit() -> str:
    """Returns the commit of gptmill's checkout; empty if it is not in one."""
    folder, git = Path(gptmill.__file__).parent, shutil.which("git")
    if git is None or not _run(git, "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"):
        return ""
    return _run(git, "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


def _run(*command: str) -> str:
    """Returns the output of a program; empty if it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""

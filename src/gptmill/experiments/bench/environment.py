"""What a figure depends on beside the recipe: the GPU's clocks, the compile cache, and the commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

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
    """What nvidia-smi tells of the first GPU now; empty without it. A field that it does not know is left out."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    said = _ask(
        tool, f"--id={first}", f"--query-gpu={','.join(CLOCK_FIELDS.values())}", "--format=csv,noheader,nounits"
    )
    values = dict(zip(CLOCK_FIELDS, said.split(","), strict=False))
    return {name: float(value) for name, value in values.items() if NUMBER.fullmatch(value)}


def count_compiled_graphs() -> int:
    """Graphs in torch.compile's cache on the disk: where none is added, all that was compiled came from there."""
    return sum(1 for _ in Path(cache_dir()).glob("fxgraph/*/*"))


def find_commit() -> str:
    """The commit of gptmill's own checkout; empty where it is not one."""
    folder, git = Path(gptmill.__file__).parent, shutil.which("git")
    if git is None or not _ask(git, "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"):
        return ""
    return _ask(git, "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


def _ask(*command: str) -> str:
    """What a program says; empty where it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""

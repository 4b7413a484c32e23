"""What torch.compile and Triton need of the machine besides torch: a compiler, Python's headers and a cache folder.

Does not import torch.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

INSTALL_COMPILER = "sudo apt install g++ (Fedora: sudo dnf install gcc-c++; conda: conda install -c conda-forge gxx)"


@dataclass(frozen=True)
class Obstacle:
    """Why nothing can be compiled here, and the line that changes that."""

    what: str
    fix: str


def find_obstacle(device_type: str) -> Obstacle | None:
    """What keeps torch.compile from compiling for this type of device; None if everything is in place."""
    if os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):  # torch then installs a compiler itself
        return None
    if find_compiler(device_type) is None:
        return Obstacle(f"there is no {_name_compiler(device_type)} on the PATH", INSTALL_COMPILER)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if sys.platform == "linux" and not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Obstacle(f"Python's headers are missing ({header})", f"sudo apt install python{version}-dev")
    folder = find_compile_cache()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Obstacle(f"the compile cache {folder} cannot be written", "export TORCHINDUCTOR_CACHE_DIR=FOLDER")
    return None


def find_compiler(device_type: str) -> str | None:
    """The path of the compiler that Inductor (C++, for a CPU) or Triton (C, for a GPU) would call."""
    candidates = ("gcc", "clang") if device_type == "cuda" else (_name_cpp_compiler(),)
    named = os.environ.get("CC" if device_type == "cuda" else "CXX")
    found = (shutil.which(name.split()[0]) for name in ((named,) if named and named.strip() else candidates))
    return next(filter(None, found), None)


def find_compile_cache() -> Path:
    """The folder of compiled code, chosen as Inductor chooses it."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _name_compiler(device_type: str) -> str:
    variable = "CC" if device_type == "cuda" else "CXX"
    if named := os.environ.get(variable, "").strip():
        return f"{named} ({variable})"
    return "C compiler (gcc or clang)" if device_type == "cuda" else f"C++ compiler ({_name_cpp_compiler()})"


def _name_cpp_compiler() -> str:
    return {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")

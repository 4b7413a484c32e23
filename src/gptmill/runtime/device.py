"""Selects the device; never falls back to a slower one silently."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from gptmill.config.errors import UserError
from gptmill.config.run import DeviceName

NVIDIA_VENDOR = "0x10de"
CHOOSE_CPU = "or add --device cpu to use the CPU on purpose (gptmill train --force-cpu tries a single step there)"


def choose_device(wanted: DeviceName, local_rank: int = 0) -> torch.device:
    """The requested device; raises UserError with the reason and the alternatives if it is not available."""
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        return _choose_gpu(local_rank)
    if wanted in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if wanted in ("auto", "cuda") and (gpus := find_nvidia_gpus()):
        raise UserError(f"{gpus}, but torch cannot use it: {explain_no_cuda()}; fix that, {CHOOSE_CPU}")
    if wanted == "auto":
        return torch.device("cpu")
    missing = f"an NVIDIA GPU, and there is none here ({explain_no_cuda()})" if wanted == "cuda" else "Apple's MPS"
    raise UserError(f"device {wanted} needs {missing}; use a machine that has it, {CHOOSE_CPU}")


def is_cpu(wanted: DeviceName) -> bool:
    """Whether `choose_device` chooses the CPU, or nothing."""
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    return wanted == "cpu" or (wanted == "auto" and not has_gpu)


def find_nvidia_gpus() -> str:
    """Describes the machine's NVIDIA GPUs according to the driver, not to torch; empty if there are none.

    A driver error counts as a GPU: that is what a GPU that has fallen off the bus looks like.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "this machine has an NVIDIA GPU without its driver" if _has_nvidia_hardware() else ""
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"this machine has nvidia-smi, which does not answer ({error})"
    output = " ".join((listing.stdout + listing.stderr).split())
    if listing.returncode != 0 and "No devices were found" not in output:
        return f"this machine has nvidia-smi, which reports {output!r}"
    lines = [line for line in listing.stdout.split("\n") if line.startswith("GPU ")]
    names = [line.partition(":")[2].partition("(")[0].strip() for line in lines]
    return f"this machine has {', '.join(names)}" if names else ""


def _has_nvidia_hardware() -> bool:
    """Whether Linux lists an NVIDIA display device on the PCI bus."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            is_display = (device / "class").read_text().startswith("0x03")
            if is_display and (device / "vendor").read_text().strip() == NVIDIA_VENDOR:
                return True
    return False


def explain_no_cuda() -> str:
    """The most likely reason why torch does not see the GPU."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA (install a CUDA build of torch)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides it (unset the variable)"
    try:
        torch.cuda.init()
    except Exception as error:  # the driver's message is the answer
        return " ".join(str(error).split())
    return "CUDA starts but offers no device (check the driver with nvidia-smi)"


def describe_device(device: torch.device) -> str:
    """The device's name for people."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads > 1)}"
    return f"{device.type.upper()} ({platform.machine()})"


def _choose_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: torch sees {count}; start at most {count} processes here"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device

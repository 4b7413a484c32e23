"""Judges torch's build, the NVIDIA driver and the GPUs; agrees with runtime.device on which device training uses."""

from __future__ import annotations

import re

from gptmill.experiments.doctor.facts import GpuFacts, MachineFacts
from gptmill.experiments.doctor.finding import Finding

GROUP = "GPU"
WHEELS = "pip install --force-reinstall torch --index-url with the wheels of https://pytorch.org/get-started for CUDA "
# PyTorch publishes wheels for these two with every release from 2.9 on. A driver runs every minor version of its CUDA.
OLD_WHEEL, NEW_WHEEL = "12.6", "13.0"
LEAST_DRIVERS = {12: "525.60", 13: "580.65"}  # for any minor version, by NVIDIA's CUDA compatibility table
FIRST_BLACKWELL, FIRST_TURING = (10, 0), (7, 5)  # the old wheel has no Blackwell, the new one nothing before Turing
LEAST_TORCH = (2, 9)
LEAST_FREE = 0.8  # a display, and the doctor's other processes, take some
UPDATE_DRIVER = "sudo apt install nvidia-driver-580 and reboot"


def judge_torch(facts: MachineFacts) -> Finding:
    """Its version and build."""
    build = f"CUDA {facts.cuda_build}" if facts.cuda_build else f"ROCm {facts.hip_build}" if facts.hip_build else "CPU"
    what = f"{facts.torch}, built for {build}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", facts.torch)[:2])
    if numbers < LEAST_TORCH:
        return Finding("software", "torch", "failed", what, "gptmill needs torch 2.9 or newer", "pip install -U torch")
    if facts.nvidia_gpus and not facts.cuda_build and not facts.hip_build:
        meaning = f"{facts.nvidia_gpus}, which this build cannot use"
        return Finding("software", "torch", "failed", what, meaning, choose_wheel(facts.driver_cuda))
    return Finding("software", "torch", "ok", what)


def judge_driver(facts: MachineFacts) -> Finding:
    """Whether the driver runs, and is new enough for torch's CUDA."""
    if facts.hip_build:
        return Finding(GROUP, "driver", "skipped", "ROCm: not checked")
    if not facts.nvidia_gpus and not facts.driver:
        return Finding(GROUP, "driver", "skipped", "no NVIDIA GPU here")
    if "mismatch" in facts.driver_error.lower():
        meaning = "the driver was updated, and the old one still runs in the kernel"
        return Finding(GROUP, "driver", "failed", facts.driver_error, meaning, "sudo reboot")
    if not facts.driver:
        what = f"{facts.nvidia_gpus}, but the driver does not answer ({facts.driver_error})"
        return Finding(GROUP, "driver", "failed", what, "torch cannot use the GPU", UPDATE_DRIVER)
    newest = "an unknown CUDA" if facts.driver_cuda is None else f"CUDA {facts.driver_cuda[0]}.{facts.driver_cuda[1]}"
    what = f"{facts.driver}, for up to {newest}"
    major = int(facts.cuda_build.split(".")[0]) if facts.cuda_build else 0
    if facts.driver_cuda is not None and facts.driver_cuda[0] < major:
        meaning = f"too old for torch's CUDA {facts.cuda_build}, which needs driver {LEAST_DRIVERS.get(major, 'newer')}"
        return Finding(GROUP, "driver", "failed", what, meaning, choose_wheel(facts.driver_cuda))
    return Finding(GROUP, "driver", "ok", what)


def choose_wheel(driver_cuda: tuple[int, int] | None, capability: tuple[int, int] | None = None) -> str:
    """The line that installs a build of torch for the driver and the GPU; where none fits, the one for a new driver."""
    if driver_cuda is None:
        return "pip install --force-reinstall torch"
    if capability is not None and capability < FIRST_TURING:
        return WHEELS + OLD_WHEEL
    if driver_cuda >= (13, 0):
        return WHEELS + NEW_WHEEL
    is_blackwell = capability is not None and capability >= FIRST_BLACKWELL
    return WHEELS + OLD_WHEEL if driver_cuda[0] == 12 and not is_blackwell else UPDATE_DRIVER


def judge_device(facts: MachineFacts) -> Finding:
    """What `gptmill train` would do with --device auto."""
    if not facts.device:
        return Finding(GROUP, "device", "failed", facts.refusal, "gptmill train refuses to start", "see above")
    if facts.device == "cpu":
        meaning = "enough for small models; the recipes for 124M and more are for a GPU"
        return Finding(GROUP, "device", "ok", "cpu: there is no GPU that torch could use", meaning)
    return Finding(GROUP, "device", "ok", f"training uses {facts.device}")


def judge_gpus(facts: MachineFacts) -> list[Finding]:
    """Each GPU: its generation, whether torch has kernels for it, and who else uses its memory."""
    return [finding for index, gpu in enumerate(facts.gpus) for finding in _judge_gpu(facts, index, gpu)]


def _judge_gpu(facts: MachineFacts, index: int, gpu: GpuFacts) -> list[Finding]:
    number = f"{gpu.capability[0]}.{gpu.capability[1]}"
    what, name = f"{gpu.name}, {gpu.total_bytes / 1e9:,.0f} GB, capability {number}", f"GPU {index}"
    if gpu.error:
        fix = "CUDA_VISIBLE_DEVICES with the other GPUs, or a reset: sudo nvidia-smi --gpu-reset"
        return [Finding(GROUP, name, "failed", what, gpu.error, fix)]
    if facts.architectures and not is_supported(gpu.capability, facts.architectures):
        meaning = f"torch {facts.torch} has no kernels for it (it has {', '.join(facts.architectures)})"
        return [Finding(GROUP, name, "failed", what, meaning, choose_wheel(facts.driver_cuda, gpu.capability))]
    if gpu.capability < (8, 0) and not facts.hip_build:
        meaning = "no bf16, no flash attention, no fused kernels: training uses fp16"
        return [Finding(GROUP, name, "warning", what, meaning), _judge_memory(facts, index, gpu)]
    return [Finding(GROUP, name, "ok", what), _judge_memory(facts, index, gpu)]


def _judge_memory(facts: MachineFacts, index: int, gpu: GpuFacts) -> Finding:
    what, name = f"{gpu.free_bytes / 1e9:,.1f} of {gpu.total_bytes / 1e9:,.1f} GB free", f"GPU {index} memory"
    if gpu.free_bytes >= LEAST_FREE * gpu.total_bytes:
        return Finding(GROUP, name, "ok", what)
    users = [
        f"process {process} ({size / 1e9:,.1f} GB)" for gpu_index, process, size in facts.others if gpu_index == index
    ]
    meaning = f"others use it: {', '.join(users) or 'a process that this one cannot see'}"
    return Finding(GROUP, name, "warning", what, meaning, "end them, or choose another GPU with CUDA_VISIBLE_DEVICES")


def is_supported(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether kernels of these architectures run: of the same major version and no newer, or as older PTX."""
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture)
        if match is None:
            return True  # unknown names, as of ROCm: nothing to say
        built = int(match[2]), int(match[3])
        if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
            return True
    return False

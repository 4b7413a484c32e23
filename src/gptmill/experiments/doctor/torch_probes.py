"""Probes that need torch but no GPU: facts of the machine, handshakes between processes, and a compiled function.

They run in a child process; what they raise is their result.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptmill.config.errors import UserError
from gptmill.experiments.doctor.facts import GpuFacts, MachineFacts
from gptmill.runtime.compiling import list_compile_options
from gptmill.runtime.device import choose_device, explain_no_cuda, find_nvidia_gpus
from gptmill.runtime.memory import read_host_memory
from gptmill.runtime.world import GLOO_DRAIN_SECONDS

HANDSHAKE_SECONDS = 30
LIMIT = 1e-5  # of a compiled function in fp32, relative


def read_facts() -> dict[str, Any]:
    """`MachineFacts` as JSON can hold them."""
    device, refusal = "", ""
    try:
        device = str(choose_device("auto"))
    except UserError as error:
        refusal = str(error)
    has_cuda = torch.cuda.is_available()
    gpus = tuple(map(_read_gpu, range(torch.cuda.device_count()))) if has_cuda else ()
    driver, driver_cuda, driver_error, others = _read_driver()
    facts = MachineFacts(
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        hip_build=torch.version.hip,
        architectures=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        gpus=gpus,
        no_cuda="" if has_cuda else explain_no_cuda(),
        nvidia_gpus=find_nvidia_gpus(),
        driver=driver,
        driver_cuda=driver_cuda,
        driver_error=driver_error,
        device=device,
        refusal=refusal,
        threads=torch.get_num_threads(),
        host_bytes=read_host_memory(),
        others=others,
    )
    return asdict(facts)


def _read_gpu(index: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    facts = GpuFacts(properties.name, torch.cuda.get_device_capability(index), properties.total_memory, 0)
    try:  # needs a context: it fails on a GPU that is broken or reserved
        return replace(facts, free_bytes=torch.cuda.mem_get_info(index)[0])
    except RuntimeError as error:
        return replace(facts, error=" ".join(str(error).split()))


def _read_driver() -> tuple[str, tuple[int, int] | None, str, tuple[tuple[int, int, int], ...]]:
    """The driver's version, the newest CUDA it supports, why it does not answer, and the processes on the GPUs."""
    try:
        import pynvml
    except ImportError:
        return "", None, "nvidia-ml-py is not installed", ()
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError as error:
        return "", None, str(error), ()
    others = []
    for index in range(torch.cuda.device_count()):
        # By UUID: the driver numbers all GPUs, torch only those that it is shown. Not every container tells.
        with suppress(pynvml.NVMLError, AttributeError):
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            others += [
                (index, int(each.pid), int(each.usedGpuMemory or 0)) for each in running if each.pid != os.getpid()
            ]
    pynvml.nvmlShutdown()
    return version, (number // 1000, number % 1000 // 10), "", tuple(others)


def shake_hands(backend: str, ranks: int) -> float:
    """Lets so many processes add up a tensor; returns the seconds that took. Forks: call it before CUDA is used."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    can_fork = hasattr(os, "fork")
    context = multiprocessing.get_context("fork") if can_fork else multiprocessing.get_context("spawn")
    started, children = time.monotonic(), []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_join, args=(backend, rank, ranks, port, sender), daemon=True)
        process.start()
        sender.close()
        children.append((process, receiver))
    for rank, (process, receiver) in enumerate(children):
        answer = "it ended without an answer"
        with suppress(EOFError):
            answer = receiver.recv() if receiver.poll(HANDSHAKE_SECONDS) else f"no answer in {HANDSHAKE_SECONDS} s"
        if answer:
            raise RuntimeError(f"rank {rank} of {ranks}: {answer}")
        process.join(HANDSHAKE_SECONDS)
    return time.monotonic() - started


def _join(backend: str, rank: int, ranks: int, port: int, sender: Connection) -> None:
    """One rank: sends an empty text if the sum is right, or what went wrong."""
    try:
        on_gpu = backend == "nccl"
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        limit = timedelta(seconds=HANDSHAKE_SECONDS)
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=limit,
            device_id=device if on_gpu else None,
        )  # fmt: skip
        tensor = torch.full((1024,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        total, expected = float(tensor[-1]), ranks * (ranks + 1) / 2
        if not on_gpu:
            time.sleep(GLOO_DRAIN_SECONDS)
        dist.destroy_process_group()
        sender.send("" if total == expected else f"the sum is {total}, not {expected}")
    except Exception as error:  # the rank's answer
        sender.send(f"{type(error).__name__}: {error}")


def compile_function(cache: str) -> float:
    """Compiles a function for the device that training would use, into this empty cache; returns the seconds."""
    Path(cache).mkdir(parents=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TRITON_CACHE_DIR"] = str(Path(cache) / "triton")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    started = time.monotonic()
    x = torch.linspace(-1, 1, 64, device=choose_device("auto"))
    # Without a test compilation for each of the CPU's instruction sets, which take longer than all the rest.
    options = {**list_compile_options(), "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch.no_grad():
        compiled = torch.compile(_sum_of_sines, options=options)(x)
    error = float((compiled - _sum_of_sines(x)).abs() / _sum_of_sines(x).abs())
    if not error <= LIMIT:
        raise RuntimeError(f"the compiled function differs from the eager one by {error:.1e}")
    return time.monotonic() - started


def _sum_of_sines(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()

"""Which probes run on which device, and what their results mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gptmill.experiments.doctor.facts import GpuFacts, MachineFacts
from gptmill.experiments.doctor.finding import Finding, State
from gptmill.experiments.doctor.probe_group import Probe, Result
from gptmill.runtime.toolchain import find_obstacle

ARITHMETIC, COMPILER, PROCESSES = "arithmetic", "compiler", "processes"
BF16, FP8 = (8, 0), (8, 9)  # the least capability of a GPU
COMPILE_SECONDS, HANDSHAKE_SECONDS = 240.0, 60.0

CPU_PROBES = (
    Probe("bf16 matmul", "gpu_probes", "multiply", {"device": "cpu", "precision": "bf16"}),
    Probe("bf16 speed", "gpu_probes", "emulates_bf16"),
    Probe("flash attention", "gpu_probes", "attend", {"device": "cpu", "backend": "flash"}),
)
GLOO = Probe("Gloo", "torch_probes", "shake_hands", {"backend": "gloo", "ranks": 2}, HANDSHAKE_SECONDS)
FACTS = Probe("torch", "torch_probes", "read_facts")


def list_gpu_probes(index: int, gpu: GpuFacts) -> list[Probe]:
    """What a GPU of this capability is able to do; NVIDIA's only."""
    device = {"device": f"cuda:{index}"}
    precisions = ["fp16", *["bf16"] * (gpu.capability >= BF16), *["fp8"] * (gpu.capability >= FP8)]
    backends = ["efficient", *["flash", "cudnn"] * (gpu.capability >= BF16)]
    return [
        *(Probe(f"{name} matmul", "gpu_probes", "multiply", {**device, "precision": name}) for name in precisions),
        *(Probe(f"{name} attention", "gpu_probes", "attend", {**device, "backend": name}) for name in backends),
        *[Probe("Triton kernel", "gpu_probes", "run_kernel", device, 120.0)] * (gpu.capability >= BF16),
    ]


def make_compile_probe(cache: Path) -> Probe:
    return Probe("torch.compile", "torch_probes", "compile_function", {"cache": str(cache)}, COMPILE_SECONDS)


def make_nccl_probe(gpus: int) -> Probe:
    arguments = {"backend": "nccl", "ranks": gpus}
    return Probe("NCCL", "torch_probes", "shake_hands", arguments, HANDSHAKE_SECONDS + 10 * gpus)


FIXES = {
    "bf16 matmul": "--precision fp16",
    "fp16 matmul": "--precision bf16",
    "fp8 matmul": "--precision bf16",
    "flash attention": "--attention_backend efficient",
    "cudnn attention": "--attention_backend flash",
    "efficient attention": "--attention_backend flash",
    "Triton kernel": "--kernels none, until it works",
}
OPTIONAL = ("fp8 matmul", "fp16 matmul", "efficient attention")  # training never uses these unless asked to


def judge_arithmetic(name: str, results: Sequence[Result], device: str) -> Finding:
    """One probe on every GPU, or on the CPU."""
    broken = [f"{device} {index}: {result.error}" for index, result in enumerate(results) if result.error]
    if broken:
        state: State = "warning" if name in OPTIONAL or device == "CPU" else "failed"
        fix = "--precision fp32" if device == "CPU" else FIXES[name]
        return Finding(
            ARITHMETIC, name, state, "; ".join(broken), "what is trained with it would be wrong, or stop", fix
        )
    error = max(result.value for result in results)
    where = f"on {len(results)} GPUs" if len(results) > 1 else f"on the {device}"
    passes = "forward and backward " if "attention" in name else ""
    return Finding(ARITHMETIC, name, "ok", f"{passes}{where}: within {error:.1e} of fp32")


def judge_cpu(results: dict[str, Result]) -> list[Finding]:
    found = [judge_arithmetic(name, [results[name]], "CPU") for name in ("bf16 matmul", "flash attention")]
    if results["bf16 speed"].value and found[0].state == "ok":
        meaning = "much slower than fp32 here: this CPU has no instructions for it"
        found[0] = Finding(
            ARITHMETIC, "bf16 matmul", "warning", found[0].what, meaning, "--precision fp32 (the default)"
        )
    return found


def list_impossible(gpu: GpuFacts) -> list[Finding]:
    """What the GPU's generation lacks."""
    has = f"this GPU has capability {gpu.capability[0]}.{gpu.capability[1]}"
    lacking = [] if gpu.capability >= BF16 else ["bf16 matmul", "flash attention", "cudnn attention", "Triton kernel"]
    found = [Finding(ARITHMETIC, name, "skipped", f"needs capability 8.0; {has}") for name in lacking]
    if gpu.capability < FP8:
        found.append(Finding(ARITHMETIC, "fp8 matmul", "skipped", f"needs capability 8.9; {has}"))
    return found


def judge_compile(result: Result | None, facts: MachineFacts) -> Finding:
    """Without a result, as in the quick part: whether what a compiler needs is in place."""
    kind = facts.device.partition(":")[0] or "cpu"
    # On a GPU most recipes compile, and the fused kernels need the compiler too.
    state: State = "failed" if kind == "cuda" else "warning"
    meaning = "recipes with compile = true stop" + ("; so do the fused kernels" if kind == "cuda" else "")
    if obstacle := find_obstacle(kind):
        return Finding(COMPILER, "torch.compile", state, obstacle.what, meaning, f"{obstacle.fix}, or --no_compile")
    if result is None:
        return Finding(COMPILER, "torch.compile", "ok", "the compiler, Python's headers and the cache folder are there")
    if result.error:
        fix = "an empty, executable folder as TORCHINDUCTOR_CACHE_DIR, another compiler as CXX, or --no_compile"
        return Finding(COMPILER, "torch.compile", state, result.error, meaning, fix)
    return Finding(COMPILER, "torch.compile", "ok", f"compiled a function for {kind} in {result.value:.1f} s")


def judge_handshake(name: str, result: Result, ranks: int) -> Finding:
    """Several processes are needed with several GPUs only."""
    if not result.error:
        return Finding(PROCESSES, name, "ok", f"{ranks} process{'es' * (ranks > 1)} added up a tensor")
    state: State = "failed" if name == "NCCL" else "warning"
    meaning = f"torchrun would fail with {'GPUs' if name == 'NCCL' else 'CPUs'}; a single process still trains"
    variable = "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1" if name == "NCCL" else "export GLOO_SOCKET_IFNAME=lo"
    return Finding(PROCESSES, name, state if ranks > 1 else "warning", result.error, meaning, variable)

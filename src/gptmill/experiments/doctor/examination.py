"""Runs all checks: those of this process at once, the probes in child processes beside each other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack

from gptmill.experiments.doctor import disk, environment, gpu, machine, probe_findings, software
from gptmill.experiments.doctor.facts import MachineFacts
from gptmill.experiments.doctor.finding import Finding, run_check
from gptmill.experiments.doctor.probe_group import Probe, ProbeGroup, Result, wait_for
from gptmill.runtime.cpu_usage import read_quota
from gptmill.runtime.toolchain import find_compile_cache, find_obstacle

Say = Callable[[str], None]


def examine(logdir: str = "runs", *, quick: bool = False, say: Say = lambda _doing: None) -> list[Finding]:
    """All findings, in the order of the table; `say` is told what is being tried."""
    with ExitStack() as stack:
        main = ProbeGroup(list_main_probes(quick=quick), stack)
        folder = ProbeGroup([Probe("disk", "disk_probes", "measure_folder", {"logdir": logdir})], stack)
        compiling = [] if quick else open_compiling(stack)
        installed = check_software()
        wait_for([main], [folder, *compiling], say)
        result = main.results["torch"]
        if result.error:
            wait_for([folder], [], say)
            return [*installed, _report_broken_torch(result), *check_environment(), *check_disk(folder, logdir)]
        facts = MachineFacts.parse(result.value)
        # A process for each GPU, so that a broken one is found.
        probes = [] if quick else [probe_findings.list_gpu_probes(*each) for each in enumerate(facts.gpus)]
        devices = [ProbeGroup(each, stack) for each in probes]
        nccl = [ProbeGroup([probe_findings.make_nccl_probe(len(devices))], stack)] if devices else []
        wait_for([folder, *compiling, *devices, *nccl], [], say)
        return [
            *installed,
            gpu.judge_torch(facts),
            *check_environment(),
            *check_machine(facts),
            *check_disk(folder, logdir),
            gpu.judge_driver(facts),
            gpu.judge_device(facts),
            *gpu.judge_gpus(facts),
            *(judge_gpu_groups(facts, devices) if devices else []),
            *([] if quick or facts.gpus else probe_findings.judge_cpu(main.results)),
            probe_findings.judge_compile(compiling[0].results["torch.compile"] if compiling else None, facts),
            *([] if quick else [probe_findings.judge_handshake("Gloo", main.results["Gloo"], 2)]),
            *(probe_findings.judge_handshake("NCCL", group.results["NCCL"], len(facts.gpus)) for group in nccl),
            *run_check("extras", "extras", software.check_extras),
        ]


def open_compiling(stack: ExitStack) -> list[ProbeGroup]:
    """Starts to compile. Without a compiler there is nothing to try; for which device it compiles is known later."""
    if all(find_obstacle(device_type) for device_type in ("cpu", "cuda")):
        return []
    # In the folder of the real cache, since that may be on a disk that is full or that allows no execution.
    cache = find_compile_cache() / f"doctor-{os.getpid()}"
    stack.callback(shutil.rmtree, cache, ignore_errors=True)
    return [ProbeGroup([probe_findings.make_compile_probe(cache)], stack)]


def check_software() -> list[Finding]:
    """What can be said without torch."""
    checks = {
        "Python": software.check_python,
        "bytecode": software.check_bytecode,
        "gptmill": software.check_gptmill,
        "GPT-2 tokenizer": software.check_tokenizer,
        "plug-ins": software.check_plugins,
    }
    return [finding for name, check in checks.items() for finding in run_check(software.GROUP, name, check)]


def check_environment() -> list[Finding]:
    return run_check(environment.GROUP, "variables", lambda: environment.check_environment(os.environ))


def check_disk(folder: ProbeGroup, logdir: str) -> list[Finding]:
    return run_check(disk.GROUP, "log directory", lambda: disk.judge_disk(folder.results["disk"], logdir))


def check_machine(facts: MachineFacts) -> list[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "memory": lambda: machine.check_memory(facts),
        "shared memory": lambda: machine.check_shared_memory(len(facts.gpus)),
        "cores": lambda: machine.check_cores(facts, read_quota()),
        "open files": machine.check_open_files,
        "clock": machine.check_clock,
    }
    return [finding for name, check in checks.items() for finding in run_check(machine.GROUP, name, check)]


def list_main_probes(*, quick: bool) -> list[Probe]:
    """Probes that share one process. Gloo forks, and must come before CUDA is used in it."""
    if quick:
        return [probe_findings.FACTS]
    return [probe_findings.GLOO, probe_findings.FACTS, *probe_findings.CPU_PROBES]


def judge_gpu_groups(facts: MachineFacts, groups: list[ProbeGroup]) -> list[Finding]:
    """The results of all GPUs together, and what the oldest of them cannot do."""
    names = dict.fromkeys(name for group in groups for name in group.results)
    found = []
    for name in names:
        results: list[Result] = [group.results[name] for group in groups if name in group.results]
        found.append(probe_findings.judge_arithmetic(name, results, "GPU"))
    weakest = min(facts.gpus, key=lambda each: each.capability)
    return [*found, *probe_findings.list_impossible(weakest)]


def _report_broken_torch(result: Result) -> Finding:
    return Finding(
        "software", "torch", "failed", result.error, "nothing can be trained", "pip install --force-reinstall torch"
    )

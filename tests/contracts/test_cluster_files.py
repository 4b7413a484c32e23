"""examples/cluster: the files that users copy are valid, and every flag in them exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import PROJECT
from torch.distributed.run import get_args_parser

from gptmill.cli.recipe_calls import parse_recipe_call
from gptmill.config.recipes import make_config
from gptmill.config.requests import PrepareRequest, StartOptions
from gptmill.config.schema import list_fields

FOLDER = PROJECT / "examples" / "cluster"
SLURM, KUBERNETES, SKYPILOT = (FOLDER / name for name in ("train.sbatch", "pytorchjob.yaml", "skypilot.yaml"))
DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)(?:=(\S+))?(?:  +#.*)?$")
NUMBERS = {
    "SLURM_NNODES": "2",
    "GPUS": "8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "0",
}


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def read_scripts() -> dict[str, str]:
    """The shell parts of all files."""
    sky = load(SKYPILOT)
    (container,) = load(KUBERNETES)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return {
        "slurm": SLURM.read_text(encoding="utf-8"),
        "kubernetes": shlex.join(container["command"]),
        "skypilot": f"{sky['setup']}\n{sky['run']}",
    }


def list_commands(script: str, program: str) -> list[list[str]]:
    """The words of every call of a program; a variable is replaced by a number, or its name."""
    lines = re.sub(r"\\\n *", "", script).splitlines()
    found = [line.strip() for line in lines if line.strip().startswith(program)]
    plain = [re.sub(r"\$\(.*?\)", "HOST", line.rstrip("&")) for line in found]
    return [shlex.split(re.sub(r"\$(\w+)", lambda name: NUMBERS.get(name[1], name[1]), line)) for line in plain]


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "skypilot"])
def test_torchrun_and_gptmill_understand_their_commands(name: str) -> None:
    ((_, *words),) = list_commands(read_scripts()[name], "torchrun")
    options = get_args_parser().parse_args(words)
    assert options.module
    assert options.training_script == "gptmill"
    verb, *arguments = options.training_script_args
    assert verb == "train"
    call = parse_recipe_call("train", "", StartOptions, arguments)
    assert call.request.resume == "auto"
    assert call.flags["run_name"] == ("RUN" if name == "slurm" else "gpt2-1.5b")
    assert make_config(call.recipe, call.flags).model.num_layers == 48
    if name != "kubernetes":  # where the operator says it by variables
        assert options.nnodes == "2"
        assert options.nproc_per_node == "8"


def test_prepare_has_every_flag_that_is_used() -> None:
    ((_, verb, *words),) = list_commands(read_scripts()["skypilot"], "gptmill")
    assert verb == "prepare"
    names = {word.removeprefix("--") for word in words if word.startswith("--")}
    assert names <= {field.name for field in list_fields(PrepareRequest)}


@pytest.mark.parametrize("name", ["slurm", "skypilot"])
def test_the_shell_understands_the_scripts(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(read_scripts()[name], encoding="utf-8")
    subprocess.run(["bash", "-n", script], check=True, timeout=60)


def test_slurm_is_asked_for_equal_nodes_a_warning_and_a_second_try() -> None:
    lines = [line for line in read_scripts()["slurm"].splitlines() if line.startswith("#SBATCH")]
    matches = [DIRECTIVE.fullmatch(line) for line in lines]
    assert all(matches), lines
    options = {match[1]: match[2] for match in matches if match}
    assert len(options) == len(lines)
    assert int(options["nodes"]) > 1
    assert options["ntasks-per-node"] == "1"
    assert int(options["gpus-per-node"]) > 1
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", options["time"])
    assert options["open-mode"] == "append"
    assert "requeue" in options


def test_the_pytorchjob_has_what_the_operator_requires() -> None:
    job = load(KUBERNETES)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec, elastic = job["spec"], job["spec"]["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]  # an elastic job has no master
    assert elastic["rdzvBackend"] == "c10d"
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert worker["restartPolicy"] in ("OnFailure", "ExitCode", "Always")


def test_the_sky_task_has_several_nodes_and_a_folder_that_outlives_them() -> None:
    task = load(SKYPILOT)
    assert task.keys() == {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"}
    assert task["num_nodes"] == 2
    assert re.fullmatch(r"\w+:\d+", task["resources"]["accelerators"])
    ((folder, mount),) = task["file_mounts"].items()
    assert f"--logdir {folder}" in task["run"]
    assert mount.keys() == {"name", "mode"}

"""Writes an archive of what this version leaves on disk, which every later version must open and go on with.

python tests/old/write.py

Run it in a checkout whose sources are committed; it takes two minutes. The commit names two files beside this one:
COMMIT.tar.xz, and COMMIT.json with what this version itself makes of the archive. Earlier archives stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from zygote import Zygote  # it is in the folder of all tests

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
LONG_AGO = 1_700_000_000  # when every file was changed: prepare takes up its work if the sources have not changed since
STEPS, MORE = 4, 2

ALL = (
    "--data_dir corpus --device cpu --num_layers 1 --num_heads 1 --context_length 16 --total_batch_size 128 "
    "--mini_batch_size 4 --warmup_steps 1 --max_lr 0.02 --schedule constant --eval_tokens 256 --sample_prompt the "
    f"--num_samples 1 --sample_tokens 6 --eval_freq {STEPS}"
)
SHORT = f"{ALL} --max_steps {STEPS} --checkpoint_freq {STEPS}"
ENDLESS = f"{ALL} --max_steps 100000 --checkpoint_freq 2 --eval_freq 100000 --keep_checkpoints 1"
NARROW, WIDE = "--embd_size 8", "--embd_size 16"

TRAINED = {
    "plain": f"{WIDE} --ema_decay 0.9",
    "fp16": f"{NARROW} --precision fp16",
    "fp8_blocks": f"{WIDE} --precision fp8-emulated --fp8_layers blocks",
    "fp8_unrecorded": f"{WIDE} --precision fp8-emulated --fp8_layers blocks",
    "muon_momentum": f"{NARROW} --optimizer muon --muon_momentum 0.9 --matrix_lr 0.1",
    "router_balance": f"{NARROW} --feed_forward moe --num_experts 4 --router_aux_loss 1 --router_balance batch "
    "--max_lr 0.1",
    "padded_softmax": f"{NARROW} --padded_softmax",
    "hang_factor": f"{NARROW} --hang_factor none",
    "guard": f"{NARROW} --guard_window 32 --max_skips 3 --snapshot_freq 2 --no_save_in_background",
    "warn_grad_norm": f"{NARROW} --warn_grad_norm 0.5 --warn_cpu none",
    "sampling": f"{NARROW} --sample_temperature 0.5 --sample_top_k 3 --sample_seed 7",
    "unlinked": f"{NARROW} --checkpoint_freq 2",
    "no_symlinks": f"{NARROW} --checkpoint_freq 2",
    "abandoned": f"{NARROW} --max_steps 8 --checkpoint_freq 2 --milestone_freq 4",
}
EIGHT_BIT = "--embd_size 32 --optimizer adamw8bit --mini_batch_size 2"  # torchao's: of matrices of 4,096 elements
OF_TWO_RANKS = {"zero1": f"{EIGHT_BIT} --parallel zero1", "exact_ranks": EIGHT_BIT}
STOPPED = {
    "wandb": (signal.SIGINT, f"train {ENDLESS} {NARROW} --use_wandb --wandb_mode offline --wandb_entity team"),
    "locked": (signal.SIGKILL, f"train {ENDLESS} {NARROW}"),
    "gated": (signal.SIGKILL, f"train {ENDLESS} {NARROW} --plugin examples/gated_attention.py --attention gated"),
    "signum": (signal.SIGKILL, f"train {ENDLESS} {NARROW} --plugin examples/signum.py --optimizer signum"),
    "probe": (
        signal.SIGKILL,
        f"train {ENDLESS} {NARROW} --plugin examples/probe_text.py --evaluators probe --probe_file texts/00.txt",
    ),
    "recovery": (signal.SIGKILL, "compress plain --out recovery --method prune-2:4 --recover_steps 9999 --no_eval"),
    "budget": (
        signal.SIGKILL,
        "train --corpus texts --budget 30s --num_layers 1 --embd_size 8 --num_heads 1 --context_length 16 "
        "--total_batch_size 64 --max_steps 99999 --tokenizer byte --device cpu --sample_tokens 0 --checkpoint_freq 20",
    ),
}  # fmt: skip
COMPRESSED = ("int8", "int8-dynamic", "int4 --group_size 16", "prune", "prune-2:4")
EXPORTED = ("plain --to hf", "plain --to onnx", "plain --to gguf", "zero1 --to gguf --dtype q8_0")
PREPARE_HALF = "prepare texts --tokenizer byte --shard_tokens 3000 --split documents --val_fraction 0.2 --out half"
JSON_OUTPUTS = {
    "report": "report abandoned --format json",
    "plan": f"plan {SHORT} {NARROW} --json",
    "doctor": "doctor --quick --json",
    "eval": "eval plain --device cpu --json eval.json",
    "sample": "sample plain --device cpu --prompt the --max_new_tokens 3 --json",
}

# Small chunks, and a journal after each; killed in the middle.
KILLED_PREPARE = """
import os, signal, sys
from gptmill.cli.main import run_guarded
from gptmill.data.pipeline import chunks, corpus_writer
from gptmill.data.sources import parts

chunks.CHUNK_BYTES, corpus_writer.JOURNAL_SECONDS = 2000, 0.0
save, saves = corpus_writer._save, []

def save_and_die(*arguments):
    save(*arguments)
    saves.append(1)
    if len(saves) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

corpus_writer._save = save_and_die
run_guarded([*sys.argv[1].split(), "--processes", "1"])
"""


def main() -> None:
    changed = subprocess.check_output(["git", "status", "--porcelain", "src", "examples"], cwd=PROJECT, text=True)
    assert not changed, f"not committed:\n{changed}"
    command = ["git", "log", "-1", "--format=%h", "--abbrev=7", "--", "src"]
    commit = subprocess.check_output(command, cwd=PROJECT, text=True).strip()
    with tempfile.TemporaryDirectory(prefix="gptmill-old-") as folder:
        os.chdir(folder)
        write_sources()
        write_everything()
        remove_superfluous()
        archive = HERE / f"{commit}.tar.xz"
        pack(archive)
    with tempfile.TemporaryDirectory(prefix="gptmill-old-") as folder:
        os.chdir(folder)
        with tarfile.open(archive) as tar:
            tar.extractall(filter="data")
        (HERE / f"{commit}.json").write_text(dump({"commit": commit, **observe()}), encoding="utf-8")


def write_sources() -> None:
    """A text of 13 kB in files that look long unchanged, and the plug-ins."""
    generator, folder = random.Random(0), Path("texts")
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    folder.mkdir()
    for number in range(40):
        path, length = folder / f"{number:02d}.txt", generator.randint(20, 120)
        path.write_text(" ".join(generator.choices(words, k=length)) + "\n", encoding="utf-8")
        os.utime(path, (LONG_AGO, LONG_AGO))
    for plugin in ("gated_attention", "signum", "probe_text"):
        Path("examples").mkdir(exist_ok=True)
        shutil.copy(PROJECT / f"examples/{plugin}.py", "examples")


def write_everything() -> None:
    gptmill("prepare texts --tokenizer char --val_fraction 0.1 --out corpus")
    for name, flags in TRAINED.items():
        gptmill(f"train {SHORT} {flags} --run_name {name}")
    for name, flags in OF_TWO_RANKS.items():
        gptmill(f"train {SHORT} {flags} --run_name {name}", "-m torch.distributed.run --standalone --nproc_per_node 2")
    gptmill("train --run_name abandoned --resume 2 --max_steps 4")
    for method in COMPRESSED:
        gptmill(f"compress plain --no_eval --method {method}")
    for name, (number, command) in STOPPED.items():
        named = command if "--out" in command else f"{command} --run_name {name}"
        stop(number, named, Path("runs") / name)
    for wanted in EXPORTED:
        gptmill(f"export {wanted} --device cpu")
    edit_by_hand()
    replace_links(Path("runs/unlinked"), lambda link: link.unlink())
    replace_links(Path("runs/no_symlinks"), replace_by_text)
    killed = open_zygote().run(["-c", KILLED_PREPARE, PREPARE_HALF], Path.cwd(), make_environment())
    assert killed.returncode == -signal.SIGKILL
    assert Path("half.partial").is_dir()


def gptmill(command: str, program: str = "") -> str:
    print("gptmill", command, flush=True)  # noqa: T201
    done = open_zygote().run([*program.split(), "-m", "gptmill", *command.split()], Path.cwd(), make_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def open_zygote() -> Zygote:
    with tempfile.TemporaryDirectory() as folder:  # of an address that nobody connects to
        return Zygote.open(make_environment(), f"{folder}/requests")


def make_environment() -> dict[str, str]:
    """Nothing of the machine that the archive is written on."""
    private = ("WANDB_X_DISABLE_META", "WANDB_X_DISABLE_MACHINE_INFO", "WANDB_X_DISABLE_STATS", "WANDB_DISABLE_GIT")
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **dict.fromkeys(private, "true")}


def stop(number: signal.Signals, command: str, run: Path) -> None:
    """Sends the signal in the middle of the training, some steps after a checkpoint."""
    print("gptmill", command, flush=True)  # noqa: T201
    process = open_zygote().start(["-m", "gptmill", *command.split()], Path.cwd(), make_environment())
    while not (run / "checkpoints/latest").exists() or read_last_step(run) <= read_saved_step(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(number)
    process.communicate()


def read_last_step(run: Path) -> int:
    return max((int(line.split()[0]) for line in read_log(run)), default=0)


def read_saved_step(run: Path) -> int:
    """The step of the checkpoint that a resume begins at, with links or without."""
    folders = [path.name for path in (run / "checkpoints").glob("step_*")]
    latest = run / "checkpoints/latest"
    if latest.is_symlink():
        folders = [latest.readlink().name]
    return max(int(name.split("_")[1]) for name in folders)


def read_log(run: Path) -> list[str]:
    """Its lines; without the last one if a kill tore it."""
    path = run / "log.txt"
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def edit_by_hand() -> None:
    """As if one run had lowered its loss scale, and another were older than the option fp8_layers."""
    edit_values(Path("runs/fp16"), lambda values: values["scaler"].update(scale=1024.0))
    unrecorded = Path("runs/fp8_unrecorded")
    edit_values(unrecorded, lambda values: values["config"].pop("fp8_layers"))
    config = unrecorded / "config.toml"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "fp8_layers" not in line), encoding="utf-8")


def edit_values(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits the values of its only checkpoint, and makes their checksum anew."""
    (path,) = run.glob("checkpoints/step_*/checkpoint.json")
    content = json.loads(path.read_bytes())
    edit(content["values"])
    del content["sha256"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_bytes(json.dumps({**content, "sha256": digest}, indent=1).encode())


def replace_links(run: Path, replace: Callable[[Path], None]) -> None:
    for path in sorted((run / "checkpoints").iterdir()):
        if path.is_symlink():
            replace(path)


def replace_by_text(link: Path) -> None:
    """By hand: as the program does on a file system without symlinks."""
    target = link.readlink().name
    link.unlink()
    link.write_text(f"{target}\n", encoding="utf-8")


def remove_superfluous() -> None:
    """What no reader needs; the stacks of a hang are empty, and other files of W&B describe the machine."""
    for path in [*Path("runs").rglob("train.log"), *Path("runs").rglob("*.stacks.txt")]:
        path.unlink()
    for path in Path("runs/wandb/wandb").iterdir():
        if path.is_symlink() or path.name.startswith("debug"):
            path.unlink()
        elif path.is_dir():
            for other in path.iterdir():
                if other.is_dir() and not other.is_symlink():
                    shutil.rmtree(other)
                elif other.suffix != ".wandb":
                    other.unlink()


def pack(archive: Path) -> None:
    """The same bytes for the same files, whoever packs them."""

    def make_plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = LONG_AGO
        info.mode = 0o755 if info.isdir() else 0o644
        return info

    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for path in sorted(Path().iterdir()):
            tar.add(path, filter=make_plain)


def observe() -> dict[str, Any]:
    """What this version makes of the archive: the losses of further steps, and what is the same on any machine."""
    outputs = {name: {"command": command, "keys": observe_keys(command)} for name, command in JSON_OUTPUTS.items()}
    runs = {path.name: observe_run(path) for path in sorted(Path("runs").iterdir())}
    gptmill(PREPARE_HALF)
    shards = {str(path): hash_file(path) for path in sorted(Path("half").rglob("*.npy"))}
    return {"runs": runs, "outputs": outputs, "prepare": PREPARE_HALF, "shards": shards}


def observe_run(run: Path) -> dict[str, Any]:
    recorded = list_values(run / "config.toml").get("plugin")
    plugin = f" --plugin {recorded}" if recorded else ""
    facts: dict[str, Any] = {"state": find_state(run.name), "load": f"{run.name} --device cpu{plugin}"}
    gptmill(f"eval {facts['load']} --json eval.json")
    facts["loss"] = json.loads(Path("eval.json").read_text())["results"][0]["metrics"]["loss"]["value"]
    if not any(run.glob("checkpoints/*/optimizer*")):
        return facts
    saved = read_saved_step(run)
    facts["resume"] = f"train --run_name {run.name} --resume latest --max_steps {saved + MORE}{plugin}"
    gptmill(facts["resume"])
    new = [line.rpartition(" ")[::2] for line in read_log(run) if int(line.split()[0]) > saved]
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    newest = {event["event"]: event for event in map(json.loads, lines)}
    values = json.loads((run / "checkpoints/latest/checkpoint.json").read_bytes())["values"]
    return {
        **facts,
        "saved": saved,
        "log": {name: float(loss) for name, loss in new},
        "objective": newest["StepLogged"]["objective"],
        "ema_loss": newest["EvalDone"]["ema_loss"],
        "values": {name: values[name] for name in ("windows_read", "scaler")},
    }


def dump(facts: dict[str, Any]) -> str:
    """JSON with a line for each run."""

    def dump_group(group: Any) -> str:
        if not isinstance(group, dict):
            return json.dumps(group)
        return "{\n  " + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(group[key])}" for key in group) + "\n }"

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {dump_group(facts[key])}" for key in facts) + "\n}\n"


def list_values(config: Path) -> dict[str, str]:
    return dict(re.findall(r'^(\w+) = "(.*)"$', config.read_text(encoding="utf-8"), re.MULTILINE))


def find_state(name: str) -> str:
    """As `runs list` says it."""
    table = gptmill("runs list").splitlines()
    column = table[0].index("state")
    (row,) = (line for line in table if line.split()[:1] == [name])
    return row[column:].split("  ")[0].strip()


def observe_keys(command: str) -> str:
    output = gptmill(command)
    content = json.loads(Path("eval.json").read_text() if "eval.json" in command else output)
    return " ".join(sorted(list_keys(content)))


def list_keys(content: Any, prefix: str = "") -> Iterator[str]:
    """The keys of an object, and of the first object in a list in it."""
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from list_keys(value[0], f"{prefix}{name}.")


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()

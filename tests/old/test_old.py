"""What older versions wrote: this one opens all of it, and goes on with it.

`write.py` wrote each archive, and beside it what the version of that time made of it. A run that a later version is to
refuse moves from RESUMED to a table of its own, with the sentence that refuses it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunRanks, Start
from safetensors.numpy import load_file

import gptmill
from gptmill.cli.main import run_guarded

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FACTS: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in HERE.glob("*.json")}

# What each run is kept for. All are listed with their state, load, evaluate, sample, and resume: with the losses that
# the old version had, every step once, the earlier lines of the log untouched, the right windows and loss scale.
RESUMED = {
    "plain": "AdamW, and the EMA of the weights",
    "fp16": "a loss scale that has been lowered (by hand)",
    "fp8_blocks": "fp8 in the blocks",
    "fp8_unrecorded": "fp8 of before the option fp8_layers (by hand): in the blocks",
    "zero1": "8-bit AdamW whose state two ranks share",
    "exact_ranks": "8-bit AdamW on two ranks that sum exactly",
    "muon_momentum": "a momentum that is not the default",
    "router_balance": "a mixture whose experts are balanced over each micro-batch",
    "padded_softmax": "a softmax over the padding of the vocabulary",
    "recovery": "a pruned model, killed in its recovery: zeros stay zeros",
    "hang_factor": "no limit to the duration of a step",
    "guard": "options of the loss-spike detector, and saves that training waits for",
    "warn_grad_norm": "a threshold of a warning, and a warning that is off",
    "sampling": "temperature, top-k and seed of the samples",
    "wandb": "W&B offline for a team, stopped: it stays offline",
    "gated": "the plug-in examples/gated_attention.py of that time, killed",
    "signum": "the plug-in examples/signum.py of that time, killed",
    "probe": "the plug-in examples/probe_text.py of that time, killed",
    "budget": "a time budget, killed",
    "abandoned": "tiers of steps that the user has gone back behind",
    "unlinked": "tiers that somebody has deleted (by hand)",
    "no_symlinks": "tiers that are text files (by hand)",
    "locked": "a lock, which its process held when it was killed",
}
# Models without training to resume: they are listed, load, evaluate and sample.
LOADED = {
    "plain-int8": "8-bit weights",
    "plain-int8-dynamic": "8-bit weights, and activations too in the version that wrote it",
    "plain-int4": "4-bit weights in groups",
    "plain-prune": "half of the weights pruned",
    "plain-prune-2-4": "two of every four weights pruned",
}
# What the config of a resumed run still says.
OPTIONS = {
    "fp8_blocks": ['fp8_layers = "blocks"'],
    "muon_momentum": ["muon_momentum = 0.9"],
    "router_balance": ['router_balance = "batch"'],
    "padded_softmax": ["padded_softmax = true"],
    "recovery": ["keep_zeros = true"],
    "hang_factor": ['hang_factor = "none"'],
    "guard": ["guard_window = 32", "max_skips = 3", "snapshot_freq = 2", "save_in_background = false"],
    "warn_grad_norm": ["warn_grad_norm = 0.5", 'warn_cpu = "none"'],
    "sampling": ["sample_temperature = 0.5", "sample_top_k = 3", "sample_seed = 7"],
    "wandb": ['wandb_mode = "offline"', 'wandb_entity = "team"'],
}
# Exports have the same tensors today.
EXPORTED = {
    "plain-hf": "export plain --to hf",
    "plain-onnx": "export plain --to onnx",
    "plain-f16.gguf": "export plain --to gguf",
    "zero1-q8_0.gguf": "export zero1 --to gguf --dtype q8_0",
}
# --json and --format json have the same keys, and maybe more.
OUTPUTS = ("report", "plan", "doctor", "eval", "sample")

EXTRAS = {"zero1": "torchao", "exact_ranks": "torchao", "wandb": "wandb"}  # without which a run cannot go on
CLOSE = 1e-3  # relative: other processors and versions of torch round differently


@dataclass(frozen=True)
class Archive:
    """What one version wrote, unpacked, and what it made of that."""

    folder: Path
    facts: dict[str, Any]

    def take(self, *names: str) -> None:
        """Copies parts of it to where the test works."""
        for name in names:
            source = self.folder / name
            if source.is_dir():
                shutil.copytree(source, name, symlinks=True)
            else:
                shutil.copy2(source, name)

    def take_run(self, name: str) -> tuple[Path, dict[str, Any]]:
        """A run, beside the corpora and the plug-ins that runs read; and its facts."""
        if name not in self.facts["runs"]:
            pytest.skip(f"{self.facts['commit']} wrote no run {name}")
        self.take(f"runs/{name}", "corpus", "data", "examples", "texts")
        return Path("runs") / name, self.facts["runs"][name]


@pytest.fixture(scope="module", params=FACTS)
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = tmp_path_factory.mktemp(request.param)
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Archive(folder, FACTS[request.param])


@pytest.fixture
def old(unpacked: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    monkeypatch.chdir(tmp_path)
    return unpacked


def run(command: str, *more: str) -> None:
    assert run_guarded([*command.split(), *more]) == 0


def read_log(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text(encoding="utf-8").splitlines()


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def find_newest(folder: Path) -> dict[str, dict[str, Any]]:
    """The last event of each kind."""
    return {event["event"]: event for event in read_events(folder)}


def assert_went_on(folder: Path, before: list[str], facts: dict[str, Any]) -> None:
    """`before` are the lines of its log when it was unpacked, of which those up to its checkpoint count."""
    kept = [line for line in before if int(line.split()[0]) <= facts["saved"]]
    log = read_log(folder)
    assert log[: len(kept)] == kept
    new = [line.rpartition(" ")[::2] for line in log[len(kept) :]]
    assert [name for name, _ in new] == list(facts["log"])
    assert {name: float(loss) for name, loss in new} == pytest.approx(facts["log"], rel=CLOSE)
    newest = find_newest(folder)
    for kind, name in (("StepLogged", "objective"), ("EvalDone", "ema_loss")):
        expected = facts[name]
        assert newest[kind][name] == (expected if expected is None else pytest.approx(expected, rel=CLOSE)), name
    values = json.loads((folder / "checkpoints/latest/checkpoint.json").read_bytes())["values"]
    assert {name: values[name] for name in facts["values"]} == facts["values"]
    assert gptmill.open_run(folder).state == "finished"


def test_every_run_of_every_archive_is_in_a_table() -> None:
    assert {name for facts in FACTS.values() for name in facts["runs"]} == RESUMED.keys() | LOADED.keys()
    assert OPTIONS.keys() | EXTRAS.keys() <= RESUMED.keys()


def test_runs_list_says_their_states(old: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    old.take("runs")
    run("runs list")
    table = capsys.readouterr().out
    for name, facts in old.facts["runs"].items():
        assert re.search(rf"^{name} .*  {facts['state']}  ", table, re.MULTILINE), name


@pytest.mark.usefixtures("no_new_parts")
@pytest.mark.parametrize("name", RESUMED | LOADED)
def test_an_old_model_loads(old: Archive, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, facts = old.take_run(name)
    run(f"eval {facts['load']} --json eval.json")
    (result,) = json.loads(Path("eval.json").read_text())["results"]
    assert result["metrics"]["loss"]["value"] == pytest.approx(facts["loss"], rel=CLOSE)
    capsys.readouterr()
    run(f"sample {facts['load']} --prompt the --max_new_tokens 9")
    assert capsys.readouterr().out.startswith("the")
    for action in ("list", "verify"):
        run(f"checkpoints {action} {name}")


@pytest.mark.usefixtures("no_new_parts")
@pytest.mark.parametrize("name", RESUMED)
def test_an_old_run_resumes(old: Archive, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    monkeypatch.setenv("WANDB_MODE", "online")  # which the run's own option overrides
    folder, facts = old.take_run(name)
    log, events = read_log(folder), read_events(folder)
    run(facts["resume"])
    assert_went_on(folder, log, facts)
    newest = find_newest(folder)
    assert [event for event in events if not event.keys() <= newest[event["event"]].keys()] == []
    config = (folder / "config.toml").read_text(encoding="utf-8").splitlines()
    assert [option for option in OPTIONS.get(name, ()) if option not in config] == []
    assert not list(folder.glob("wandb/run-*")), "W&B has gone online"
    for action in ("list", "verify", "history"):
        run(f"checkpoints {action} {name}")
    run(f"report {name} --format md")


@pytest.mark.torture
def test_two_ranks_go_on_with_what_two_ranks_saved(old: Archive, run_ranks: RunRanks) -> None:
    pytest.importorskip("torchao")
    folder, facts = old.take_run("zero1")
    log = read_log(folder)
    run_ranks(*facts["resume"].split())
    assert_went_on(folder, log, facts)


def test_zeros_of_an_old_pruned_model_stay(old: Archive) -> None:
    folder, facts = old.take_run("recovery")
    (pruned,) = folder.glob("pruned/*/model.safetensors")
    zeros = {name: array == 0 for name, array in load_file(pruned).items() if (array == 0).mean() == 0.5}
    assert len(zeros) == 4
    run(facts["resume"])
    trained = load_file(folder / "checkpoints/latest/model.safetensors")
    assert [name for name, where in zeros.items() if trained[name][where].any()] == []


def read_tiers(name: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    run(f"checkpoints list {name}")
    return set(re.findall(r"\w*(?:latest|best_model|_step_)\w*", capsys.readouterr().out))


def test_abandoned_tiers_stay_until_they_are_pruned(old: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    abandoned = {"abandoned_step_000004", "abandoned_step_000008"}
    _, facts = old.take_run("abandoned")
    run(facts["resume"])
    assert read_tiers("abandoned", capsys) >= abandoned | {"latest", "milestone_step_000004"}
    run("checkpoints prune abandoned")
    assert not read_tiers("abandoned", capsys) & abandoned


@pytest.mark.parametrize("name", ["unlinked", "no_symlinks"])
def test_tiers_are_linked_again(old: Archive, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, facts = old.take_run(name)
    before = {"latest", "latest_backup", "best_model", "rolling_step_000002", "rolling_step_000004"}
    assert read_tiers(name, capsys) == (before if name == "no_symlinks" else set())
    run(facts["resume"])
    assert read_tiers(name, capsys) >= before - {"best_model"} | {"rolling_step_000006"}
    assert (folder / "checkpoints/latest").resolve().name == "step_000006"


def test_the_lock_of_an_old_process_is_respected(
    old: Archive, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, facts = old.take_run("locked")
    log = read_log(folder)
    with (folder / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("runs list")
        assert re.search(r"^locked .* running ", capsys.readouterr().out, re.MULTILINE)
        for command in ("runs remove locked --yes", "checkpoints prune locked"):
            assert run_guarded(command.split()) == 2
            assert "another process" in capsys.readouterr().err
        process = start(*facts["resume"].split())
        assert process.stdout is not None
        assert "another process" in process.stdout.readline()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert_went_on(folder, log, facts)


def test_a_killed_preparation_is_taken_up_again(old: Archive) -> None:
    """The shard that was complete keeps its date."""
    old.take("texts", "half.partial")
    first = Path("half.partial/train_000000.npy").stat().st_mtime_ns
    run(old.facts["prepare"])
    assert not Path("half.partial").exists()
    assert Path("half/train_000000.npy").stat().st_mtime_ns == first
    shards = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in Path("half").rglob("*.npy")}
    assert shards == old.facts["shards"]


def test_an_old_corpus_is_valid_and_comes_out_the_same_today(old: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    old.take_run("plain")
    run("data verify corpus")
    run("data info corpus")
    run("prepare texts --tokenizer char --val_fraction 0.1 --out again")
    shards = sorted(path.relative_to("corpus") for path in Path("corpus").rglob("*.npy"))
    assert len(shards) == 6
    assert [path for path in shards if ("corpus" / path).read_bytes() != ("again" / path).read_bytes()] == []
    capsys.readouterr()
    run("data show --run plain --step 1")
    assert re.search(r"of \d\d\.txt", capsys.readouterr().out), "the names of the sources are not read"


def test_the_recipe_of_an_old_budget_trains_the_same_model(old: Archive) -> None:
    folder, _ = old.take_run("budget")
    old.take("texts-30s.toml")
    run("train texts-30s.toml --run_name again --max_steps 2")
    weights = [load_file(path / "checkpoints/latest/model.safetensors") for path in (folder, Path("runs/again"))]
    shapes = [{name: array.shape for name, array in arrays.items()} for arrays in weights]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("file", EXPORTED)
def test_an_old_export_has_the_tensors_of_today(old: Archive, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else it says may change."""
    monkeypatch.setitem(sys.modules, "transformers", None)  # would check the export, and takes seconds to import
    name, path = EXPORTED[file].split()[1], Path("exports") / file
    old.take(f"runs/{name}", "exports")
    before = read_export(path)
    run(f"{EXPORTED[file]} --device cpu --overwrite")
    after = read_export(path)
    rounding = 1e-5 if "onnx" in file else 0.0
    assert before.keys() == after.keys()
    assert [each for each in before if not np.allclose(before[each], after[each], rtol=0, atol=rounding)] == []


def read_export(path: Path) -> dict[str, Any]:
    """The tensors of an export; of an ONNX model, what it computes."""
    if path.suffix == ".gguf":
        reader = pytest.importorskip("gguf").GGUFReader(path)
        return {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    if not path.name.endswith("onnx"):
        return load_file(path / "model.safetensors")
    session = pytest.importorskip("onnxruntime").InferenceSession(path / "model.onnx")
    caches = [each for each in session.get_inputs() if each.name != "input_ids"]
    empty = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in caches}
    return {"logits": session.run(["logits"], {"input_ids": np.arange(16)[None], **empty})[0]}


def test_an_old_hugging_face_folder_is_imported_and_loaded(old: Archive) -> None:
    old.take("runs/plain", "exports")
    run("import exports/plain-hf --out imported")
    models = ("plain", "imported", "exports/plain-hf")
    losses = [gptmill.load(model, device="cpu").loss("the quick brown fox") for model in models]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=CLOSE)


@pytest.mark.parametrize("name", OUTPUTS)
def test_json_keeps_its_keys(old: Archive, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    old.take("runs", "corpus")
    facts = old.facts["outputs"][name]
    assert run_guarded(facts["command"].split()) in (0, 1)  # doctor may not like the machine
    printed = capsys.readouterr().out
    content = json.loads(Path("eval.json").read_text() if name == "eval" else printed)
    assert set(facts["keys"].split()) - set(list_keys(content)) == set()


def list_keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of an object, and of the first object in a list in it."""
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from list_keys(value[0], f"{prefix}{name}.")

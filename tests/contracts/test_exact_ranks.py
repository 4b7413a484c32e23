"""With --exact_ranks, any number of ranks ends with the same bits: weights, optimizer, EMA and log.

A run may change its ranks at any checkpoint. Files of one step that are equal resume equally, so that it is enough to
save with every number of ranks, and to resume one of the saves with every number.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from conftest import RunRanks, make_environment

from gptmill.cli.main import run_guarded
from gptmill.config.requests import PrepareRequest
from gptmill.data.prepare import prepare_corpus
from gptmill.runs.checkpoints.storage import load_checkpoint

pytestmark = pytest.mark.slow

# Twelve micro-batches, then twenty-four: blocks of 3 and 6 are not powers of two.
FLAGS = (
    "--num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 --mini_batch_size 1 --total_batch_size 384 "
    "--batch_size_warmup 192:2 --warmup_steps 2 --max_steps 4 --checkpoint_freq 2 --eval_freq 2 --eval_tokens 160 "
    "--sample_tokens 4 --device cpu --dropout 0.1"
).split()
EVERYTHING = (
    "--mixture letters=0.7,words=0.3 --documents masked --feed_forward moe --num_experts 3 --optimizer muon "
    "--ema_decay 0.9 --snapshot_freq 1"
).split()
WAYS = {
    "everything": EVERYTHING,
    "adamw": ["--data_dir", "words"],
    "lion in fp16": "--data_dir words --precision fp16 --optimizer lion --guard off".split(),
    "modern in bf16": "--data_dir words --precision bf16 --positions rope --norm rmsnorm --tied_head false".split(),
    "whole documents": "--data_dir letters --documents whole --mtp_heads 1".split(),
}
LONG_STEPS = 240
LONG = [
    *FLAGS, "--data_dir", "words", "--max_steps", str(LONG_STEPS), "--total_batch_size", "192",
    "--checkpoint_freq", "20", "--eval_freq", "80",
]  # fmt: skip
MOST_SECONDS = 600.0
# Otherwise torchrun's first machine does not tell later ones its address (torch 2.13), and they wait in vain.
GROWING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Train = Callable[..., Path]
Torchrun = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def _corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert words
    generator = random.Random(0)
    documents = ({"text": "ab" * generator.randint(3, 30)} for _ in range(300))
    Path("letters.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    prepare_corpus(["letters.jsonl"], PrepareRequest(out="letters", tokenizer="byte"), lambda _progress: None)


@pytest.fixture
def train(run_ranks: RunRanks) -> Train:
    """Trains with a number of ranks; returns the run's folder."""

    def run(name: str, ranks: int, *flags: str) -> Path:
        words = ["train", *flags, "--run_name", name]
        if ranks == 1:
            assert run_guarded(words) == 0
        else:
            run_ranks(*words, count=ranks)
        return Path("runs") / name

    return run


def read_bits(checkpoint: Path) -> dict[str, object]:
    """All tensors of a checkpoint, and its values but for the run's name, its ranks and what its logs held."""
    loaded = load_checkpoint(checkpoint, ("model", "optimizer", "ema"))
    tensors = {
        f"{group}/{name}": (tensor.dtype, tensor.shape, tensor.numpy().tobytes())
        for group, named in loaded.tensors.items()
        for name, tensor in named.items()
    }
    return tensors | {name: value for name, value in loaded.values.items() if name not in ("config", "ranks", "logs")}


def read_log(run: Path) -> list[tuple[float, ...]]:
    """Loss and norm of every step, and the validation losses, in full."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("step", "loss", "grad_norm", "val_loss", "ema_loss", "by_corpus", "expert_loads")
    return [
        tuple(event.get(name) for name in names) for event in events if event["event"] in ("StepLogged", "EvalDone")
    ]


def assert_same(one: Path, other: Path, steps: tuple[int, ...] = (4,)) -> None:
    for step in steps:
        first, second = (read_bits(run / f"checkpoints/step_{step:06d}") for run in (one, other))
        assert first.keys() == second.keys()
        assert [name for name in first if first[name] != second[name]] == []
    assert (one / "log.txt").read_bytes() == (other / "log.txt").read_bytes()
    assert read_log(one) == read_log(other)


def test_one_two_and_four_ranks_end_with_the_same_bits_however_they_take_turns(train: Train) -> None:
    flags = [*FLAGS, *EVERYTHING, "--num_layers", "1"]
    straight = {ranks: train(f"by_{ranks}", ranks, *flags) for ranks in (1, 2, 4)}
    for ranks in (2, 4):
        assert_same(straight[1], straight[ranks], (2, 4))
    for ranks in (1, 2):  # from the other end of the matrix: by four, then by fewer
        shutil.copytree(straight[4], f"runs/again_{ranks}", symlinks=True)
        assert_same(train(f"again_{ranks}", ranks, "--resume", "2"), straight[1])


BROKEN_RANK = """
import os
import sys
import torch
from gptmill.cli.main import run_guarded
from gptmill.training.micro_batch import EagerPass

run, calls = EagerPass.run, []

def flip_a_bit(self, batch, scale):
    losses = run(self, batch, scale)
    calls.append(batch)
    if os.environ["RANK"] == "1" and len(calls) == 1 + 12 + 12 + 2:  # dry run, two steps, an audit, and the next
        next(self.forward.parameters()).grad.view(torch.int32)[0, 0] ^= 1
    return losses

EagerPass.run = flip_a_bit
sys.exit(run_guarded(sys.argv[1:]))
"""


def test_an_audit_names_the_rank_that_computes_wrong_bits(start_ranks: RunRanks) -> None:
    flags = [*FLAGS, "--data_dir", "words", "--batch_size_warmup", "none", "--audit_freq", "3", "--run_name", "audited"]
    ranks = start_ranks("train", *flags, program=("-c", BROKEN_RANK))
    output = "".join(rank.communicate()[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [79, 79], output
    message = "step 3: rank 1 computed wrong gradients"
    assert message in output
    entries = map(json.loads, Path("runs/audited/ledger.jsonl").read_text(encoding="utf-8").splitlines())
    assert any(entry.get("about") == "audit" and message in entry["message"] for entry in entries)


@pytest.mark.torture
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_matrix(train: Train, way: str) -> None:
    straight = {ranks: train(f"by_{ranks}", ranks, *FLAGS, *WAYS[way]) for ranks in (1, 2, 3, 4)}
    for ranks in (2, 3, 4):
        assert_same(straight[1], straight[ranks], (2, 4))
    for before, after in product((1, 2, 3, 4), repeat=2):
        name = f"{before}_then_{after}"
        shutil.copytree(straight[before], f"runs/{name}", symlinks=True)
        assert_same(train(name, after, "--resume", "2"), straight[1])


@pytest.fixture
def torchrun() -> Iterator[Torchrun]:
    """Starts `gptmill train` by torchrun; kills what still runs in the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*options: str, name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "gptmill", "train", *LONG]
        with Path(f"{name}_{len(started)}.txt").open("w", encoding="utf-8") as output:
            started.append(
                subprocess.Popen(
                    [*words, "--run_name", name, "--resume", "auto"],
                    env=make_environment(**GROWING), stdout=output, stderr=output, start_new_session=True,
                )
            )  # fmt: skip
        return started[-1]

    yield run
    for process in started:
        kill_all(process)


def kill_all(launcher: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its ranks, as a machine does that loses its power."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    for pid in [launcher.pid, *map(int, ranks)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    launcher.wait(MOST_SECONDS)


def wait_for_ranks(run: Path, step: int, ranks: int) -> int:
    """Waits for this step, and for a few steps with so many ranks; returns the process number of the last rank."""
    deadline = time.monotonic() + MOST_SECONDS
    ledger, log = run / "ledger.jsonl", run / "log.txt"
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if not (ledger.exists() and log.exists()):
            continue
        lines = [json.loads(line) for line in ledger.read_text().split("\n")[:-1] if '"RunStarted"' in line]
        done = [int(line.split()[0]) for line in log.read_text().split("\n")[:-1] if "train" in line]
        if lines and done and lines[-1]["ranks"] == ranks and done[-1] >= max(step, lines[-1]["step"] + 3):
            return int(json.loads((run / f"heartbeat/rank_{ranks - 1:05d}.json").read_text())["pid"])
    raise TimeoutError(f"{run} never reached step {step} with {ranks} ranks: {list(Path().glob('*.txt'))}")


@pytest.mark.torture
def test_ranks_that_are_killed_under_torchrun_change_nothing(train: Train, torchrun: Torchrun) -> None:
    straight, victim = train("straight", 1, *LONG), Path("runs/victim")
    launcher = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=5", name="victim")
    killed: set[int] = set()
    for step in (30, 90, 150):
        pid = wait_for_ranks(victim, step, 2)
        assert pid not in killed
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait(MOST_SECONDS) == 0, Path("victim_0.txt").read_text()[-3000:]
    assert_same(straight, victim, (LONG_STEPS,))


@pytest.mark.torture
def test_machines_that_come_and_go_change_nothing(train: Train, torchrun: Torchrun) -> None:
    """One machine, then two, then one again, by torchrun's elastic launch."""
    straight, elastic = train("straight", 1, *LONG), Path("runs/elastic")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = [
        "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=20", "--rdzv-backend=c10d", "--rdzv-id=elastic",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]  # fmt: skip
    timeouts = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    first = torchrun(*options, f"--rdzv-conf=is_host=1,{timeouts}", name="elastic")
    wait_for_ranks(elastic, 20, 1)
    second = torchrun(*options, f"--rdzv-conf=is_host=0,{timeouts}", name="elastic")
    wait_for_ranks(elastic, 60, 2)
    kill_all(second)
    wait_for_ranks(elastic, 100, 1)
    assert first.wait(MOST_SECONDS) == 0, Path("elastic_0.txt").read_text()[-3000:]
    assert_same(straight, elastic, (LONG_STEPS,))

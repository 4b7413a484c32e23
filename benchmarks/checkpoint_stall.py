"""Cost of checkpoints: GPT-2 124M with AdamW, a checkpoint every 250 steps, a snapshot in host memory every 50.

    python benchmarks/checkpoint_stall.py [STEPS] [FLAGS OF GPTMILL TRAIN ...]

Trains on random tokens with a skewed distribution, as in text, and reads the run's own events. The stall of a save is
the extra time of the step before and the step after it, compared with two median steps: the device-to-host copy and
whatever else blocks training. (The step before alone says nothing, since its metrics are read earlier than usual.) The
cost of the background write is the extra time of the following steps. Random tokens make the loss spike at larger
learning rates, and a rollback would count as lost time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TOKENS = 20_000_000
FLAGS = """--device cuda --compile --total_batch_size 131072 --mini_batch_size 64 --warmup_steps 100 --sample_tokens 0
    --eval_freq 1000000 --eval_tokens 65536 --log_freq 1 --keep_checkpoints 2 --max_lr 1e-4
    --min_lr 1e-5""".split()


class Cadence(NamedTuple):
    """Steps between saves and snapshots, before the first that counts, and after a save that its writing may slow."""

    save: int = 250
    snapshot: int = 50
    settled: int = 20
    after: int = 30


CADENCE = Cadence()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", default="560")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more flags of gptmill train")
    options = parser.parse_args()
    report(train(options.steps, options.flags), CADENCE)


def train(
    steps: str, flags: list[str], cadence: Cadence = CADENCE, random_tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """Trains GPT-2 124M, unless the flags say otherwise, and returns the run's events."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        tokens = (50257 * np.random.default_rng(0).random(random_tokens) ** 8).astype(np.uint16)
        tokens.tofile(data / "train.bin")
        tokens[: random_tokens // 100].tofile(data / "val.bin")
        command = [sys.executable, "-m", "gptmill", "train", "--data_dir", str(data), "--tokenizer", "gpt2"]
        where = ["--logdir", folder, "--run_name", "stall", "--max_steps", steps]
        freqs = ["--checkpoint_freq", str(cadence.save), "--snapshot_freq", str(cadence.snapshot)]
        subprocess.run([*command, *FLAGS, *freqs, *where, *flags], check=True, stdout=sys.stderr)
        lines = (Path(folder) / "stall/events.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def report(events: list[dict[str, Any]], cadence: Cadence) -> float:
    """Prints the figures from the events of the run; returns the share of the time that checkpoints cost."""
    times = {event["step"]: event["time"] for event in events if event["event"] == "StepLogged"}
    first, last = cadence.settled, max(times)
    usual = statistics.median(times[step] - times[step - 1] for step in range(first, last + 1))
    print(f"median step {1000 * usual:.1f} ms, {last - first} steps")

    def measure(step: int, count: int) -> float:
        """Returns the extra time of the `count` steps up to this one."""
        return times[step] - times[step - count] - count * usual

    lost = 0.0
    for save in (
        event for event in events if event["event"] == "CheckpointSaved" and event["step"] < last - cadence.after
    ):
        step = save["step"]
        stall, after = measure(step + 1, 2), measure(step + 1 + cadence.after, cadence.after)
        lost += stall + after
        print(
            f"step {step}: {save['size_bytes'] / 1e9:.2f} GB durable after {save['seconds']:.2f} s; training stalled "
            f"{1000 * stall:.0f} ms, and {1000 * after:.0f} ms in the {cadence.after} steps after"
        )
    between = [step for step in range(first, last) if step % cadence.snapshot == 0 and step % cadence.save]
    snapshots = [measure(step + 1, 2) for step in between]
    lost += sum(snapshots)
    print(f"snapshots in host memory: {1000 * statistics.median(snapshots):.0f} ms each, {len(snapshots)} of them")
    share = lost / (times[last] - times[first])
    print(f"total {100 * share:.2f} % of the wall time")
    return share


if __name__ == "__main__":
    main()

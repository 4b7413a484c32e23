"""Cost of checkpoints: GPT-2 124M with AdamW, a checkpoint every 250 steps, a snapshot in host memory every 50.

    python benchmarks/checkpoint_stall.py [STEPS] [FLAGS OF GPTMILL TRAIN ...]

Trains on random tokens with a skewed distribution, as in text, and reads the run's own events. The stall of a save is
the extra time of the step before and the step after it, compared with two median steps: the device-to-host copy and
whatever else blocks training. (The step before alone says nothing, since its metrics are read earlier than usual.) The
cost of the background write is the extra time of the following steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 20_000_000
FREQ = 250
SNAPSHOT_FREQ = 50
SETTLED = 20
AFTER = 30
FLAGS = f"""--device cuda --compile --total_batch_size 131072 --mini_batch_size 64 --warmup_steps 100 --sample_tokens 0
    --eval_freq 1000000 --eval_tokens 65536 --log_freq 1 --checkpoint_freq {FREQ} --keep_checkpoints 2""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", default="560")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more flags of gptmill train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        tokens = (50257 * np.random.default_rng(0).random(TOKENS) ** 8).astype(np.uint16)
        tokens.tofile(data / "train.bin")
        tokens[: TOKENS // 100].tofile(data / "val.bin")
        command = [sys.executable, "-m", "gptmill", "train", "--data_dir", str(data), "--tokenizer", "gpt2"]
        where = ["--logdir", folder, "--run_name", "stall", "--max_steps", options.steps]
        subprocess.run([*command, *FLAGS, *where, *options.flags], check=True, stdout=sys.stderr)
        lines = (Path(folder) / "stall/events.jsonl").read_text().splitlines()
    report([json.loads(line) for line in lines])


def report(events: list[dict[str, Any]]) -> None:
    """Prints the figures from the events of the run."""
    times = {event["step"]: event["time"] for event in events if event["event"] == "StepLogged"}
    first, last = SETTLED, max(times)
    usual = statistics.median(times[step] - times[step - 1] for step in range(first, last + 1))
    print(f"median step {1000 * usual:.1f} ms, {last - first} steps")

    def measure(step: int, count: int) -> float:
        """Returns the extra time of the `count` steps up to this one."""
        return times[step] - times[step - count] - count * usual

    lost = 0.0
    for save in (event for event in events if event["event"] == "CheckpointSaved" and event["step"] < last - AFTER):
        step = save["step"]
        stall, after = measure(step + 1, 2), measure(step + 1 + AFTER, AFTER)
        lost += stall + after
        print(
            f"step {step}: {save['size_bytes'] / 1e9:.2f} GB durable after {save['seconds']:.2f} s; training stalled "
            f"{1000 * stall:.0f} ms, and {1000 * after:.0f} ms in the {AFTER} steps after"
        )
    snapshots = [measure(step + 1, 2) for step in range(first, last) if step % SNAPSHOT_FREQ == 0 and step % FREQ]
    lost += sum(snapshots)
    print(f"snapshots in host memory: {1000 * statistics.median(snapshots):.0f} ms each, {len(snapshots)} of them")
    print(f"total {100 * lost / (times[last] - times[first]):.2f} % of the wall time")


if __name__ == "__main__":
    main()

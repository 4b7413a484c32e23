"""What saving costs training: GPT-2 124M with AdamW through the plain command, a checkpoint every 250 steps.

    python benchmarks/checkpoint_stall.py [STEPS] [FLAGS OF GPTMILL TRAIN ...]

Trains on random tokens (speed does not depend on what they say) and reads the run's own events. The stall of a save is
the time from the end of its step to the end of the next, less the usual step: the copy off the device and whatever
else holds training up. What the writing in the background costs after that is what the next steps take longer.
"""

from __future__ import annotations

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
FLAGS = f"""--device cuda --compile --total_batch_size 131072 --mini_batch_size 64 --warmup_steps 100 --sample_tokens 0
    --eval_freq 1000000 --eval_tokens 65536 --log_freq 1 --checkpoint_freq {FREQ} --keep_checkpoints 2""".split()


def main() -> None:
    steps, extra = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("780", [])
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        tokens = np.random.default_rng(0).integers(0, 50257, TOKENS, dtype=np.uint16)
        tokens.tofile(data / "train.bin")
        tokens[: TOKENS // 100].tofile(data / "val.bin")
        command = [sys.executable, "-m", "gptmill", "train", "--data_dir", str(data), "--tokenizer", "gpt2"]
        place = ["--logdir", folder, "--run_name", "stall", "--max_steps", steps]
        subprocess.run([*command, *FLAGS, *place, *extra], check=True, stdout=sys.stderr)
        lines = (Path(folder) / "stall/events.jsonl").read_text().splitlines()
    report([json.loads(line) for line in lines])


def report(events: list[dict[str, Any]]) -> None:
    """The figures, from the events of the run."""
    times = {event["step"]: event["time"] for event in events if event["event"] == "StepLogged"}
    gaps = {step: times[step] - times[step - 1] for step in sorted(times)[20:]}
    usual = statistics.median(gaps.values())
    saves = [event for event in events if event["event"] == "CheckpointSaved"]
    print(f"usual step {1000 * usual:.1f} ms, {len(gaps)} steps")
    lost = 0.0
    for save in saves:
        step = save["step"]
        if step + 1 not in gaps:
            continue  # the last one, which nothing comes after
        stall = gaps[step + 1] - usual
        after = [gaps[later] - usual for later in range(step + 2, step + 40) if later in gaps]
        lost += stall + sum(after)
        print(
            f"step {step}: {save['size_bytes'] / 1e9:.2f} GB durable after {save['seconds']:.2f} s; "
            f"training stalled {1000 * stall:.0f} ms, and {1000 * sum(after):.0f} ms in the {len(after)} steps after"
        )
    snapshots = [gaps[step + 1] - usual for step in gaps if step % 50 == 0 and step % FREQ and step + 1 in gaps]
    if snapshots:
        lost += sum(snapshots)
        print(f"snapshots in memory: {1000 * statistics.median(snapshots):.0f} ms each, {len(snapshots)} of them")
    print(f"in all {100 * lost / sum(gaps.values()):.2f} % of the wall time")


if __name__ == "__main__":
    main()

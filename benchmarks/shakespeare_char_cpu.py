"""Wall time and validation loss of the recipe shakespeare-char-cpu, start-up and evaluations included.

    python benchmarks/shakespeare_char_cpu.py PATH/TO/input.txt

The setting is nanoGPT's for CPUs: tiny Shakespeare by characters, 4 layers, 4 heads, 128 wide, context 64, 12 windows a
step, 2,000 steps, no dropout, evaluation every 250 steps. The text is prepared before the clock starts.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gptmill.config.recipes import load_recipe
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config
from gptmill.data.run_corpora import open_corpora
from gptmill.evals.loss import ValidationLoss
from gptmill.inference.loading import load_run_model
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.world import World

RECIPE = "shakespeare-char-cpu"
GPTMILL = [sys.executable, "-m", "gptmill"]


def main() -> None:
    text = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare = [*GPTMILL, "prepare", str(text), "--tokenizer", "char", "--val_fraction", "0.1", "--out", "data"]
        subprocess.run(prepare, cwd=place, check=True)
        started = time.perf_counter()
        subprocess.run([*GPTMILL, "train", RECIPE, "--data_dir", "data", "--run_name", "bench"], cwd=place, check=True)
        seconds = time.perf_counter() - started
        loss = score_whole_split(place)
    print(f"\ntorch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{'wall time of gptmill train':<44}{seconds:>8.1f} s")
    print(f"{'validation loss over the whole split':<44}{loss:>8.4f}")


def score_whole_split(place: Path) -> float:
    """The last checkpoint's loss over every validation window, not only those that training looks at."""
    values = load_recipe(RECIPE) | {"corpus": None, "data_dir": str(place / "data"), "precision": "fp32"}
    corpora = open_corpora(build_config(RunConfig, values).data)
    config = build_config(RunConfig, values | {"eval_tokens": corpora.shards[0].manifest.val.tokens})
    cpu = torch.device("cpu")
    loaded = load_run_model(RunDirectory(place / "runs" / "bench"), "latest", cpu)
    evaluator = ValidationLoss(config, corpora, World(0, 1, cpu))
    with torch.no_grad():
        return evaluator.evaluate(loaded.model, loaded.step).val_loss


if __name__ == "__main__":
    main()

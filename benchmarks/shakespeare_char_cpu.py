"""Wall time and validation loss of the recipe shakespeare-char-cpu, including start-up and evaluations.

    python benchmarks/shakespeare_char_cpu.py PATH/TO/input.txt

The setting is nanoGPT's for CPUs: character-level tiny Shakespeare, 4 layers, 4 heads, width 128, context 64, 12
windows a step, 2,000 steps, no dropout, evaluation every 250 steps. The text is prepared before the clock starts.
"""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="tiny Shakespeare's input.txt")
    text = Path(parser.parse_args().text).resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare = [*GPTMILL, "prepare", str(text), "--tokenizer", "char", "--val_fraction", "0.1", "--out", "data"]
        subprocess.run(prepare, cwd=work, check=True)
        started = time.perf_counter()
        subprocess.run([*GPTMILL, "train", RECIPE, "--data_dir", "data", "--run_name", "bench"], cwd=work, check=True)
        seconds = time.perf_counter() - started
        loss = score_whole_split(work)
    print(f"\ntorch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"{'wall time of gptmill train':<44}{seconds:>8.1f} s")
    print(f"{'validation loss over the whole split':<44}{loss:>8.4f}")


def score_whole_split(work: Path) -> float:
    """Returns the loss of the last checkpoint over every validation window, not only those used during training."""
    values = load_recipe(RECIPE) | {"corpus": None, "data_dir": str(work / "data"), "precision": "fp32"}
    corpora = open_corpora(build_config(RunConfig, values).data)
    config = build_config(RunConfig, values | {"eval_tokens": corpora.shards[0].manifest.val.tokens})
    cpu = torch.device("cpu")
    loaded = load_run_model(RunDirectory(work / "runs" / "bench"), "latest", cpu)
    evaluator = ValidationLoss(config, corpora, World(0, 1, cpu))
    with torch.no_grad():
        return evaluator.evaluate(loaded.model, loaded.step).val_loss


if __name__ == "__main__":
    main()

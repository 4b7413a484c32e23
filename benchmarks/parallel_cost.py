"""What each parallel strategy costs on this machine, against a plain run of one process without torchrun.

    python benchmarks/parallel_cost.py [--recipe gpt2-124m] [--ranks 1] [--rounds 3] [--ways plain ddp fsdp exact]
                                       [--data_dir DIR] [--flags "..."]

On one GPU, one rank per way shows what is left of the cost when nothing has to be sent; on a CPU, --ranks 2 shows Gloo.
Every way trains the same batches. Each round measures every way once, interleaved, so that a machine that slows down
slows all of them. Speeds are medians over the steps of a run after its warm-up steps, from its own log. Without
--data_dir, random words are tokenized first.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from runs import SHOWN_CHARACTERS, check_corpus, make_absolute, read_run, run_guarded

from gptmill.config.errors import UserError

WAYS = {
    "plain": "--no_exact_ranks",
    "ddp": "--parallel ddp --no_exact_ranks",
    "zero1": "--parallel zero1 --no_exact_ranks",
    "fsdp": "--parallel fsdp --no_exact_ranks",
    "hsdp": "--parallel hsdp --no_exact_ranks",
    "exact": "--parallel zero1 --exact_ranks",
}
USUAL_WAYS = ("plain", "ddp", "fsdp", "exact")
COMMON = "--eval_freq 1000000 --sample_tokens 0 --checkpoint_freq 1000000 --log_freq 1 --guard warn"
ON_GPU = f"{COMMON} --device cuda --compile --mini_batch_size 64 --total_batch_size 131072 --eval_tokens 65536"
ON_CPU = f"{COMMON} --device cpu --mini_batch_size 4 --total_batch_size 2048 --eval_tokens 512"
SETTLED, MEASURED = 20, 40
WORDS, CORPUS_WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old stones", 400_000


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Compares the speed of parallel strategies with that of a plain run.")
    parser.add_argument("--recipe", default="gpt2-124m" if on_gpu else "shakespeare-char-cpu")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of every way but plain")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=USUAL_WAYS, help="the first is what others compare to"
    )
    parser.add_argument("--data_dir", help="a prepared corpus (default: random words)")
    parser.add_argument("--flags", default="", help="more flags for every run, in quotes")
    parser.add_argument("--run_seconds", type=int, default=600, help="timeout of a run")
    options = parser.parse_args()
    if options.ranks < 1 or options.rounds < 1:
        parser.error("--ranks and --rounds must be at least 1")
    speeds: dict[str, list[float]] = {way: [] for way in options.ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_dir = options.data_dir or make_corpus(folder, "gpt2" if on_gpu else "byte")
        check_corpus(data_dir)
        flags = [*(ON_GPU if on_gpu else ON_CPU).split(), "--data_dir", make_absolute(data_dir), *options.flags.split()]
        print(f"{describe_machine()}; {options.recipe}, {options.ranks} rank(s)\n\n| round | way | tokens/s |")
        print("|---|---|---:|", flush=True)
        for number in range(1, options.rounds + 1):
            for way, found in speeds.items():
                found.append(measure(way, options, flags, folder / f"{way}-{number}"))
                print(f"| {number} | {way} | {found[-1]:,.0f} |", flush=True)
    means = [statistics.fmean(found) for found in speeds.values()]
    print(f"\n| | {' | '.join(speeds)} |\n|---|{'---:|' * len(speeds)}")
    print(f"| mean tokens/s | {' | '.join(f'{mean:,.0f}' for mean in means)} |")
    print(f"| against {options.ways[0]} | {' | '.join(f'{mean / means[0] - 1:+.1%}' for mean in means)} |")
    return 0


def measure(way: str, options: argparse.Namespace, flags: list[str], folder: Path) -> float:
    """Trains with one strategy, and returns the median tokens/s of its last steps."""
    launcher = ["-m", "gptmill"]
    if way != "plain":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}", *launcher]
    where = ["--logdir", str(folder.parent), "--run_name", folder.name, "--max_steps", str(SETTLED + MEASURED)]
    words = [sys.executable, *launcher, "train", options.recipe, *flags, *WAYS[way].split(), *where]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=options.run_seconds)[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    run = read_run(folder)
    if process.returncode or run is None:
        raise UserError(f"{way} failed:\n{output[-SHOWN_CHARACTERS:]}")
    steps = [event["tokens_per_second"] for event in run.select("StepLogged") if event["step"] > SETTLED]
    return statistics.median(steps)


def make_corpus(folder: Path, tokenizer: str) -> str:
    """Prepares random words."""
    generator, words = random.Random(0), WORDS.split()
    text, out = folder / "words.txt", folder / "words"
    text.write_text(" ".join(generator.choice(words) for _ in range(CORPUS_WORDS)), encoding="utf-8")
    words = ["-m", "gptmill", "prepare", str(text), "--tokenizer", tokenizer, "--out", str(out)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the corpus could not be prepared:\n{done.stdout}{done.stderr}")
    return str(out)


def describe_machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return f"{device}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(run_guarded(main))

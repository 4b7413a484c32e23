"""Reads the runs of benchmarks/budget.py as results that the scaling law can be fitted on."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scaling_grid import Cell
from texts import find_density

from gptmill.experiments.budget.candidate import choose_val_fraction

OWN, CLASSIC = 0, 1  # the rows of the budget's own choice, and of the classic recipe, which is of another family
BYTE_VOCAB = 256
RUN_NAME = "run"  # rivals of it have their shape at the end


def read_budget_results(work: Path) -> list[dict[str, Any]]:
    """All finished runs within budgets, also in subfolders, but those of the classic recipe."""
    scored = sorted(work.rglob("*-*s-*/scores.json"))
    return [read_run(path.parent) for path in scored if not path.parent.name.endswith(f"-{CLASSIC}")]


def read_run(folder: Path) -> dict[str, Any]:
    """Losses are those of gptmill eval: its windows overlap, which lowers them by 0.4 % at a context of 128 tokens."""
    corpus, output = folder.name.split("-")[0], (folder / "output.txt").read_text(encoding="utf-8")
    run = find_run(output)
    config = tomllib.loads((folder / "runs" / run / "config.toml").read_text(encoding="utf-8"))
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))["results"][0]
    model, training, optimizer = config["model"], config["training"], config["optimizer"]
    tokens_per_step, bytes_per_token = training["total_batch_size"], scores["num_bytes"] / scores["num_tokens"]
    text_bytes = (folder.parent / f"{corpus}.txt").stat().st_size
    cell = Cell(
        corpus,
        read_vocab_size(output, run),
        model["num_layers"],
        model["embd_size"],
        scores["step"] * tokens_per_step,
        model["dropout"],
        optimizer=optimizer["optimizer"],
    )
    return {
        **asdict(cell),
        "name": f"{cell.name}-{folder.parent.name}-{folder.name}",
        "situation": f"{folder.parent.name}-{folder.name.rpartition('-')[0]}",
        "context_length": model["context_length"],
        "steps": scores["step"],
        "tokens_per_step": tokens_per_step,
        "matrix_lr": optimizer.get("matrix_lr"),
        "density": find_density(folder.parent, corpus),
        "epoch_tokens": round(text_bytes * (1 - choose_val_fraction(text_bytes)) / bytes_per_token),
        "bytes_per_token": bytes_per_token,
        "bits_per_byte": scores["metrics"]["bits_per_byte"]["value"],
    }


def find_run(output: str) -> str:
    """The name of the best run, of which gptmill train says where it is."""
    found = re.search(r"^The run is in runs/(\S+)/\.", output, re.MULTILINE)
    return found[1] if found else RUN_NAME


def read_vocab_size(output: str, run: str) -> int:
    """Of the tokenizer that the budget says it has chosen for this run: the last one that it names before."""
    before = re.split(rf"^run +runs/{re.escape(run)}$", output, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^(?:tokenizer +|rival .*, )(?:byte|bpe-(\d+))\b", before, re.MULTILINE)
    if not found:
        raise ValueError(f"no tokenizer is named in: {output[:200]}")
    return int(found[-1] or BYTE_VOCAB)

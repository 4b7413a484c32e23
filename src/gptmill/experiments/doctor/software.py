"""Checks of what is installed: Python, gptmill, the tokenizer's table, plug-ins and extras. Without torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import gptmill
from gptmill.config.errors import UserError
from gptmill.config.plugins import LOADED, load_installed_plugins
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.experiments.doctor.finding import Finding

GROUP = "software"
LEAST_PYTHON = (3, 11)
HELLO, HELLO_IDS = "Hello world", [15496, 995]
PURPOSES = {
    "data": "parquet, web archives, cleaning, language identification, tokenizer.json, training a tokenizer",
    "hf": "datasets of the Hugging Face hub",
    "cloud": "corpora and mirrors on S3 and other remotes",
    "cluster": "preparing a corpus on a Dask cluster",
    "fast": "faster GPT-2 tokenization",
    "quant": "8-bit AdamW and INT8 weights",
    "pandas": "metrics as data frames",
    "wandb": "Weights & Biases",
    "trackio": "Trackio",
    "eval": "lm-evaluation-harness",
    "export": "GGUF and ONNX",
}
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=([\d.]+))?.*?extra == ['\"]([\w-]+)['\"]")


def check_python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] < LEAST_PYTHON:
        return Finding(
            GROUP, "Python", "failed", found, "gptmill needs Python 3.11 or newer", "python3.12 -m venv .venv"
        )
    return Finding(GROUP, "Python", "ok", found)


def check_bytecode() -> Finding:
    """Where Python cannot keep the bytecode of packages, it compiles torch's source anew at every start."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding(GROUP, "bytecode", "skipped", "torch is not there")
    kept = Path(cache_from_source(spec.origin))
    folder = next(folder for folder in kept.parents if folder.exists())
    if kept.exists() or (os.access(folder, os.W_OK) and not sys.dont_write_bytecode):
        return Finding(GROUP, "bytecode", "ok", f"kept in {kept.parent}")
    return Finding(
        GROUP,
        "bytecode",
        "warning",
        f"torch has none in {kept.parent}, where Python may not write it",
        "every start of gptmill compiles torch's source again, which takes some 8 s",
        "export PYTHONPYCACHEPREFIX=~/.cache/python; unset PYTHONDONTWRITEBYTECODE",
    )


def check_gptmill() -> Finding:
    return Finding(GROUP, "gptmill", "ok", f"{gptmill.__version__} ({Path(gptmill.__file__).parent})")


def check_tokenizer() -> Finding:
    """GPT-2's merge table is in an installed package, so that no download is needed."""
    try:
        ids = Gpt2Tokenizer().encode(HELLO).tolist()
    except UserError as error:
        what, _, fix = str(error).partition("; install it again: ")
        return Finding(GROUP, "GPT-2 tokenizer", "failed", what, "corpora cannot be tokenized with gpt2", fix)
    if ids != HELLO_IDS:
        fix = "pip install --force-reinstall tiktoken"
        return Finding(GROUP, "GPT-2 tokenizer", "failed", f"{HELLO!r} becomes {ids}, not {HELLO_IDS}", "", fix)
    return Finding(GROUP, "GPT-2 tokenizer", "ok", "encodes offline; its merge table is OpenAI's")


def check_plugins() -> Finding:
    """Installed plug-ins are loaded by every command: one that fails stops them all."""
    try:
        load_installed_plugins()
    except UserError as error:
        return Finding(
            GROUP, "plug-ins", "failed", str(error), "every command stops at it", "pip uninstall the plug-in"
        )
    return Finding(GROUP, "plug-ins", "ok", ", ".join(sorted(LOADED)) or "none installed")


def check_extras() -> list[Finding]:
    """Each extra of the installed package: whether its libraries are there, and new enough."""
    missing: dict[str, list[str]] = {}
    try:
        requirements = requires("gptmill") or []
    except PackageNotFoundError:
        what = "unknown: gptmill runs from its source, and is not installed"
        return [Finding("extras", "extras", "skipped", what, "only what needs them is affected", "pip install -e .")]
    for requirement in requirements:
        if (match := REQUIREMENT.match(requirement)) and (extra := match[3]) in PURPOSES:
            missing.setdefault(extra, [])
            if problem := find_problem(match[1], match[2] or "0"):
                missing[extra].append(problem)
    return [_judge_extra(extra, missing[extra]) for extra in PURPOSES if extra in missing]


def find_problem(library: str, least: str) -> str:
    """Why a library does not do: missing or too old; empty if it does."""
    try:
        found = version(library)
    except PackageNotFoundError:
        return library
    return f"{library} {found} is older than {least}" if _parse(found) < _parse(least) else ""


def _judge_extra(extra: str, missing: list[str]) -> Finding:
    if not missing:
        return Finding("extras", extra, "ok", f"installed: {PURPOSES[extra]}")
    what = f"missing: {', '.join(missing)}"
    return Finding("extras", extra, "skipped", what, f"only for {PURPOSES[extra]}", f"pip install 'gptmill[{extra}]'")


def _parse(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    return tuple(int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part)  # type: ignore[index]

"""What README and docs say is true: their commands run, and their tree lists the files that exist."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, make_environment

import gptmill
from gptmill.cli.main import run_guarded

SOURCE = Path(gptmill.__file__).parent
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]
# Commands that install, or that run the tests themselves; what they do is not tested from inside a test.
NOT_RUN = ("make ", "pip install", "python benchmarks/")
SMALL = "--eval_tokens 1024 --sample_tokens 4".split()


def list_commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def shrink(command: str) -> list[str]:
    """The same command, made short enough for a test: fewer steps, and GPU recipes as their own smoke test."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        words = ["--nproc_per_node=2" if word.startswith("--nproc_per_node") else word for word in words]
    else:
        assert words[0] == "gptmill", command
        words = [sys.executable, "-m", "gptmill", *words[1:]]
    verb = words[words.index("gptmill") + 1]
    if verb == "prepare" and "--tokenizer" not in words:
        words += ["--tokenizer", "byte"]  # models of fifty thousand tokens are slow on a CPU
    if "--vocab_size" in words:
        words[words.index("--vocab_size") + 1] = "270"
    if verb == "tune":
        words += "--max_trials 1 --steps 1".split()
    if verb == "bench":
        words += "--steps 1".split()
    if verb == "train" and "--list_checkpoints" not in words:
        words += SMALL
        if any(word.startswith("gpt2-") for word in words):
            words += "--force-cpu --num_layers 1 --embd_size 64 --num_heads 1".split()
        elif "--max_steps" not in words:
            words += ["--max_steps", "2"]
        else:
            words += ["--max_steps", "4"]
    return words


def write_inputs(folder: Path) -> None:
    """The files that the pages speak of."""
    verse = "O Romeo, Romeo! wherefore art thou Romeo?\n"
    (folder / "input.txt").write_text(verse * 3000, encoding="utf-8")
    lines = "".join(json.dumps({"text": f"{number}: {verse}" * (number % 9 + 1)}) + "\n" for number in range(200))
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "more").mkdir()
    (folder / "more" / "lines.jsonl").write_text(lines, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, where torch is loaded already, but for those that start several."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in make_environment().items():
        monkeypatch.setenv(name, value)
    for command in list_commands(page):
        if command.startswith(NOT_RUN):
            continue
        capfd.readouterr()
        words = shrink(command)
        if command.startswith("torchrun"):
            code = subprocess.run(words, timeout=300, check=False).returncode
        else:
            code = run_guarded(words[words.index("gptmill") + 1 :])
        assert code == 0, f"{command}\n{capfd.readouterr()}"


def test_make_targets_that_the_docs_name_exist() -> None:
    named = {target for page in PAGES for target in re.findall(r"\bmake ([a-z]+)\b", page.read_text(encoding="utf-8"))}
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test", "lint"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_tree_in_the_readme_is_the_tree() -> None:
    (tree,) = re.findall(r"```\nsrc/gptmill/\n(.*?)```", (PROJECT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    listed, folders = set(), []
    for line in tree.splitlines():
        entry = re.match(r"( +)([\w./-]+)  ", line)
        assert entry, f"a line of the tree without a clause: {line}"
        depth = len(entry[1]) // 2
        folders = [*folders[: depth - 1], entry[2].rstrip("/")]
        if not entry[2].endswith("/"):
            listed.add("/".join(folders))
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    assert listed == files

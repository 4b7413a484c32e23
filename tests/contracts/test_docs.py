"""README and docs are true: every command runs, every flag, link and file that they name exists."""

from __future__ import annotations

import gzip
import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PROJECT, make_environment
from zygote import Zygote

import gptmill
from gptmill.cli.main import run_guarded
from gptmill.config import requests
from gptmill.config.compress_request import CompressRequest
from gptmill.config.doctor_request import DoctorRequest
from gptmill.config.eval_request import EvalRequest
from gptmill.config.export_request import ExportRequest
from gptmill.config.import_request import ImportRequest
from gptmill.config.plan_request import PlanRequest
from gptmill.config.renamed import RENAMED_FIELDS
from gptmill.config.report_request import ReportRequest
from gptmill.config.run import RunConfig
from gptmill.config.sample_request import SampleRequest
from gptmill.config.schema import list_fields
from gptmill.config.tensorboard_request import TensorBoardRequest
from gptmill.evals import speed

SOURCE = Path(gptmill.__file__).parent
README, ARCHITECTURE = PROJECT / "README.md", PROJECT / "docs" / "architecture.md"
PAGES = [README, PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]
# Commands that install, that run the tests themselves, that measure for minutes, or that serve until Ctrl-C.
NOT_RUN = ("make ", "pip install", "python benchmarks/", "gptmill tensorboard", "wandb ", "trackio ", "TRACKIO_DIR=")
SIZES = {
    "tune": "--steps 1",
    "bench": "--steps 1",
    "sample": "--max_new_tokens 8",
    "tokenizer": "--vocab_size 512",
}
STARTING_OTHERS = ("tune", "bench", "verify-resume", "doctor")
REQUESTS = (
    requests.StartOptions,
    requests.PresetOptions,
    requests.PrepareRequest,
    requests.DataRequest,
    requests.RunsRequest,
    requests.CheckpointsRequest,
    requests.VerifyResumeRequest,
    SampleRequest,
    EvalRequest,
    ImportRequest,
    requests.TokenizerRequest,
    PlanRequest,
    requests.TuneRequest,
    requests.BenchRequest,
    ExportRequest,
    CompressRequest,
    DoctorRequest,
    ReportRequest,
    TensorBoardRequest,
)
OTHER_FLAGS = {"help", "from", "check"}  # aliases, and flags of other programs
OTHER_FLAGS |= {"standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"}
OTHER_FLAGS |= {"build_arg", "init", "rm", "shm_size", "tag", "time", "volume"}  # of docker


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def list_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), flags=re.DOTALL)


def list_anchors(page: Path) -> list[str]:
    """The headings of a page as GitHub's links name them."""
    headings = re.findall(r"^#+ (.+)$", read(page), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def list_commands(page: Path) -> list[str]:
    blocks = [re.sub(r"\\\n *", "", block) for block in list_blocks(page, "bash")]  # joins continued lines
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def list_documented_commands() -> dict[str, str]:
    """Every command of all pages once, in reading order, with the first page that prints it."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in list_commands(page):
            found.setdefault(command, page.name)
    return found


def make_command(command: str) -> list[str]:
    """The words of a command exactly as printed, followed by the sizes of a test, which override those printed."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    else:
        assert words[0] == "gptmill", command
        words = [sys.executable, "-m", "gptmill", *words[1:]]
    return words + choose_corpus(words) + choose_sizes(words)


def choose_sizes(words: list[str]) -> list[str]:
    """Flags that make a command short. A recipe for a GPU is tried as the README says: one step, with --force-cpu."""
    verb = words[words.index("gptmill") + 1]
    if verb == "prepare" and not {"--tokenizer", "data/books"} & {*words}:  # a GPU's recipe wants books by GPT-2's
        return "--tokenizer byte".split()  # the models trained on it have 257 logits, not 50,257
    if verb == "compress" and "--recover_steps" in words:
        return "--recover_steps 2".split()
    if verb in SIZES:
        return SIZES[verb].split()
    if verb != "train":
        return []
    is_recipe_for_gpu = any(word.startswith("gpt2-") for word in words)
    sizes = "--eval_tokens 192 --sample_tokens 4 --total_batch_size 192 --mini_batch_size 1".split()
    has_large_model = is_demo(words) or is_recipe_for_gpu or "shakespeare-char-cpu" in words
    if has_large_model and "--size" not in words:
        sizes += "--num_layers 1 --embd_size 32 --num_heads 1".split()
    if is_recipe_for_gpu:
        sizes += "--context_length 64".split()
    steps = "4" if "--max_steps" in words else "2"
    return [*sizes, *(["--force-cpu"] if is_recipe_for_gpu else ["--max_steps", steps])]


def choose_corpus(words: list[str]) -> list[str]:
    """The demo trains on a small text instead of the ten megabytes of Python's standard library."""
    names_corpus = bool({"--corpus", "--data_dir", "--mixture"} & {*words})
    return "--corpus input.txt".split() if is_demo(words) and not names_corpus else []


def is_demo(words: list[str]) -> bool:
    trains = bool({"train", "tune", "bench"} & {*words})
    return trains and bool({"demo", "continued-pretraining"} & {*words})


def write_inputs(folder: Path) -> None:
    """The files that the pages speak of."""
    generator = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvw" for vowel in ("a", "e", "i", "o", "ea")]
    words = ["".join(generator.choices(syllables, k=generator.randint(2, 4))) for _ in range(6000)]
    lines = [" ".join(["O Romeo,", *generator.choices(words, k=8)]) + "! Ay.\n" for _ in range(3000)]
    (folder / "input.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "letter.txt").write_text("".join(lines[:10]), encoding="utf-8")
    records = "".join(
        json.dumps({"text": "".join(lines[number : number + number % 4 + 1])}) + "\n" for number in range(120)
    )
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    shutil.copytree(PROJECT / "examples", folder / "examples")
    write_llmc(folder / "gpt2_124M.bin")
    (folder / "more").mkdir()
    (folder / "more" / "lines.jsonl").write_text(records, encoding="utf-8")


def write_llmc(path: Path) -> None:
    """A checkpoint of llm.c: a GPT-2 of one layer, eight wide."""
    layers, heads, width, context, vocab_size, padded = 1, 1, 8, 96, 50_257, 50_304
    header = np.zeros(256, "<i4")
    header[:8] = [20240326, 3, context, vocab_size, layers, heads, width, padded]
    count = (padded + context) * width + 12 * width**2 + 13 * width + 2 * width
    weights = np.random.default_rng(0).normal(0, 0.02, count).astype("<f4")
    path.write_bytes(header.tobytes() + weights.tobytes())


@pytest.mark.usefixtures("no_new_parts")
def test_every_command_and_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], zygote: Zygote
) -> None:
    """All pages share one folder, so that a command printed twice runs once.

    Commands run in this process, where torch is already loaded. Those that start others are forked, and so are these.
    """
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "GENERATED", 4)
    for name, value in make_environment().items():
        monkeypatch.setenv(name, value)
    for command, page in list_documented_commands().items():
        if command.startswith(NOT_RUN):
            continue
        capfd.readouterr()
        words = make_command(command)
        if command.startswith("torchrun") or words[words.index("gptmill") + 1] in STARTING_OTHERS:
            process = zygote.run(words[1:], tmp_path, make_environment())
            code, output = process.returncode, f"{process.stdout}\n{process.stderr}"
        else:
            code = run_guarded(words[words.index("gptmill") + 1 :])
            output = str(capfd.readouterr())
        assert code == 0, f"{page}: {command}\n{output}"
    snippets = [(page, block) for page in PAGES for block in list_blocks(page, "python")]
    assert snippets
    names: dict[Path, dict[str, object]] = {page: {} for page in PAGES}  # the blocks of a page share theirs
    for page, block in snippets:
        exec(compile(block, str(page), "exec"), names[page])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page: Path) -> None:
    names = {field.name for config in (RunConfig, *REQUESTS) for field in list_fields(config)}
    names |= {f"no_{name}" for name in names} | RENAMED_FIELDS.keys() | OTHER_FLAGS
    for benchmark in (PROJECT / "benchmarks").rglob("*.py"):
        names |= set(re.findall(r'add_argument\(\s*"--(\w+)"', read(benchmark)))
    for example in (PROJECT / "examples").glob("*.py"):  # options of plug-ins
        names |= set(re.findall(r"^    (\w+): (?:int|float|str|bool) = ", read(example), re.MULTILINE))
    text = read(page)
    if page.name.startswith("from-"):  # their names are in the first column of each table
        text = re.sub(r"^\|.*?\|", "|", text, flags=re.MULTILINE)
    named = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    assert named <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_benchmark_exists(page: Path) -> None:
    text = read(page)
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target), f"{link}#{anchor}"
    for name in re.findall(r"benchmarks/[\w/]+\.py", text):
        assert (PROJECT / name).is_file(), name


def test_make_targets_that_the_docs_name_exist() -> None:
    named = {target for page in PAGES for target in re.findall(r"(?:`|^)make ([a-z-]+)", read(page), re.MULTILINE)}
    makefile = read(PROJECT / "Makefile")
    assert {"demo", "test", "test-fast", "lint"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def list_tree(page: Path) -> set[str]:
    """The entries of a page's tree of src/gptmill, as paths; folders end with a slash."""
    (tree,) = re.findall(r"```\nsrc/gptmill/\n(.*?)```", read(page), re.DOTALL)
    listed, folders = set(), []
    for line in tree.splitlines():
        entry = re.match(r"( +)([\w./-]+)  ", line)
        assert entry, f"a line of the tree without a clause: {line}"
        depth = len(entry[1]) // 2
        folders = [*folders[: depth - 1], entry[2].rstrip("/")]
        listed.add("/".join(folders) + "/" * entry[2].endswith("/"))
    return listed


def test_the_tree_in_the_architecture_page_lists_every_file() -> None:
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    assert {path for path in list_tree(ARCHITECTURE) if not path.endswith("/")} == files


def test_the_tree_in_the_readme_lists_every_package() -> None:
    packages = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.glob("*/**/__init__.py")}
    listed = list_tree(README)
    assert packages <= listed
    assert all((SOURCE / path).is_dir() for path in listed)


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len(read(README).splitlines()) <= 200

"""What the tests share: tiny corpora, tiny runs, the command line as a real process, and real data where it is."""

from __future__ import annotations

import gc
import logging
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings
from zygote import Process, Zygote

from gptmill.api.registration import TABLES
from gptmill.config.plugins import LOADED, PARTS
from gptmill.config.schema import list_fields
from gptmill.config.trust import PLACE as TRUSTED

PROJECT = Path(__file__).parent.parent
TESTS = str(PROJECT / "tests")
ZYGOTE = "GPTMILL_TESTS_ZYGOTE"  # where workers find the process that they were forked from
BEGAN = time.monotonic()

# A run of seconds: two layers, sixteen wide, on one thread so that tests beside each other do not fight.
TINY_FLAGS = (
    "--num_layers 2 --embd_size 16 --num_heads 2 --context_length 16 --total_batch_size 128 --mini_batch_size 4 "
    "--warmup_steps 2 --eval_tokens 64 --sample_tokens 4 --device cpu"
).split()


# A property is tried on a few examples at every run, and they differ from run to run.
settings.register_profile("few", max_examples=30, deadline=None)
settings.load_profile("few")

# What a test names that starts processes, compiles, or imports for seconds; PROGRAM is what trials start, which tests
# replace.
SLOW_NAMES = frozenset(
    "subprocess multiprocessing ProcessPoolExecutor fork Zygote compile supervise PROGRAM transformers".split()
)

# What takes seconds to import. Tests that name it are the first ones of all, so that one worker runs most of them.
LARGE_NAMES = frozenset("transformers lm_eval run_harness open_harness list_documented_commands".split())

# What was looked through for names, and has none of them.
WITHOUT: dict[frozenset[str], set[int]] = {}

EXACT_STEPS = 40
EXACT_FLAGS = [
    *TINY_FLAGS,
    *f"--data_dir words --max_steps {EXACT_STEPS} --checkpoint_freq 8 --eval_freq 10 --dropout 0.1".split(),
]


# Where fsync costs nothing: the tests write hundreds of megabytes, durably, and would wait for the disk.
MEMORY_DISK = Path("/dev/shm")
MEMORY_DISK_BYTES = 6 << 30
TEMPORARY_ROOT = "PYTEST_DEBUG_TEMPROOT"  # pytest's own variable


def pytest_configure(config: pytest.Config) -> None:
    """Puts the tests' folders into memory where there is room, unless another place is named.

    And gives what the tests start the signals of a program in the foreground: a background job and nohup ignore some of
    them, and children inherit that. A handler that does nothing has the same effect here, and no child inherits it."""
    if config.option.basetemp is None and has_room(MEMORY_DISK):
        os.environ.setdefault(TEMPORARY_ROOT, str(MEMORY_DISK))
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    trusted = tempfile.TemporaryDirectory(prefix="gptmill-tests-")
    config.add_cleanup(trusted.cleanup)
    os.environ[TRUSTED] = f"{trusted.name}/trusted.json"  # not that of the user who tests
    logging.getLogger().addHandler(logging.NullHandler())  # what libraries log is not part of what a program prints


def has_room(folder: Path) -> bool:
    """Containers often have little of it, and forbid to run what is there, as compiled models are."""
    if not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize > MEMORY_DISK_BYTES and not found.f_flag & os.ST_NOEXEC


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what starts processes, compiles or reads real data, and puts it first: short tests fill up the end
    of a run, or those that take the time that is left."""
    for item in items:
        if item.get_closest_marker("realdata") or "compil" in item.nodeid or names(item, SLOW_NAMES):
            item.add_marker("slow")
    items.sort(
        key=lambda item: (is_unending(item), item.get_closest_marker("slow") is None, not names(item, LARGE_NAMES))
    )


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take from each other what is left, since the slow tests come first: for `-n` without a `--dist`."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked as well: to import torch in each of them takes as long as a hundred tests."""
    folder = tempfile.TemporaryDirectory(prefix="gptmill-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ[ZYGOTE] = f"{folder.name}/requests"
    zygote = Zygote.open(make_environment(), os.environ[ZYGOTE])
    config.add_cleanup(zygote.close)
    rewrite_asserts(config)
    for spec in specs:
        spec.python = shlex.join([sys.executable, f"{TESTS}/zygote.py", os.environ[ZYGOTE]])


def rewrite_asserts(config: pytest.Config) -> None:
    """Compiles the tests as pytest does, once, while the zygote imports; in a clean clone every worker would do it."""
    if sys.dont_write_bytecode:
        return
    given = [Path(word.partition("::")[0]) for word in config.args]
    for path in [file for each in given for file in ([each] if each.is_file() else each.rglob("test_*.py"))]:
        compiled = rewrite.get_cache_dir(path.resolve()) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(compiled.parent):
            source_hash, code = rewrite._rewrite_test(path.resolve(), config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


def names(item: pytest.Item, wanted: frozenset[str]) -> bool:
    """Whether a test or one of its fixtures, or a function of the tests that these call, uses one of the names."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(definition.func for each in fixtures for definition in each)]
    return any(uses(function, wanted) for function in functions)


@cache
def uses(function: object, wanted: frozenset[str]) -> bool:
    seen: set[int] = set()
    found = reaches(function, wanted, seen)
    if not found:
        WITHOUT.setdefault(wanted, set()).update(seen)
    return found


def reaches(called: object, wanted: frozenset[str], seen: set[int]) -> bool:
    called = getattr(called, "__wrapped__", called)
    if id(called) in seen or id(called) in WITHOUT.get(wanted, ()):
        return False
    seen.add(id(called))
    if isinstance(called, type):
        return any(reaches(method, wanted, seen) for method in vars(called).values() if callable(method))
    if not isinstance(called, FunctionType) or not is_of_tests(called):
        return False
    used = find_names(called.__code__)
    return bool(used & wanted) or any(reaches(called.__globals__.get(name), wanted, seen) for name in used)


def is_of_tests(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(TESTS)


@cache
def find_names(code: CodeType) -> frozenset[str]:
    return frozenset(list_names(code))


def list_names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, also as strings and in the functions inside it."""
    for name in code.co_names:
        yield from name.split(".")
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from list_names(constant)


def pytest_collection() -> None:
    """Nothing that is collected goes away again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spares every later garbage collection the modules that are imported by now."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch  # which the process that starts the workers does without

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _keep_onednn() -> Iterator[None]:
    """A bf16 matmul switches oneDNN off for the rest of the process, on ARM CPUs without bf16."""
    from torch.backends import mkldnn

    was_enabled = mkldnn.enabled
    yield
    if mkldnn.enabled != was_enabled:
        mkldnn.enabled = was_enabled


@pytest.fixture
def nothing_autotuned() -> Iterator[None]:
    """An empty autotuning cache; what it held before is restored afterwards."""
    from gptmill.models.kernels.gemm import autotuned

    kept = dict(autotuned)
    autotuned.clear()
    yield
    autotuned.clear()
    autotuned.update(kept)


@pytest.fixture
def no_new_parts() -> Iterator[None]:
    """Forgets what plug-ins register during a test."""
    tables = [getattr(import_module(module), name) for module, name in TABLES.values()]
    kept = [dict(table) for table in (PARTS, LOADED, *tables)]
    yield
    for name in LOADED.values():
        sys.modules.pop(name, None)
    for table, before in zip((PARTS, LOADED, *tables), kept, strict=True):
        table.clear()
        table.update(before)
    list_fields.cache_clear()


def write_words(folder: Path) -> Path:
    """words.txt: about 30 kB, the same every time."""
    generator = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog while rain falls on old stones and rivers rise".split()
    path = folder / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(6000)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_words(tmp_path)


GptMill = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Where the programs under test are forked from; workers share one."""
    if ZYGOTE in os.environ:
        zygote = Zygote.connect(os.environ[ZYGOTE])
    else:
        zygote = Zygote.open(make_environment(), str(tmp_path_factory.mktemp("zygote") / "requests"))
    yield zygote
    zygote.close()


@pytest.fixture
def gptmill(tmp_path: Path, zygote: Zygote) -> GptMill:
    """Runs `gptmill` as a user would, in an empty folder, and returns the finished process."""

    def run(*arguments: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        process = zygote.run(["-m", "gptmill", *arguments], tmp_path, make_environment(**environment))
        assert not check or process.returncode == 0, f"exit {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process

    return run


def run_forked(arguments: Sequence[str], folder: Path, zygote: Zygote) -> subprocess.CompletedProcess[str]:
    """`gptmill` in a folder, for fixtures that live longer than a test."""
    process = zygote.run(["-m", "gptmill", *arguments], folder, make_environment())
    assert process.returncode == 0, f"exit {process.returncode}\n{process.stdout}\n{process.stderr}"
    return process


@pytest.fixture(scope="session")
def _straight(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    run_forked(["prepare", str(write_words(folder)), "--tokenizer", "byte", "--out", "words"], folder, zygote)
    run_forked(["train", *EXACT_FLAGS, "--run_name", "straight"], folder, zygote)
    return folder


@pytest.fixture
def straight(_straight: Path, tmp_path: Path) -> Path:
    """The run runs/straight, trained without a break by EXACT_FLAGS, and its corpus words, in the test's folder."""
    shutil.copytree(_straight, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "runs/straight"


@pytest.fixture
def words(_straight: Path, tmp_path: Path) -> list[str]:
    """The flags that name the corpus words, prepared in the test's folder from words.txt."""
    shutil.copytree(_straight / "words", tmp_path / "words", dirs_exist_ok=True)
    shutil.copyfile(_straight / "words.txt", tmp_path / "words.txt")
    return ["--data_dir", "words"]


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, zygote: Zygote) -> Iterator[Start]:
    """Starts `gptmill` in the test's folder, to be followed and signalled; what still runs in the end is killed.

    Standard error is part of the output unless the options say otherwise.
    """
    started: list[Process] = []

    def run(
        *arguments: str | Path,
        program: Sequence[str] = ("-m", "gptmill"),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Process:
        started.append(zygote.start([*program, *arguments], tmp_path, make_environment(**environment or {}), **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


RunRanks = Callable[..., list[Process]]


@pytest.fixture
def start_ranks(start: Start) -> RunRanks:
    """Starts a command as two ranks, or `count`, with the environment that torchrun gives them on some machines."""

    def run(
        *arguments: str, program: Sequence[str] = ("-m", "gptmill"), count: int = 2, machines: int = 1
    ) -> list[Process]:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count // machines),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        numbers = map(str, range(count))
        ranks = ({**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in numbers)
        return [start(*arguments, program=program, environment=environment) for environment in ranks]

    return run


@pytest.fixture
def run_ranks(start_ranks: RunRanks) -> RunRanks:
    """Runs a command as ranks to their end, which must be a good one."""

    def run(*arguments: str, **options: Any) -> list[Process]:
        ranks = start_ranks(*arguments, **options)
        outputs = [rank.communicate()[0] for rank in ranks]
        assert {rank.returncode for rank in ranks} == {0}, "\n".join(outputs)
        return ranks

    return run


MountTmpfs = Callable[[Path, str], Path]


@pytest.fixture
def mount_tmpfs() -> Iterator[MountTmpfs]:
    """Mounts a file system of a size on a folder, until the test ends; skips the test where this user may not."""
    mounted: list[Path] = []

    def mount(folder: Path, size: str) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, timeout=20).returncode:
            pytest.skip("this user cannot mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:  # lazily: gguf maps the file that it reads
        subprocess.run(["umount", "--lazy", str(folder)], timeout=20, check=True)


def wait_for_text(process: Process, file: Path, text: str) -> None:
    """Returns once the file of a program that runs holds the text."""
    deadline = time.monotonic() + 120
    while not (file.exists() and text in file.read_text(encoding="utf-8")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{file} never had {text!r}"
        time.sleep(0.002)


def replace_sleep(monkeypatch: pytest.MonkeyPatch, module: ModuleType, sleep: Callable[[float], None]) -> None:
    """Replaces time.sleep for one module: threads of libraries sleep, too."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))


def make_environment(**extra: str) -> dict[str, str]:
    """The environment of a process under test: one thread, no colours, a terminal of known width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100", **extra}


def is_unending(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "torture_budget" in item.fixturenames


TortureBudget = Callable[[int], Iterator[int]]


@pytest.fixture
def torture_budget(request: pytest.FixtureRequest) -> Iterator[TortureBudget]:
    """Seeds, at least so many, until the test's share is over: `for seed in torture_budget(100):`.

    The tests that ask for this run last, and divide what is left of GPTMILL_TORTURE_MINUTES. A case should follow from
    its seed: GPTMILL_TORTURE_SEED begins with the one that failed."""
    items, began = request.session.items, time.monotonic()
    end = BEGAN + 60 * float(os.environ.get("GPTMILL_TORTURE_MINUTES", "40"))
    share = (end - began) / sum(is_unending(item) for item in items[items.index(request.node) :])
    first, cases = int(os.environ.get("GPTMILL_TORTURE_SEED", random.randrange(1 << 32))), 0

    def spend(least: int) -> Iterator[int]:
        nonlocal cases
        while cases < least or time.monotonic() < began + share:
            cases += 1
            yield first + cases - 1

    yield spend
    minutes, last = (time.monotonic() - began) / 60, first + cases - 1
    print(f"\n{request.node.name}: {cases} cases in {minutes:.1f} min, the last with GPTMILL_TORTURE_SEED={last}")  # noqa: T201


@pytest.fixture
def realdata() -> Path:
    """The folder of real corpora; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("GPTMILL_REALDATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set GPTMILL_REALDATA")
    return folder

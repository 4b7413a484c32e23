"""Whether this tree gives the same bytes as another commit: `make digests BASE=COMMIT [ROOM=data]`.

Two processes, one that runs this tree, uncommitted changes included, and one that runs BASE (a commit, which gets a
worktree in a temporary folder, or a folder that holds a checkout), go through the same rows beside each other, on one
thread each. A row is a list of command lines, given to `gptmill.cli.main.run_guarded` in a process of its own. Both
take them from this tree's digest_rows.py. Only "shared cases" come from the trees themselves: each runs its own
tests/**/shared_cases.py, as a program.

Compared, as SHA-256, one by one:
- training: model, optimizer and EMA tensor files and checkpoint.json of the last checkpoint, log.txt, and, in full
  precision, the losses, norms and learning rates of every step and the validation losses (events.jsonl)
- data: every file of a prepared corpus, its manifest and origins included; trained tokenizers; scores
- models that leave: every file of an export, tensors, config and tokenizer alike; an export that is imported again;
  compressed weights; texts that are sampled, with their log-probabilities; losses that `eval` measures

A JSON file is compared key by key, in any layout. EXCLUDED names what must differ, or may. A row that fails on one side
or on both is a difference. The row "gpu" needs one, and runs alone with --row gpu: training with dropout, in bf16,
compiled, --deterministic.

The exit code is 1 if anything differs, and 0 if nothing does. Any Python that imports torch and what src/ needs will
do; rows that need more are named as not run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from digest_rows import Row, list_rows, write_inputs

PROJECT = Path(__file__).parent.parent
MEMORY_DISK = Path("/dev/shm")  # where fsync costs nothing

# Rows that are gone by a decision, and what differs by one, as patterns of "row" or "row: what", with the commit:
#   "variant fp8 in all layers": "1a2b3c4 removes it",
#   "prepare *: *manifest.json: source": "5d6e7f8 records the license",
# They are shown, and are no difference.
DECIDED: dict[str, str] = {
    "*: *manifest.json: version": "5b2cb81 has checksums of the origins",
    "*: *origins/names.*": "8cc3611 keeps the names of sources in JSON",
    "prepare option *: *manifest.json: cleaning": "44d4c92 escapes control characters in examples",
}

# Files and keys of JSON, at any depth, that are not compared.
EXCLUDED = {
    "README.md": "a model card tells the date and the version",
    "saved_at": "a time",
    "logs": "lengths and checksums of logs, which hold times",
    "seconds": "a time",
    "code": "a fingerprint of the source",
    "gptmill_version": "commits may differ in it",
    "config": "options that are renamed or retired; what they do is in the tensors",
    "origins_sha256": "of files that are compared themselves, and of which 2ae646c recorded none",
    "names_sha256": "likewise",
    "sha256": "of files that are compared themselves; a checkpoint.json's own covers its times",
}
# What events.jsonl is compared by; the rest are times and the machine.
MEASURED = "event step epoch lr loss grad_norm val_loss ema_loss tokens by_corpus objective experts skipped".split()

# What the two corpora of most rows are made by.
SETUP = [
    "prepare inputs/words.txt --processes 1 --tokenizer byte --val_fraction 0.1 --out words",
    "prepare inputs/mixed.jsonl --processes 1 --tokenizer byte --split documents --shard_tokens 3000 --out docs",
    "data score docs --by length",
]
# What is imported for seconds by a command that a row may have, and else would be by each of them.
IMPORTED = {"train": "torch._dynamo", "export": "transformers.modeling_utils"}


def run_side(tree: Path, folder: Path, rows: list[Row]) -> None:
    """Prints the digests of each row as a line of JSON; the folder holds the inputs."""
    os.chdir(folder)
    package = import_module("gptmill")
    assert Path(package.__file__ or "").is_relative_to(tree), f"{package.__file__} is not in {tree}"
    words = {word for row in rows for command in row.commands for word in command.split()}
    modules = [module.name for module in walk_packages(package.__path__, "gptmill.")]
    for name in [*modules, *(IMPORTED[word] for word in words & IMPORTED.keys())]:
        if not name.endswith("__main__"):
            with suppress(ImportError):
                import_module(name)
    failed = run_apart(tree, folder, Row("", "", SETUP, [])).get("failed")
    if failed:
        sys.exit(f"{tree}: {failed}")
    for number, row in enumerate(rows):
        place = folder / f"row_{number}"
        place.mkdir()
        for name in ("inputs", "words", "docs"):
            (place / name).symlink_to(folder / name)
        print(json.dumps([row.name, run_apart(tree, place, row)]), flush=True)
        shutil.rmtree(place)


def run_apart(tree: Path, place: Path, row: Row) -> dict[str, str]:
    """Runs a row in a fork, which may import, patch and register what it likes."""
    answer = place / ".answer.json"
    if pid := os.fork():
        status = os.waitpid(pid, 0)[1]
        return json.loads(answer.read_text()) if answer.exists() else {"failed": f"ended with status {status}"}
    with (place / ".said.txt").open("w", encoding="utf-8") as said:
        for number in (1, 2):
            os.dup2(said.fileno(), number)
    try:
        os.chdir(place)
        for command in row.commands:
            run(command, tree)
        found = digest(place, row.outputs)
    except BaseException as error:
        sys.stderr.flush()
        said_last = (place / ".said.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        found = {"failed": f"{error}: {' | '.join(said_last)}"}
    answer.write_text(json.dumps(found))
    os._exit(0)


def run(command: str, tree: Path) -> None:
    words = shlex.split(command)
    if words[0].isdigit():
        run_ranks(int(words[0]), shlex.join(words[1:]), tree)
        return
    with ExitStack() as stack:
        if ">" in words:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(words[-1]).open("w", encoding="utf-8"))))
            words = words[:-2]
        if words[0] == "gpu":
            code = subprocess.run([sys.executable, "-m", "gptmill", *words[1:]]).returncode
        elif words[0] == "shared_cases":
            code = run_shared_cases(tree, words[1])
        else:
            code = import_module("gptmill.cli.main").run_guarded(words)
    if code:
        raise RuntimeError(f"exit code {code}")


def run_ranks(count: int, command: str, tree: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(count):
        ranks.append(os.fork())
        if not ranks[-1]:
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({name: str(value) for name, value in own.items()})
            code = 1
            try:
                run(command, tree)
                code = 0
            except BaseException as error:
                sys.stderr.write(f"rank {rank}: {error!r}\n")
            finally:
                sys.stderr.flush()
                os._exit(code)
    if codes := [code for code in (os.waitpid(rank, 0)[1] for rank in ranks) if code]:
        raise RuntimeError(f"ranks ended with {codes}")


def run_shared_cases(tree: Path, strategy: str) -> int:
    """All cases of the tree's own file, by its own program."""
    (program,) = (tree / "tests").rglob("shared_cases.py")
    tables = [node for node in ast.parse(program.read_text(encoding="utf-8")).body if isinstance(node, ast.AnnAssign)]
    (table,) = (node.value for node in tables if isinstance(node.target, ast.Name) and node.target.id == "CASES")
    assert isinstance(table, ast.Dict)
    names = [ast.literal_eval(key) for key in table.keys if key is not None]
    Path("cases").mkdir(exist_ok=True)
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program), strategy, ",".join(names), "words", "cases", "2"]
    runpy.run_path(str(program), run_name="__main__")
    return 0


def digest(place: Path, patterns: list[str]) -> dict[str, str]:
    """SHA-256 of what was written, by file, and by key where it is JSON."""
    found: dict[str, str] = {}
    for path in sorted({path for pattern in patterns for path in place.glob(pattern)}):
        name = path.relative_to(place).as_posix().removeprefix("runs/run/").removeprefix("checkpoints/latest/")
        if path.name in EXCLUDED or not path.is_file():
            continue
        if path.suffix == ".jsonl":
            events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            kept = [{key: event[key] for key in MEASURED if key in event} for event in events]
            found[name] = hash_json([each for each in kept if each["event"] in ("StepLogged", "EvalDone")])
        elif path.suffix == ".json":
            text = path.read_text(encoding="utf-8").replace(str(place), "")
            try:
                content = json.loads(text)
            except ValueError:  # an object a line
                content = [json.loads(line) for line in text.splitlines()]
            found |= {f"{name}: {key}": value for key, value in digest_json(content)}
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if unmet := [pattern for pattern in patterns if not list(place.glob(pattern))]:
        raise RuntimeError(f"nothing was written to {', '.join(unmet)}")
    return found


def digest_json(content: Any) -> Iterator[tuple[str, str]]:
    """The digest of each key, and of the keys of "values"."""
    if not isinstance(content, dict):
        yield "all", hash_json(content)
        return
    for key, value in content.items():
        if key == "values":
            yield from ((f"values.{inner}", one) for inner, one in digest_json(value))
        elif key not in EXCLUDED:
            yield key, hash_json(value)


def hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(leave_out(content), sort_keys=True).encode()).hexdigest()


def leave_out(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: leave_out(value) for key, value in content.items() if key not in EXCLUDED}
    return [leave_out(value) for value in content] if isinstance(content, list) else content


Digests = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Difference:
    row: str
    what: str
    base: str
    now: str


def compare(base: Digests, now: Digests) -> list[Difference]:
    """What differs, and what failed."""
    return [
        Difference(row, what, base[row].get(what, "absent"), now[row].get(what, "absent"))
        for row in now
        for what in dict.fromkeys([*base[row], *now[row]])
        if base[row].get(what) != now[row].get(what) or what == "failed"
    ]


def is_decided(difference: Difference) -> bool:
    return any(fnmatch(f"{difference.row}: {difference.what}", pattern) for pattern in DECIDED)


def choose_rows(room: str, pattern: str) -> tuple[list[Row], dict[str, str]]:
    """The rows to run, and why others are not."""
    rows = [row for row in list_rows() if room in ("", *row.rooms.split()) and fnmatch(row.name, pattern)]
    not_run = {name: reason for name, reason in DECIDED.items() if ": " not in name}
    rows = [row for row in rows if not any(fnmatch(row.name, name) for name in not_run)]
    if not rows:
        rooms = sorted({room for row in list_rows() for room in row.rooms.split()})
        sys.exit(f"no row {pattern} is of the room {room}; there are {', '.join(rooms)}")
    missing = {row.name: [name for name in row.needs.split() if not find_spec(name)] for row in rows}
    not_run |= {name: f"needs {', '.join(names)}" for name, names in missing.items() if names}
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if any(row.name == "gpu" for row in rows) and subprocess.run([sys.executable, "-c", program]).returncode:
        not_run["gpu"] = "needs a GPU"
    return [row for row in rows if row.name not in not_run], not_run


def start_side(tree: Path, folder: Path, rows: list[Row]) -> subprocess.Popen[str]:
    (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}/src{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--side", str(tree), str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def run_both(trees: dict[str, Path], rows: list[Row], folder: Path) -> dict[str, Digests]:
    """The digests of both sides, which run beside each other; shows how far they are."""
    write_inputs(folder / "inputs")
    lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
    found: dict[str, Digests] = {side: {} for side in trees}
    with ExitStack() as stack:
        for side, tree in trees.items():
            (folder / side).mkdir()
            (folder / side / "inputs").symlink_to(folder / "inputs")
            process = start_side(tree, folder / side, rows)
            stack.callback(end, process)

            def read(side: str = side, process: subprocess.Popen[str] = process) -> None:
                for line in process.stdout or ():
                    lines.put((side, line))
                lines.put((side, None))

            threading.Thread(target=read, daemon=True).start()
        began = time.monotonic()
        for done, row in enumerate(rows, 1):
            while not all(row.name in digests for digests in found.values()):
                side, line = lines.get()
                if line is not None:
                    name, digests = json.loads(line)
                    found[side][name] = digests
                elif row.name not in found[side]:
                    sys.exit(f"the process of {side} has ended before {row.name}")
            differs = "differs" if compare(*({row.name: digests[row.name]} for digests in found.values())) else "equal"
            seconds = time.monotonic() - began
            left = seconds / done * (len(rows) - done)
            print(f"{done:>3}/{len(rows)}  {differs:<7}  {row.name:<40} {seconds:.0f} s, {left:.0f} s left", flush=True)
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Ends a side and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def open_base(base: str, folder: Path, stack: ExitStack) -> Path:
    """The folder of a checkout of BASE."""
    if (Path(base) / "src/gptmill").is_dir():
        return Path(base).resolve()
    git = ["git", "-C", str(PROJECT), "worktree"]
    place = folder / "checkout"
    stack.callback(subprocess.run, [*git, "remove", "--force", str(place)], stderr=subprocess.DEVNULL)
    if code := subprocess.run([*git, "add", "--quiet", "--detach", str(place), base]).returncode:
        sys.exit(code)  # git has said why
    return place


def show(differences: list[Difference]) -> None:
    table = [("row", "what", "base", "now")]
    table += [(each.row, each.what, each.base[:12], each.now[:12]) for each in differences if each.what != "failed"]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table[len(table) == 1 :]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for each in differences:
        if each.what == "failed":
            print(f"{each.row}: failed\n  base: {each.base}\n  now: {each.now}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a commit, or the folder of a checkout")
    parser.add_argument(
        "--room", default="", help="only the rows of one room, such as data, training, models, interchange"
    )
    parser.add_argument("--row", default="*", help="only the rows of this name, or pattern, such as gpu or 'variant *'")
    parser.add_argument("--side", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        tree, folder = options.side
        run_side(tree, folder, [Row(**row) for row in json.loads((folder / "rows.json").read_text())])
        return 0
    if not options.base:
        parser.error("name a commit: make digests BASE=COMMIT")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    rows, not_run = choose_rows(options.room, options.row)
    parent = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gptmill-digests-", dir=parent)))
        trees = {"base": open_base(options.base, folder, stack), "now": PROJECT.resolve()}
        found = run_both(trees, rows, folder) if rows else {"base": {}, "now": {}}
    differences = compare(found["base"], found["now"])
    decided = [each for each in differences if is_decided(each)]
    new = [each for each in differences if not is_decided(each)]
    for title, listed in (("differs as decided", decided), ("differs", new)):
        if listed:
            print(f"\n{title}:")
            show(listed)
    print()
    for name, reason in not_run.items():
        print(f"not run: {name}: {reason}")
    count = sum(map(len, found["now"].values()))
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    summary = f"{len({each.row for each in new})} of them differ" if new else "all equal"
    print(f"{len(rows)} rows with {count} digests in {minutes} min {seconds} s: {summary}")
    return bool(new)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""Finds and reads the data of tasks: JSON Lines, plain or compressed, alone, in a folder or in a zip archive."""

from __future__ import annotations

import fnmatch
import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from gptmill.config.errors import UserError
from gptmill.config.json_text import parse_record
from gptmill.config.regular_files import open_regular
from gptmill.config.requests import ReadingOptions
from gptmill.data.files import find_cache_dir
from gptmill.data.sources.compression import COMPRESSIONS, DecompressedFile, split_compression
from gptmill.data.sources.download import DownloadError, download_file, hash_content
from gptmill.data.sources.formats.lines import BYTE_ORDER_MARK, read_lines
from gptmill.evals.prompts import Example, RecordError, make_example
from gptmill.evals.task import Task

SUFFIXES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSIONS))
RESOURCE_FORKS = "__MACOSX/"  # what macOS adds to archives


def load_examples(task: Task, given: str | None, limit: int | None = None, *, download: bool = False) -> list[Example]:
    """The examples of a task: the first `limit`, or of a task with groups the first of each group."""
    path = find_task_data(task, given, download=download)
    examples, taken = [], Counter[str | None]()
    for where, record in read_records(task, path):
        try:
            example = make_example(task, record)
        except RecordError as error:
            raise UserError(f"task {task.name}: {where} {error}") from None
        if limit is None or taken[example.group] < limit:
            taken[example.group] += 1
            examples.append(example)
        elif task.group_by is None:
            break
    if not examples:
        raise UserError(f"task {task.name}: {path} holds no examples; get the file again")
    return examples


def find_task_data(task: Task, given: str | None, *, download: bool = False) -> Path:
    """The given file, or the one in the given folder, beside an own task or in the cache; downloaded if asked for.

    `given` may name the data of several tasks: NAME=PATH,NAME=PATH, or a folder that holds the files of all.
    """
    if (chosen := _choose_given(task, given)) is not None:
        return _find_in(task, chosen)
    if task.folder is not None and task.url is None:
        path = task.folder / task.file
        if not task.file or not path.exists():
            raise UserError(
                f"task {task.name} has no data: {path} does not exist; correct file in its TOML, or give "
                "--task_data FILE"
            )
        return path
    folder = find_cache_dir() / "tasks"
    path = folder / task.file
    if not path.exists():
        found = [folder / name for name in list_names(task) if (folder / name).exists()]
        if found:
            return found[0]
        if not download:
            raise UserError(
                f"the data of task {task.name} is not here; download {task.url} to {path}, or let gptmill do so: "
                "add --download; or give another place: --task_data FILE"
            )
        _fetch(task, path)
    return path


def list_names(task: Task) -> list[str]:
    """The names under which a folder may hold a task's data."""
    names = [PurePosixPath(task.file).name] if task.file else []
    return [
        *names,
        *(name + suffix for name in names for suffix in COMPRESSIONS),
        *(task.name + end for end in SUFFIXES),
    ]


def _choose_given(task: Task, given: str | None) -> Path | None:
    if given is None:
        return None
    if "=" not in given or Path(given).expanduser().exists():
        return Path(given).expanduser()
    pairs = {name: path for name, _, path in (pair.partition("=") for pair in given.split(","))}
    if not all(pairs.values()):
        raise UserError(f"--task_data {given}: expected TASK=PATH,TASK=PATH, one file, or one folder")
    return Path(pairs[task.name]).expanduser() if task.name in pairs else None


def _find_in(task: Task, path: Path) -> Path:
    """The path itself, or of a folder the file in it that holds the task's data."""
    if not path.exists():
        raise UserError(f"--task_data {path} does not exist; give the file of task {task.name}, or its folder")
    if not path.is_dir():
        return path
    for name in list_names(task):
        for found in sorted(path.rglob(name)):
            return found
    if task.group_by is not None and (path / task.name).is_dir():
        return path / task.name
    if task.group_by is not None and sorted(path.glob("*.jsonl*")):
        return path  # a file for each group
    raise UserError(f"--task_data {path} holds no data of task {task.name}; name the file there {list_names(task)[0]}")


def _fetch(task: Task, path: Path) -> None:
    assert task.url is not None
    checksum = None if task.sha256 is None else f"sha256:{task.sha256}"
    try:
        download_file(task.url, path, checksum)
    except DownloadError as error:
        raise UserError(
            f"cannot download {task.url}: {error}; get the file elsewhere and put it at {path}, or give "
            "--task_data FILE"
        ) from None


def read_records(task: Task, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each record with the place where it is; raises UserError for what is not JSON Lines."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        for file in files:
            yield from read_records(task, file)
        return
    try:
        with ExitStack() as stack:
            for name, data, answers in _open_files(task, path, stack):
                yield from _read_file(task, name, data, answers)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is not a valid zip file: {error}; download it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check it") from None


Opened = tuple[str, io.BufferedReader, IO[bytes] | None]


def _open_files(task: Task, path: Path, stack: ExitStack) -> Iterator[Opened]:
    """The data files of a path, each with its name and its file of answers."""
    if path.suffix == ".zip":
        yield from _open_members(task, path, stack)
        return
    _, compression = split_compression(path.name)
    stored = stack.enter_context(open_regular(path))
    if task.sha256 is not None and path.name == task.file and path.parent == find_cache_dir() / "tasks":
        _verify(task, path)
    data = stored
    if compression is not None:
        data = io.BufferedReader(DecompressedFile(stored, compression, str(path), ReadingOptions.max_expansion))
    answers = None
    if task.answers_file is not None:
        beside = path.with_name(task.answers_file.replace("*", path.name.partition(".")[0]))
        answers = stack.enter_context(open_regular(beside)) if beside.exists() else None
    yield str(path), data, answers


def _verify(task: Task, path: Path) -> None:
    expected = f"sha256:{task.sha256}"
    if (found := hash_content(path, expected)) != expected:
        raise UserError(f"{path} has the wrong checksum: {found}, not {expected}; download it again")


def _open_members(task: Task, path: Path, stack: ExitStack) -> Iterator[Opened]:
    stored = stack.enter_context(open_regular(path))
    archive = stack.enter_context(zipfile.ZipFile(stored))
    names = [name for name in archive.namelist() if not name.startswith(RESOURCE_FORKS)]
    wanted = sorted(fnmatch.filter(names, task.member or "*.jsonl"))
    if not wanted:
        raise UserError(
            f"{path} has no member {task.member or '*.jsonl'}; download it again, or unpack the file that you want"
        )
    for name in wanted:
        answers = None
        if task.answers_file is not None:
            beside = PurePosixPath(name).with_name(task.answers_file.replace("*", PurePosixPath(name).stem))
            answers = stack.enter_context(archive.open(str(beside))) if str(beside) in names else None
        member = cast(io.RawIOBase, stack.enter_context(archive.open(name)))
        yield f"{path}/{name}", io.BufferedReader(member), answers


def _read_file(
    task: Task, name: str, data: io.BufferedReader, answers: IO[bytes] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, (_, line) in enumerate(read_lines(data, name), start=1):
        answer = answers.readline() if answers is not None else b""
        if not line.strip():
            continue
        where = f"line {number} of {name}"
        try:
            record = parse_record(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
        except ValueError as error:
            raise UserError(f"task {task.name}: {where} is not valid JSON: {error}; correct or remove it") from None
        if not isinstance(record, dict):
            raise UserError(f"task {task.name}: {where} is no JSON object; give one record per line")
        if answers is not None and task.answer not in record:
            record[task.answer] = answer.decode("utf-8", errors="replace").strip()
        yield where, record

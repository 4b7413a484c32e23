"""Tasks of lm-evaluation-harness: found by name, and read from local files where given.

Nothing here reaches the network unless the caller allows downloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest
from gptmill.evals.task import list_tasks, load_task
from gptmill.evals.task_data import list_names

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
OUR_NAMES = {"lambada_openai": "lambada"}  # where they differ from the harness'
TASK = re.compile(r"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'\[]+)[\"']?[ \t]*$", re.MULTILINE)
PATTERN = re.compile(r"[*?\[]")
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")


def load_tasks(
    lm_eval: Any, names: Sequence[str], task_data: str | None, folder: Path, *, downloads: bool
) -> dict[str, dict[str, Any]]:
    """The harness' tasks, from local files where there are some; `folder` takes what that needs on disk.

    Raises UserError for an unknown task, and for data that cannot be loaded.
    """
    manager, wanted = _open_manager(lm_eval, names)
    data = find_data(task_data, wanted, manager.all_subtasks)
    for name, file in data.items():
        entry = manager.task_index[name]
        entry.yaml_path = _write_local_task(name, entry.cfg, entry.yaml_path, file, folder)
    tasks = []
    for name in wanted:
        try:
            tasks.append(manager.load(name))
        except Exception as error:  # of many kinds: the network, the data's format, missing fields, the task's code
            raise _explain(name, name in data, error, downloads=downloads) from error
    return _join(tasks)


def find_data(given: str | None, wanted: Sequence[str], known: Collection[str]) -> dict[str, Path]:
    """The files of tasks: the one that is given, those of TASK=FILE,TASK=FILE, or those in a folder.

    There, a file has the name of its task, or that under which gptmill eval --tasks finds it.
    """
    if given is None:
        return {}
    path = Path(given).expanduser()
    if path.is_dir():
        return _find_in_folder(path, wanted, known)
    if "=" not in given or path.exists():
        if len(wanted) > 1:
            raise UserError(f"--task_data {given} is one file for {len(wanted)} tasks; give TASK=FILE,TASK=FILE")
        return {wanted[0]: _check_file(path)}
    pairs = {name: file for name, _, file in (pair.partition("=") for pair in given.split(","))}
    if unknown := [name for name in pairs if name not in known]:
        raise UserError(f"--task_data {given}: {unknown[0]} is none of the tasks{suggest(unknown[0], wanted)}")
    return {name: _check_file(Path(file).expanduser()) for name, file in pairs.items()}


def _find_in_folder(folder: Path, wanted: Sequence[str], known: Collection[str]) -> dict[str, Path]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _find_format(path) is not None]
    found = {path.name.partition(".")[0]: path for path in files}
    shipped = list_tasks()
    for name in wanted:
        own = OUR_NAMES.get(name, name)
        names = list_names(load_task(own)) if own in shipped else []
        if name not in found and (path := next((file for file in files if file.name in names), None)) is not None:
            found[name] = path
    return {name: path for name, path in found.items() if name in known}


def _check_file(file: Path) -> Path:
    """Raises UserError for a file that is not there or has a format that `datasets` cannot read."""
    if not file.is_file():
        raise UserError(f"--task_data {file}: there is no such file; check the path")
    if _find_format(file) is None:
        raise UserError(f"--task_data {file}: lm-evaluation-harness reads {', '.join(FORMATS)} files; convert it first")
    return file


def _find_format(file: Path) -> str | None:
    """The loader of `datasets` for a file."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSED]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _open_manager(lm_eval: Any, names: Sequence[str]) -> tuple[Any, list[str]]:
    """The index of the tasks, and the names with their patterns expanded; raises UserError for one that is unknown.

    The index of all tasks takes half a minute. For tasks alone, the folders of the files that define them suffice; a
    group, a tag or a pattern stands for tasks that lie anywhere.
    """
    texts = _read_definitions(Path(lm_eval.tasks.__file__).parent)
    folders = {name: path.parent for path, text in texts.items() for name in TASK.findall(text)}
    for name in names:
        if not PATTERN.search(name) and not any(name in text for text in texts.values()):
            raise _refuse(name, list(folders))
    if all(name in folders for name in names):
        paths = sorted({folders[name] for name in names})
        return lm_eval.tasks.TaskManager(include_defaults=False, include_path=paths), list(names)
    manager = lm_eval.tasks.TaskManager()
    expanded: dict[str, None] = {}
    for name in names:
        matching = [known for known in manager.all_tasks if fnmatchcase(known, name)]
        if not matching:
            raise _refuse(name, manager.all_tasks)
        expanded |= dict.fromkeys(matching)
    return manager, list(expanded)


@cache
def _read_definitions(folder: Path) -> dict[Path, str]:
    """The thousands of files that define the harness' tasks."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("**/*.yaml"))}


def _refuse(name: str, known: Sequence[str]) -> UserError:
    return UserError(f"lm-evaluation-harness has no task {name[:100]!r}{suggest(name, known)}; check the name")


def _write_local_task(name: str, config: Mapping[str, Any], defined_in: Path, file: Path, folder: Path) -> Path:
    """A task file that includes the harness' own and reads its documents from a local file instead."""
    split = config.get("test_split") or config.get("validation_split")
    if split is None or "class" in config:
        raise UserError(f"task {name} of lm-evaluation-harness cannot read a local file; leave it out of --task_data")
    changes = {
        "include": str(defined_in),
        "task": name,
        "dataset_path": _find_format(file),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file.resolve())}, "cache_dir": str(folder / "datasets")},
        "custom_dataset": None,
        "training_split": None,  # examples for few-shot prompts come from the same file then
        "fewshot_split": None,
        "validation_split": split,
        "test_split": None,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(changes), encoding="utf-8")  # JSON is YAML
    return path


def _explain(name: str, is_local: bool, error: Exception, *, downloads: bool) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if is_local:
        fix = "the file must have the fields of the dataset that the task names"
    elif downloads:
        fix = f"check the connection, or give its data with --task_data {name}=FILE"
    else:
        fix = f"give its data with --task_data {name}=FILE, or add --download"
    return UserError(f"lm-evaluation-harness cannot load task {name} ({reason}); {fix}")


def _join(loaded: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `TaskManager.load` would have returned for all names at once."""
    keys = ("tasks", "groups", "group_map")
    return {key: {name: value for part in loaded for name, value in part.get(key, {}).items()} for key in keys}

"""Tasks of lm-evaluation-harness: found by name, and read from local files where given.

Nothing here reaches the network unless the caller allows downloads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError, suggest

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
FORMATS = {"jsonl": "json", "json": "json", "csv": "csv", "parquet": "parquet"}
TASK = re.compile(r"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'\[]+)[\"']?[ \t]*$", re.MULTILINE)
PATTERN = re.compile(r"[*?\[]")
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")


def import_harness(*, downloads: bool) -> Any:
    """The package lm_eval, online only if it may download; raises UserError with the install command."""
    if not downloads:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))  # read when the libraries are imported
    try:
        import datasets
        import huggingface_hub.constants
        import lm_eval.evaluator
        import lm_eval.tasks
        import lm_eval.utils
    except ImportError:
        raise UserError("--harness needs lm-evaluation-harness; install it with: pip install 'gptmill[eval]'") from None
    # The libraries may have been imported before, with another environment.
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = not downloads
    datasets.disable_progress_bars()
    return lm_eval


def load_tasks(
    lm_eval: Any, names: Sequence[str], data: Mapping[str, Path], folder: Path, *, downloads: bool
) -> dict[str, dict[str, Any]]:
    """The harness' tasks, those named in `data` from their files; `folder` takes what that needs on disk.

    Raises UserError for an unknown task, and for data that cannot be loaded.
    """
    manager, wanted = _open_manager(lm_eval, names)
    for name, file in data.items():
        entry = manager.task_index.get(name)
        if entry is not None and entry.yaml_path is not None:
            entry.yaml_path = _write_local_task(name, entry.cfg, entry.yaml_path, file, folder)
    tasks = []
    for name in wanted:
        try:
            tasks.append(manager.load(name))
        except Exception as error:  # of many kinds: the network, the data's format, missing fields, the task's code
            raise _explain(name, name in data, error, downloads=downloads) from error
    return _join(tasks)


def _open_manager(lm_eval: Any, names: Sequence[str]) -> tuple[Any, list[str]]:
    """The index of the tasks, and the names with their patterns expanded; raises UserError for one that is unknown.

    The index of all tasks takes half a minute. For tasks alone, the folders of the files that define them suffice; a
    group, a tag or a pattern stands for tasks that lie anywhere.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in _list_files(lm_eval)}
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


def _list_files(lm_eval: Any) -> list[Path]:
    return sorted(Path(lm_eval.tasks.__file__).parent.glob("**/*.yaml"))


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


def _find_format(file: Path) -> str:
    """The loader of `datasets` for a file; raises UserError for one that it has no loader for."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSED]
    found = FORMATS.get(suffixes[-1].removeprefix(".")) if suffixes else None
    if found is None:
        raise UserError(f"{file}: lm-evaluation-harness reads .jsonl, .json, .csv and .parquet files; convert it first")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; check the path")
    return found


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

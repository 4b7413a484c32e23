"""Plug-ins: Python files or packages that register parts of the user's own, whose options become fields of the config.

This module knows the names and options of registered parts. What a part does is in the table of its kind, such as
`OPTIMIZERS`; `gptmill.register` fills both.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
)
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, TypeVar

from gptmill.config.errors import UserError

ENTRY_POINTS = "gptmill.plugins"
MODULE_PREFIX = "_gptmill_plugin_"
CODE_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
MAX_SHOWN = 300
PART_FIELDS = ("architecture", "attention", "feed_forward", "optimizer", "schedule")
"""Options of which a registered part is one more choice."""

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A registered part: its kind and name, the dataclass of its options, and the object that was registered."""

    kind: str
    name: str
    options: type
    target: Any
    fingerprint: str
    """Hash of its code when it was registered; empty where there is no source."""


PARTS: dict[tuple[str, str], Part] = {}
"""All registered parts by kind and name."""
LOADED: dict[str, str] = {}
"""Plug-ins that were loaded in this process, by the name they were given with, and their modules' names."""
_on_change: list[Callable[[], None]] = []


@dataclass(frozen=True)
class PartOptions:
    """Options of registered parts of some kinds, all of them flat fields of the section that holds this."""

    kinds: ClassVar[tuple[str, ...]] = ()
    values: tuple[Any, ...] = ()

    def find(self, options: type[T]) -> T:
        """The options of one part."""
        return next((value for value in self.values if type(value) is options), None) or options()


@dataclass(frozen=True)
class ReadingPartOptions(PartOptions):
    """Options of the user's tokenizers, formats and sources."""

    kinds = ("tokenizer", "format", "source")


@dataclass(frozen=True)
class EvaluatorPartOptions(PartOptions):
    """Options of the user's evaluators."""

    kinds = ("evaluator",)


@dataclass(frozen=True)
class TrackerPartOptions(PartOptions):
    """Options of the user's trackers."""

    kinds = ("tracker",)


@dataclass(frozen=True)
class UnloadedPart:
    """Stands for the chosen part of a plug-in that is not loaded, in the config of a run that is only read."""

    tag: str


@dataclass(frozen=True)
class UnloadedOption:
    """An option of a plug-in that is not loaded, as text."""

    section: str
    name: str
    value: str


@dataclass(frozen=True)
class UnloadedOptions(PartOptions):
    """The options of plug-ins that are not loaded."""

    values: tuple[UnloadedOption, ...] = ()


@dataclass(frozen=True)
class PluginConfig:
    """Plug-ins"""

    plugin: str | None = None
    """Python files or installed packages that register parts of your own, e.g. my_parts.py,other.py."""
    unloaded: UnloadedOptions = field(default_factory=UnloadedOptions)


def add_part(part: Part) -> None:
    """Adds a part, or replaces it if it comes from the same module: a notebook cell may run again."""
    PARTS[part.kind, part.name] = part
    for clear in _on_change:
        clear()


def clear_on_change(clear: Callable[[], None]) -> None:
    """Registers a cache that depends on the registered parts."""
    _on_change.append(clear)


def list_parts(kinds: Iterable[str]) -> list[Part]:
    """The registered parts of these kinds, in order of registration."""
    return [part for part in PARTS.values() if part.kind in kinds]


def load_plugins(names: str | None) -> None:
    """Loads plug-ins given as comma-separated paths of files or names of modules; each one once.

    Raises UserError for one that does not exist or raises.
    """
    for name in split_names(names):
        if name not in LOADED:
            LOADED[name] = (_load_file(name) if name.endswith(".py") else _load_module(name)).__name__


def load_installed_plugins() -> None:
    """Loads all packages that announce themselves by the entry point `gptmill.plugins`; reports those that fail."""
    for entry in _list_entry_points():
        if entry.name not in LOADED:
            try:
                LOADED[entry.name] = _load_entry_point(entry).__name__
            except UserError as error:
                sys.stderr.write(f"warning: {error}\n")


def name_reloadable(kinds: Iterable[str]) -> str | None:
    """The plug-ins that a new process must load to have all registered parts of these kinds; empty if it needs none.

    None if it cannot have them, since a script or a notebook registered one.
    """
    modules = {part.target.__module__ for part in list_parts(kinds)}
    names = [name for name, module in LOADED.items() if any(_is_inside(own, module) for own in modules)]
    is_whole = all(any(_is_inside(own, LOADED[name]) for name in names) for own in modules)
    return ",".join(names) if is_whole else None


def _is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def split_names(names: str | None) -> list[str]:
    """The items of a comma-separated list."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def make_fingerprint(target: Any) -> str:
    """SHA-256 of the code that defines an object: all files of its package, or its file with those that it imports.

    Of what a script or a notebook defines, only the class or function itself: the rest of them changes all the time.
    """
    module = sys.modules.get(getattr(target, "__module__", ""))
    path = getattr(module, "__file__", None)
    if path is not None and target.__module__ != "__main__":
        return _hash_files(Path(path))
    try:
        return f"sha256:{hashlib.sha256(inspect.getsource(target).encode()).hexdigest()}"
    except (OSError, TypeError, SyntaxError):
        return ""


def fingerprint_plugin(name: str) -> str:
    """SHA-256 of the code of a plug-in, as `make_fingerprint` has it, without running any; empty if there is none."""
    if name.endswith(".py"):
        return _hash_files(Path(name).expanduser().resolve(), CODE_SUFFIXES)
    spec = PathFinder.find_spec(name.partition(".")[0])  # of an inner module it would import the outer ones
    return _hash_files(Path(spec.origin), CODE_SUFFIXES) if spec is not None and spec.origin else ""


def is_named(name: str) -> bool:
    """Whether the user has loaded a plug-in already, under this name or another, or imported it."""
    if not name.endswith(".py"):
        return name in LOADED or name in sys.modules
    path = Path(name).expanduser().resolve()
    modules = (sys.modules.get(module) for module in (*LOADED.values(), *_list_modules()))
    return name in LOADED or any(Path(getattr(module, "__file__", None) or "").resolve() == path for module in modules)


def _list_modules() -> set[str]:
    """The modules that have registered parts."""
    return {part.target.__module__ for part in PARTS.values()}


def _hash_files(path: Path, suffixes: tuple[str, ...] = (".py",)) -> str:
    try:
        digest = hashlib.sha256()
        for file in sorted(_list_files(path, suffixes), key=str):
            digest.update(file.read_bytes())
        return f"sha256:{digest.hexdigest()}" if path.is_file() else ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # Python cannot run such a file either
        return ""


def _list_files(path: Path, suffixes: tuple[str, ...]) -> set[Path]:
    """All files of a package; or a file and the modules and packages beside it that it imports, directly or not.

    With the suffixes of compiled modules, these count, too; what they import is unknown.
    """
    if path.name == "__init__.py":
        return _list_package(path.parent, suffixes)
    files, waiting = set[Path](), [path]
    while waiting:
        file = waiting.pop()
        if file not in files and file.is_file():
            files.add(file)
            names = _list_imports(file) if file.suffix == ".py" else set[str]()
            waiting += [path.parent / f"{name}{suffix}" for name in names for suffix in suffixes]
            waiting += [inner for name in names for inner in _list_package(path.parent / name, suffixes)]
    return files


def _list_package(folder: Path, suffixes: tuple[str, ...]) -> set[Path]:
    return {path for suffix in suffixes for path in folder.rglob(f"*{suffix}")}


def _list_imports(file: Path) -> set[str]:
    """The top-level names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _load_file(name: str) -> ModuleType:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"there is no plug-in {name}; give the path of a Python file, or the name of a package")
    path = path.resolve()
    label = MODULE_PREFIX + path.stem + "_" + hashlib.sha256(str(path).encode()).hexdigest()[:8]
    if label in sys.modules:
        return sys.modules[label]
    loader = _SourceLoader(label, str(path))
    spec = importlib.util.spec_from_file_location(label, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import files beside it, as a script may
    _import_source_only(path.parent)
    try:
        _run(name, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[label]
        raise
    return module


class _SourceLoader(SourceFileLoader):
    """Compiles what it loads: the bytecode beside a file may be of another one, which no fingerprint shows."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_source_only(folder: Path) -> None:
    """Lets modules from a folder and those inside it be imported from what `fingerprint_plugin` reads."""
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES)

    def open_folder(path: str) -> FileFinder:
        if not Path(path).is_relative_to(folder) or "site-packages" in Path(path).parts:
            raise ImportError
        return FileFinder(path, *loaders)

    sys.path_hooks.insert(0, open_folder)
    sys.path_importer_cache.pop(str(folder), None)


def _load_module(name: str) -> ModuleType:
    for entry in _list_entry_points():
        if entry.name == name:
            return _load_entry_point(entry)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UserError(f"there is no plug-in {name}; give the path of a .py file, or the name of an installed package")
    return _run(name, lambda: importlib.import_module(name))


def _list_entry_points() -> Iterable[EntryPoint]:
    """Looks first whether there are any: to parse those of all packages takes long, and every command waits for it."""
    texts = (each.read_text("entry_points.txt") for each in distributions())
    return entry_points(group=ENTRY_POINTS) if any(ENTRY_POINTS in (text or "") for text in texts) else ()


def _load_entry_point(entry: EntryPoint) -> ModuleType:
    """Imports the module that an entry point names, and calls the function in it, if it names one."""
    module = _run(entry.name, lambda: importlib.import_module(entry.module))
    if entry.attr:
        _run(entry.name, entry.load())
    return module


def _run(name: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = _find_place(error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_SHOWN]
        raise UserError(f"the plug-in {name} cannot be loaded: {reason}{place}; fix it there") from error


def _find_place(error: BaseException) -> str:
    """The last line outside of the standard library's import machinery at which the error was raised."""
    traceback, place = error.__traceback__, ""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith("<frozen"):
            place = f" ({name}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return place

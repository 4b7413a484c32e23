"""Imports point down the layers and, inside a layer, down its packages; none is hidden in a function, none goes in a
circle, and config knows no torch. Each rule is shown to fail on a tree that breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gptmill

SOURCE = Path(gptmill.__file__).parent
# Packages on one line may not import each other.
LAYERS = [
    {"config"},
    {"data", "models", "runtime"},
    {"runs"},
    {"inference"},
    {"evals"},
    {"training"},
    {"experiments"},
    {"api"},
    {"web"},
    {"cli"},
]
HEIGHT = {package: height for height, packages in enumerate(LAYERS) for package in packages}
# What each package may import of its own layer. A layer's name alone stands for the modules directly in it.
INSIDE = {
    "data": {"data.batches", "data.cleaning", "data.pipeline", "data.shards", "data.sources", "data.tokenizers"},
    "data.cleaning": set(),
    "data.sources": {"data"},
    "data.tokenizers": {"data"},
    "data.shards": {"data", "data.tokenizers"},
    "data.batches": {"data", "data.shards", "data.tokenizers"},
    "data.pipeline": {"data", "data.cleaning", "data.shards", "data.sources", "data.tokenizers"},
    "models": set(),  # the plain model knows nothing of the fast one
    "models.huggingface": {"models"},
    "models.kernels": {"models"},
    "models.fused": {"models", "models.kernels"},
    "runtime": set(),
    "runtime.parallel": {"runtime"},
    "runs": {"runs.checkpoints"},
    "runs.checkpoints": {"runs"},
    "runs.reporting": {"runs"},
    "runs.trackers": {"runs"},
    "inference": set(),
    "inference.export": {"inference"},
    "inference.importing": {"inference"},
    "training": {"training.optimizers"},
    "training.optimizers": set(),
    "experiments": set(),
    "experiments.bench": {"experiments"},
    "experiments.budget": {"experiments"},
    "experiments.doctor": {"experiments"},
    "experiments.tune": {"experiments"},
}
HEAVY = {"torch", "numpy"}


@dataclass(frozen=True)
class Import:
    """One import of a module, with its line, and whether it stands in a function."""

    module: str
    line: int
    is_hidden: bool


@dataclass(frozen=True)
class Module:
    """One file: its name without `gptmill.`, the package that it belongs to, and what it imports."""

    name: str
    package: str
    path: Path
    internal: list[Import]
    external: list[Import]

    @property
    def layer(self) -> str:
        return self.name.split(".")[0]


def read_modules(source: Path) -> dict[str, Module]:
    """By name; the file of a package has the package's name, that of gptmill itself the empty one."""
    paths = {_name_module(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}
    modules = {}
    for name, path in paths.items():
        internal, external = [], []
        for found in _list_imports(ast.parse(path.read_text(encoding="utf-8"))):
            if found.module.split(".")[0] == "gptmill":
                internal.append(Import(_find_module(found.module, paths), found.line, found.is_hidden))
            else:
                external.append(found)
        modules[name] = Module(name, _find_package(name, path), path, internal, external)
    return modules


def _name_module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _find_package(name: str, path: Path) -> str:
    """The layer, or the package directly in it; packages further down belong to that."""
    parts = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    return ".".join(parts[:2])


def _find_module(imported: str, paths: dict[str, Path]) -> str:
    """The module that an import loads: that of the name itself, or the one that defines it."""
    name = imported.removeprefix("gptmill").removeprefix(".")
    while name not in paths and "." in name:
        name = name.rpartition(".")[0]
    return name if name in paths or name.split(".")[0] in {*HEIGHT, "relative"} else ""


def _list_imports(tree: ast.Module) -> Iterator[Import]:
    for node, is_hidden in _list_statements(tree):
        if isinstance(node, ast.ImportFrom):
            module = "gptmill.relative" if node.level else str(node.module)
            is_own = module.split(".")[0] == "gptmill"
            for name in node.names:
                yield Import(f"{module}.{name.name}" if is_own else module, node.lineno, is_hidden)
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, is_hidden)


def _list_statements(parent: ast.AST, is_hidden: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All of them, with whether they are in a function; expressions, which are most of a file, hold none."""
    is_hidden |= isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node, is_hidden
            yield from _list_statements(node, is_hidden)


def find_imports_that_point_up(modules: dict[str, Module]) -> list[str]:
    """Also a layer or a package that the lists do not know, and relative imports, which say not where they point."""
    found = []
    for module in modules.values():
        if module.layer in ("", "__main__"):
            continue
        if module.layer not in HEIGHT:
            found.append(f"{module.path}: {module.layer} is in no layer")
        elif module.package != module.layer and module.package not in INSIDE:
            found.append(f"{module.path}: {module.package} has no place in its layer")
        for each in module.internal:
            layer = each.module.split(".")[0]
            if layer and layer != module.layer and not HEIGHT.get(layer, 99) < HEIGHT.get(module.layer, -1):
                found.append(f"{module.path}:{each.line} imports {each.module}")
    return found


def find_imports_that_leave_their_package(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        allowed = {module.package} | INSIDE.get(module.package, set())
        for each in module.internal:
            imported = modules.get(each.module)
            if imported and imported.layer == module.layer and imported.package not in allowed:
                found.append(f"{module.path}:{each.line} imports {each.module}")
    return found


def find_hidden_imports(modules: dict[str, Module]) -> list[str]:
    """Verbs load lazily, so that help needs no torch; an operation loads its own kernel when it first runs, since
    Triton may be absent. Nothing else does."""
    return [
        f"{module.path}:{each.line} imports {each.module} in a function"
        for module in modules.values()
        for each in module.internal
        if each.is_hidden and module.layer != "cli" and each.module != f"{module.name}_triton"
    ]


def find_circles(modules: dict[str, Module]) -> list[str]:
    """Modules that, one by one, import each other, by whatever they import when they are loaded."""
    done: set[str] = set()
    found = []

    def follow(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for each in modules[name].internal:
                if each.module and each.module in modules and not each.is_hidden:
                    follow(each.module, [*path, name])
            done.add(name)

    for name in modules:
        follow(name, [])
    return found


def find_heavy_imports_of_config(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{each.line} imports {each.module}"
        for module in modules.values()
        for each in module.external
        if module.layer == "config" and each.module.split(".")[0] in HEAVY
    ]


RULES = [
    find_imports_that_point_up,
    find_imports_that_leave_their_package,
    find_hidden_imports,
    find_circles,
    find_heavy_imports_of_config,
]


def assert_none(offences: list[str]) -> None:
    assert not offences, "\n".join(offences)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(SOURCE)


def test_imports_point_down(modules: dict[str, Module]) -> None:
    assert len(modules) > 100
    assert_none(find_imports_that_point_up(modules))


def test_inside_a_layer_imports_point_down_its_packages(modules: dict[str, Module]) -> None:
    assert_none(find_imports_that_leave_their_package(modules))


def test_no_internal_import_hides_in_a_function(modules: dict[str, Module]) -> None:
    assert_none(find_hidden_imports(modules))


def test_no_modules_import_each_other_in_a_circle(modules: dict[str, Module]) -> None:
    assert_none(find_circles(modules))


def test_lines_end_at_line_feeds_alone() -> None:
    """`str.splitlines` cuts names, prompts and JSON also at U+2028, U+0085 and the like."""
    assert [path for path in SOURCE.rglob("*.py") if ".splitlines(" in path.read_text(encoding="utf-8")] == []


def test_config_never_imports_torch(modules: dict[str, Module]) -> None:
    assert_none(find_heavy_imports_of_config(modules))


# Files by name, and the one rule that they break; "" where they break none.
TREES = {
    "down": ({"runs/a.py": "from gptmill.config.b import x", "config/b.py": "import tomllib"}, ""),
    "up": ({"config/a.py": "from gptmill.runs.b import x", "runs/b.py": ""}, "find_imports_that_point_up"),
    "beside": ({"data/a.py": "import gptmill.models.b", "models/b.py": ""}, "find_imports_that_point_up"),
    "up by name": ({"data/a.py": "from gptmill import runs", "runs/__init__.py": ""}, "find_imports_that_point_up"),
    "relative": ({"runs/a.py": "from . import b", "runs/b.py": ""}, "find_imports_that_point_up"),
    "no layer": ({"helpers/a.py": ""}, "find_imports_that_point_up"),
    "no place in its layer": ({"runs/other/a.py": ""}, "find_imports_that_point_up"),
    "plain model, fast part": (
        {"models/gpt.py": "from gptmill.models.fused.block import x", "models/fused/block.py": ""},
        "find_imports_that_leave_their_package",
    ),
    "kernel, fast part": (
        {"models/kernels/a.py": "import gptmill.models.fused.block", "models/fused/block.py": ""},
        "find_imports_that_leave_their_package",
    ),
    "fast part, both": (
        {
            "models/fused/a.py": "from gptmill.models.gpt import x\nfrom gptmill.models.kernels.b import y",
            "models/gpt.py": "",
            "models/kernels/b.py": "from gptmill.models import gpt",
        },
        "",
    ),
    "in a function": (
        {"runs/a.py": "def f():\n    from gptmill.config.b import x", "config/b.py": ""},
        "find_hidden_imports",
    ),
    "in a method": (
        {"runs/a.py": "class A:\n    async def f(self):\n        import gptmill.config.b", "config/b.py": ""},
        "find_hidden_imports",
    ),
    "a verb's": ({"cli/a.py": "def run():\n    from gptmill.runs.b import x", "runs/b.py": ""}, ""),
    "an operation's kernel": (
        {
            "models/kernels/a.py": "def f():\n    from gptmill.models.kernels import a_triton",
            "models/kernels/a_triton.py": "import triton",
        },
        "",
    ),
    "another operation's kernel": (
        {
            "models/kernels/b.py": "def f():\n    from gptmill.models.kernels import a_triton",
            "models/kernels/b_triton.py": "",
            "models/kernels/a_triton.py": "",
        },
        "find_hidden_imports",
    ),
    "two in a circle": (
        {"runs/a.py": "from gptmill.runs.b import x", "runs/b.py": "from gptmill.runs import a"},
        "find_circles",
    ),
    "three in a circle": (
        {
            "runs/a.py": "import gptmill.runs.b",
            "runs/b.py": "from gptmill.runs.checkpoints.c import x",
            "runs/checkpoints/c.py": "from gptmill.runs.a import y",
        },
        "find_circles",
    ),
    "torch in config": ({"config/a.py": "from torch import Tensor"}, "find_heavy_imports_of_config"),
    "numpy in config, late": (
        {"config/a.py": "def f():\n    import numpy.random"},
        "find_heavy_imports_of_config",
    ),
}


@pytest.mark.parametrize(("files", "broken"), TREES.values(), ids=TREES.keys())
def test_a_tree_that_breaks_a_rule_is_found_out(tmp_path: Path, files: dict[str, str], broken: str) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {rule.__name__: rule(read_modules(tmp_path)) for rule in RULES}
    assert [name for name, offences in found.items() if offences] == [broken] * bool(broken), found

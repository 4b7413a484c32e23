"""The scripts of docs/site, imported: they belong to no package."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from gptmill.cli.flags import Command, ask_command
from gptmill.cli.main import import_verb

FOLDER = Path(__file__).parents[1] / "docs" / "site"


@cache
def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def find_command(verb: str) -> Command:
    """The command line of a verb."""
    return ask_command(import_verb(verb).run)

"""`import gptmill` offers exactly the documented names, typed, and without torch until one of them needs it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gptmill

NAMES = """
Attention Batch BlockContext Compressed ConfigError Corpus Event Finding LayerKVCache Model ModelConfig OptimizerConfig
Run RunConfig Tracker UserError __version__ compress doctor evaluate export_model import_model load make_config
open_corpus open_run open_tensorboard plan plan_within_budget prepare register report resume train
train_within_budget
""".split()


def test_the_public_names_are_these() -> None:
    assert gptmill.__all__ == NAMES
    assert dir(gptmill) == NAMES
    for name in NAMES:
        assert getattr(gptmill, name) is not None
    assert (Path(gptmill.__file__).parent / "py.typed").exists()


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'trian'"):
        gptmill.trian  # noqa: B018


def test_what_a_type_checker_sees_is_what_a_program_gets() -> None:
    source = Path(gptmill.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if str(node.module).startswith("gptmill.")]
    seen = {name.name: str(node.module) for node in own for name in node.names}
    assert {*seen, "__version__"} == set(NAMES)
    for name, module in seen.items():
        assert getattr(gptmill, name) is getattr(importlib.import_module(module), name)


def test_importing_gptmill_and_making_a_config_need_no_torch() -> None:
    code = "import sys, gptmill; gptmill.make_config('demo', max_steps=3); print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"

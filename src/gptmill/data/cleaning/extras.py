"""Lazy imports of the optional libraries in the `data` extra."""

from __future__ import annotations

import importlib
from typing import Any

from gptmill.config.errors import UserError


def import_for(option: str, module: str) -> Any:
    """Imports the module that `option` needs; raises UserError with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{option} needs {module}; install it with: pip install 'gptmill[data]'") from None
